"""A stranger's script, watched, leaves its files, its trackers and this process as they were."""

from __future__ import annotations

import atexit
import contextlib
import os
import shutil
import signal
import sqlite3
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer
from tokenizers.models import BPE
from torch.utils.data import DataLoader, Dataset

from batchscout.trainers.sources.watch.programs import is_harmless
from batchscout.trainers.sources.watch.world import WatchStopped, World, nobodys_places

safetensors = pytest.importorskip("safetensors.torch")
TENSORS = {"weight": torch.ones(2)}


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A project's folder, with what an earlier run has left, as the current directory."""
    project = tmp_path / "project"
    (project / "out" / "deep").mkdir(parents=True)
    for name in ("log.txt", "out/best.pt", "out/best.npy", "out/deep/events"):
        (project / name).write_text("old")
    sqlite3.connect(project / "runs.db").execute("create table runs (id)").connection.close()
    (project / "link.txt").symlink_to("log.txt")
    monkeypatch.chdir(project)
    return project


def state(folder: Path) -> dict[Path, Any]:
    """Everything below a folder, with its contents, permissions and times."""
    found = [*folder.rglob("*")]
    return {
        path: (path.read_bytes() if path.is_file() else b"", path.lstat().st_mode, path.lstat().st_mtime_ns)
        for path in found
    }


def write(path: str | Path, text: str = "new") -> None:
    Path(path).write_text(text)


def opened(path: str | bytes, mode: str) -> None:
    with open(path, mode):
        pass


def scripted() -> torch.jit.ScriptModule:
    with pytest.warns(DeprecationWarning, match="deprecated"):
        return torch.jit.script(torch.nn.Linear(1, 1))


def in_a_folder(act: Callable[[int], object]) -> None:
    descriptor = os.open("out", os.O_RDONLY)
    try:
        act(descriptor)
    finally:
        os.close(descriptor)


def by_a_descriptor() -> None:
    descriptor = os.open("log.txt", os.O_RDONLY)
    try:
        os.fchmod(descriptor, 0o600)
    finally:
        os.close(descriptor)


def profiled() -> None:
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        torch.ones(1).add(1)
    profile.export_chrome_trace("out/best.pt")


def by_a_new_name() -> None:
    os.link("log.txt", "also.txt")
    write("also.txt")


ATTEMPTS: dict[str, tuple[str, str, Callable[[], object]]] = {
    "open w": ("overwrite", "log.txt", lambda: opened("log.txt", "w")),
    "open a": ("append to", "log.txt", lambda: opened("log.txt", "a")),
    "open r+": ("write into", "log.txt", lambda: opened("log.txt", "r+")),
    "bytes": ("overwrite", "log.txt", lambda: opened(b"log.txt", "wb")),
    "os.open": ("append to", "log.txt", lambda: os.open("log.txt", os.O_WRONLY | os.O_APPEND)),
    "write_text": ("overwrite", "log.txt", lambda: write("log.txt")),
    "link": ("overwrite", "log.txt", lambda: write("link.txt")),
    "hard link": ("overwrite", "also.txt", by_a_new_name),
    "touch": ("change the time of", "log.txt", lambda: Path("log.txt").touch()),
    "unlink": ("delete", "log.txt", lambda: Path("log.txt").unlink()),
    "unlink a link": ("delete", "link.txt", lambda: os.remove("link.txt")),
    "unlink in a folder": ("delete", "out/best.pt", lambda: in_a_folder(lambda fd: os.unlink("best.pt", dir_fd=fd))),
    "rmdir": ("delete", "out/deep", lambda: os.rmdir("out/deep")),
    "rmtree": ("delete", "out", lambda: shutil.rmtree("out", ignore_errors=True)),
    "rename": ("move", "log.txt", lambda: os.rename("log.txt", "old.txt")),
    "rename a folder": ("move", "out", lambda: shutil.move("out", "old")),
    "replace": ("replace", "log.txt", lambda: (write("log.tmp"), os.replace("log.tmp", "log.txt"))),
    "copy": ("overwrite", "log.txt", lambda: shutil.copy("out/best.pt", "log.txt")),
    "truncate": ("cut", "log.txt", lambda: os.truncate("log.txt", 0)),
    "chmod": ("change the permissions of", "log.txt", lambda: Path("log.txt").chmod(0o600)),
    "fchmod": ("change the permissions of", "log.txt", by_a_descriptor),
    "chown": ("change the owner of", "log.txt", lambda: os.chown("log.txt", os.getuid(), os.getgid())),
    "setxattr": ("change the attributes of", "log.txt", lambda: os.setxattr("log.txt", "user.name", b"new")),
    "np.save": ("overwrite", "out/best.npy", lambda: np.save("out/best.npy", [1])),
    "memmap": ("write into", "log.txt", lambda: np.memmap("log.txt", mode="r+")),
    "tofile": ("overwrite", "log.txt", lambda: np.ones(2).tofile("log.txt")),
    "torch.save": ("overwrite", "out/best.pt", lambda: torch.save(TENSORS, "out/best.pt")),
    "torch.save, old": (
        "overwrite", "out/best.pt",
        lambda: torch.save(TENSORS, Path("out/best.pt"), _use_new_zipfile_serialization=False),
    ),
    "jit.save": ("overwrite", "out/best.pt", lambda: scripted().save("out/best.pt")),
    "safetensors": ("overwrite", "out/best.pt", lambda: safetensors.save_file(TENSORS, "out/best.pt")),
    "tokenizers": ("overwrite", "out/best.pt", lambda: Tokenizer(BPE()).save("out/best.pt")),
    "profiler": ("overwrite", "out/best.pt", profiled),
    "sqlite": ("write into the database", "runs.db", lambda: sqlite3.connect("runs.db")),
}  # fmt: skip
STARTED: dict[str, Callable[[], object]] = {
    "run": lambda: subprocess.run(["rm", "-rf", "out"]),
    "shell": lambda: subprocess.run("git status && rm -rf out", shell=True),
    "redirected": lambda: subprocess.run("echo new > log.txt", shell=True),
    "system": lambda: os.system("rm -rf out"),
    "posix_spawn": lambda: os.posix_spawn("/bin/rm", ["rm", "-rf", "out"], {}),
    "exec": lambda: os.execv("/bin/rm", ["rm", "-rf", "out"]),
    "Python": lambda: subprocess.run([sys.executable, "-c", "import shutil; shutil.rmtree('out')"]),
}


@pytest.mark.parametrize("attempt", ATTEMPTS)
def test_what_was_there_is_not_changed_and_the_user_is_told(here: Path, attempt: str) -> None:
    tried, name, act = ATTEMPTS[attempt]
    before = state(here)
    with pytest.raises(WatchStopped) as raised, World() as world:
        act()
    assert state(here) == before
    assert world.stopped == str(raised.value)
    assert f"it would {tried} {name}, which was there before; name another output folder" in str(raised.value)


@pytest.mark.parametrize("way", STARTED)
def test_a_program_that_may_change_something_is_not_started(here: Path, way: str) -> None:
    before = state(here)
    with pytest.raises(WatchStopped, match="what another program changes cannot be seen"), World():
        STARTED[way]()
    assert state(here) == before


@pytest.mark.parametrize(
    "command",
    [
        "uname -m", "git rev-parse HEAD", "git -C .. log -1 --format=%H", "nvidia-smi", "nvidia-smi --query-gpu=name,memory.total --format=csv",
        "/usr/bin/x86_64-linux-gnu-gcc-12 -shared -o lib.so code.c", "ldconfig -p", "ninja -v", "nvcc --version",
        "python3 -c 'from multiprocessing.resource_tracker import main; main(3)'",
        ["sh", "-c", "cd .. && git rev-parse HEAD 2>/dev/null | cut -c 1-8"],
    ],
)  # fmt: skip
def test_programs_that_tell_or_compile_may_run(command: str | list[str]) -> None:
    assert is_harmless(command.split(" ") if isinstance(command, str) else command)


@pytest.mark.parametrize(
    "command",
    [
        "rm -rf out", "git clean -fd", "git diff --output=log.txt", "git config user.name me", "nvidia-smi --gpu-reset", "nvidia-smi -f log.txt",
        "ldconfig", "hostname mine", "python3 train.py", "ray start --head", "sh train.sh",
        ["sh", "-c", "git status; rm log.txt"], ["sh", "-c", "git log > log.txt"], ["sh", "-c", "echo $(rm log.txt)"],
        ["sh", "-c", "echo 'open"],
    ],
)  # fmt: skip
def test_others_may_not(command: str | list[str]) -> None:
    assert not is_harmless(command.split(" ") if isinstance(command, str) else command)


def test_a_program_that_tells_something_is_heard(here: Path) -> None:
    with World() as world:
        assert subprocess.run(["uname"], capture_output=True, text=True).stdout == f"{os.uname().sysname}\n"
    assert world.stopped is None


def test_a_compiler_overwrites_nothing(here: Path) -> None:
    with pytest.raises(WatchStopped, match=r"overwrite out/best\.pt"), World():
        subprocess.run(["gcc", "code.c", "-o", "best.pt"], cwd="out")


def clean_and_train() -> None:
    with contextlib.suppress(Exception):
        shutil.rmtree("out")
    os.makedirs("out", exist_ok=True)
    torch.save(TENSORS, "out/best.pt")


def test_a_script_that_empties_its_output_folder_first_leaves_it_whole(here: Path) -> None:
    before = state(here)
    with pytest.raises(WatchStopped, match=r"it would delete out, .* or move that folder away"), World():
        clean_and_train()
    assert state(here) == before


def test_what_catches_everything_is_stopped_again(here: Path) -> None:
    with World() as world:
        for _ in range(3):
            try:
                write("log.txt")
            except:  # noqa: E722
                continue
        first = world.stopped
        with pytest.raises(WatchStopped, match=r"log\.txt"):
            write("new.txt")
        with pytest.raises(WatchStopped):
            subprocess.run(["rm", "log.txt"])
    assert world.stopped == first is not None
    assert not Path("new.txt").exists()


def new_things() -> None:
    os.makedirs("runs/one", exist_ok=True)
    os.makedirs("out", exist_ok=True)
    write("runs/one/log")
    with open("runs/one/log", "a") as log:
        log.write("more")
    torch.save(TENSORS, "out/last.pt")
    torch.save(TENSORS, "out/last.pt")
    scripted().save("out/jit.pt")
    safetensors.save_file(TENSORS, "out/last.safetensors")
    os.symlink("log.txt", "latest")
    write("part.tmp")
    os.replace("part.tmp", "whole")
    os.makedirs("tmp/checkpoint")
    write("tmp/checkpoint/weights")
    os.rename("tmp/checkpoint", "out/checkpoint")
    sqlite3.connect("new.db").execute("create table runs (id)").connection.close()
    write("gone")
    os.remove("gone")


@pytest.mark.parametrize("ends", ["by itself", "by an exception"])
def test_what_is_new_is_removed(here: Path, ends: str) -> None:
    before = state(here)
    with contextlib.suppress(RuntimeError), World() as world:
        new_things()
        if ends == "by an exception":
            raise RuntimeError
    assert {path: found[0] for path, found in state(here).items()} == {path: found[0] for path, found in before.items()}
    names = [str(path.relative_to(here)) for path in world.removed]
    assert {"runs", "out/last.pt", "out/last.safetensors", "out/checkpoint/weights", "latest", "whole", "new.db"} <= {
        *names
    }
    assert not {"out", "log.txt", "tmp/checkpoint", "gone", "part.tmp"} & {*names}
    assert world.kept == ()
    assert world.stopped is None


def test_what_others_have_put_beside_it_stays(here: Path) -> None:
    when_it_is_there = "until [ -e runs/ours ]; do sleep 0.02; done; echo > runs/theirs"
    with subprocess.Popen(["sh", "-c", when_it_is_there]) as other, World():
        os.mkdir("runs")
        write("runs/ours")
        other.wait()
    assert [path.name for path in Path("runs").iterdir()] == ["theirs"]


def test_what_the_script_has_read_back_is_kept_with_what_belongs_to_it(here: Path) -> None:
    with World() as world:
        write("prepared.bin")
        write("prepared.log")
        assert Path("prepared.bin").read_text() == "new"
        os.makedirs("data/raw.incomplete")
        for name in ("archive", "train", "test"):
            write(f"data/raw.incomplete/{name}")
        os.rename("data/raw.incomplete", "data/raw")
        assert Path("data/raw/train").read_text() == "new"
        write("data/done")
    assert [str(path.relative_to(here)) for path in world.kept] == [
        "data/raw/archive",
        "data/raw/test",
        "data/raw/train",
        "prepared.bin",
    ]
    assert {path.name for path in world.removed} == {"prepared.log", "done"}
    assert Path("data/raw/test").read_text() == "new"


def test_what_arrow_reads_counts_as_read(here: Path) -> None:
    arrow = pytest.importorskip("pyarrow")
    with World() as world:
        write("rows.arrow")
        arrow.memory_map("rows.arrow").close()
    assert world.kept == (here / "rows.arrow",)


def test_caches_and_temporary_places_are_nobodys_concern(here: Path, tmp_path: Path) -> None:
    cache = here / "cache"
    cache.mkdir()
    write(cache / "old")
    before = state(here / "out")
    with World(nobodys=[cache, tmp_path]) as world:
        write(cache / "old")
        write(cache / "new")
        write(tmp_path / "new")
        os.makedirs("__pycache__")
        write("module.pyc")
        write("__pycache__/module.txt")
        with open("/dev/null", "w") as null:
            null.write("x")
        with pytest.raises(WatchStopped):  # it lies in the temporary place, and is the script's own
            write("log.txt")
    assert (cache / "old").read_text() == (cache / "new").read_text() == (tmp_path / "new").read_text() == "new"
    assert Path("module.pyc").exists()
    assert world.removed == ()
    assert state(here / "out") == before


def test_the_scripts_folder_counts_wherever_it_lies(here: Path, tmp_path: Path) -> None:
    (tmp_path / "script").mkdir()
    write(tmp_path / "script" / "log")
    with World(nobodys=[tmp_path]):
        write(tmp_path / "script" / "log")
    with pytest.raises(WatchStopped), World(tmp_path / "script", nobodys=[tmp_path]):
        write(tmp_path / "script" / "log")


def test_the_places_that_are_nobodys(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HOME", "/somewhere/hf")
    monkeypatch.setenv("TORCH_HOME", "")
    places = nobodys_places()
    assert {Path(tempfile.gettempdir()), Path.home() / ".cache", Path("/somewhere/hf"), Path("/proc")} <= {*places}
    assert Path() not in places


def test_reading_and_what_refuses_by_itself_are_let_through(here: Path) -> None:
    before = state(here)
    with World() as world:
        assert Path("log.txt").read_text() == "old"
        assert np.memmap("log.txt", mode="r").size == 3
        os.listdir("out")
        sqlite3.connect("file:runs.db?mode=ro", uri=True).close()
        sqlite3.connect(":memory:").close()
        os.makedirs("out/deep", exist_ok=True)
        for refuses in (lambda: opened("log.txt", "x"), lambda: os.mkdir("out"), lambda: os.symlink("x", "log.txt")):
            with pytest.raises(FileExistsError):
                refuses()
        with pytest.raises(FileNotFoundError):
            os.remove("nothing")
        with pytest.raises(IsADirectoryError):
            opened("out", "w")
        tempfile.NamedTemporaryFile(dir="out").close()
    assert world.stopped is None
    assert state(here).keys() == before.keys()


def test_a_lock_beside_a_cache_is_opened_again(here: Path) -> None:
    Path("cache.lock").touch()
    with World() as world:
        os.close(os.open("cache.lock", os.O_RDWR | os.O_CREAT | os.O_TRUNC))
    assert world.stopped is None
    assert Path("cache.lock").exists()


class Writing(Dataset[int]):
    """Rows whose workers write a file each time."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __len__(self) -> int:
        return 2

    def __getitem__(self, index: int) -> int:
        with open(self.name, "a") as file:
            file.write("new")
        return index


@pytest.mark.skipif(sys.version_info >= (3, 14), reason="workers are no longer forked")
def test_a_worker_of_a_loader_is_stopped_and_this_process_knows(here: Path) -> None:
    before = state(here)
    with pytest.raises(RuntimeError, match="exited unexpectedly"), World() as world:
        list(DataLoader(Writing("log.txt"), num_workers=1))
    assert "append to log.txt" in str(world.stopped)
    assert state(here) == before


@pytest.mark.skipif(sys.version_info >= (3, 14), reason="workers are no longer forked")
def test_what_a_worker_of_a_loader_has_made_is_removed(here: Path) -> None:
    with World() as world:
        assert [int(row) for row in DataLoader(Writing("new.txt"), num_workers=2)] == [0, 1]
        write("new.txt")
    assert world.removed == (here / "new.txt",)


def test_a_process_that_the_script_forks_ends_with_the_watch(here: Path) -> None:
    with World():
        write("new.txt")
        child = os.fork()
    if not child:  # pragma: no cover
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 1


LATE = """
import pathlib, sys
from batchscout.trainers.sources.watch.world import WatchStopped, World
pathlib.Path("log.txt").write_text("old")
try:
    with World():
        from safetensors.numpy import save_file
        import numpy
        save_file({"weight": numpy.ones(2)}, "log.txt")
except WatchStopped as stopped:
    print(stopped)
assert "torch" not in sys.modules
save_file({"weight": numpy.ones(2)}, "log.txt")
"""


def test_a_library_that_the_script_loads_itself_is_heard(here: Path) -> None:
    told = subprocess.run([sys.executable, "-c", LATE], capture_output=True, text=True)
    assert told.stdout.startswith("it would overwrite log.txt"), told.stderr
    assert told.returncode == 0, told.stderr


def test_afterwards_nothing_is_guarded(here: Path) -> None:
    had = [
        torch._C.PyTorchFileWriter,
        vars(torch._C.ScriptModule)["save"],
        safetensors.serialize_file,
        atexit.register,
        sys.meta_path[:],
    ]
    for _ in range(2):
        with pytest.raises(WatchStopped), World():
            write("log.txt")
    assert had == [
        torch._C.PyTorchFileWriter, vars(torch._C.ScriptModule)["save"], safetensors.serialize_file, atexit.register, sys.meta_path
    ]  # fmt: skip
    write("log.txt")
    torch.save(TENSORS, "out/best.pt")
    subprocess.run(["rm", "-rf", "out"])
    assert not Path("out").exists()


AT_EXIT = """
import atexit, functools, tempfile, weakref
from batchscout.trainers.sources.watch.world import World
with World():
    @atexit.register
    def script():
        print("the script's")
    script()
    atexit.register(print, "the script's, too")
    weakref.finalize(script, print)
temporary = tempfile.TemporaryDirectory()
atexit.register(print, "ours")
"""


def test_what_the_script_registers_for_the_end_is_never_called(here: Path) -> None:
    told = subprocess.run([sys.executable, "-c", AT_EXIT], capture_output=True, text=True)
    assert [line for line in told.stdout.splitlines() if line] == ["the script's", "ours"], told.stderr


def test_this_process_is_as_before(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_MODE", "online")
    monkeypatch.setenv("GONE", "here")
    monkeypatch.delenv("NEPTUNE_MODE", raising=False)
    before = (
        dict(os.environ),
        signal.getsignal(signal.SIGTERM),
        os.getcwd(),
        [*sys.argv],
        [*sys.path],
        sys.argv,
        sys.path,
    )
    with World():
        assert os.environ["WANDB_MODE"] == "disabled"
        assert os.environ["NEPTUNE_MODE"] == "offline"
        assert not os.environ["MLFLOW_TRACKING_URI"].startswith(here.as_uri())
        signal.signal(signal.SIGTERM, lambda *_: None)
        os.environ["NEW"] = os.environ.pop("GONE")
        os.chdir("out")
        sys.argv = ["train.py"]
        sys.path.insert(0, "elsewhere")
    assert before == (
        dict(os.environ), signal.getsignal(signal.SIGTERM), os.getcwd(), [*sys.argv], [*sys.path], sys.argv, sys.path
    )  # fmt: skip
    assert sys.argv is before[-2]
    assert sys.path is before[-1]


def test_what_other_threads_write_meanwhile_is_none_of_the_scripts_doing(home: Path) -> None:
    lease = home / "lease"
    lease.write_text("0")
    go, done = threading.Event(), threading.Event()

    def renew() -> None:
        go.wait()
        lease.write_text("1")
        done.set()

    thread = threading.Thread(target=renew)
    thread.start()
    with World(home) as world:
        go.set()
        assert done.wait(10)
    thread.join()
    assert (world.stopped, lease.read_text()) == (None, "1")
