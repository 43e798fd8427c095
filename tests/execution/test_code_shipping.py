"""Shipping the user's directory, and the files that `ray up` and `ray submit` read."""

import os
import re
import shlex
import shutil
import socket
import subprocess
import sys
import tempfile
import zipfile
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest

from batchscout.orchestrator.execution import code_shipping, local_cluster
from tests.support.cluster_file import cluster_yaml, local_variant
from tests.support.processes import HANGS_AFTER_SECONDS, python

CLONE = Path(__file__).parents[2]
NOBODY = 65534


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A user's directory, entered: a model beside the study."""
    folder = tmp_path / "research"
    folder.mkdir()
    (folder / "my_model.py").write_text("WIDTH = 7\n")
    monkeypatch.chdir(folder)
    return folder


def shipped(env: dict) -> set[str]:
    """The files that Ray itself puts into the package for the workers."""
    from ray._private import ray_constants
    from ray._private.runtime_env.packaging import create_package

    target = Path(env["working_dir"]).parent / "package.zip"
    excludes = [*ray_constants.get_runtime_env_default_excludes(), *env["excludes"]]
    create_package(env["working_dir"], target, include_gitignore=True, excludes=excludes)
    return {name for name in zipfile.ZipFile(target).namelist() if not name.endswith("/")}


def write(path: Path, content: str | bytes = "x") -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    return path


def test_code_is_shipped_and_runs_data_and_hidden_files_are_not(here: Path) -> None:
    for kept in ("lib/__init__.py", "lib/layers.py", "odd/data.bin2"):
        write(here / kept)
    for left in (
        ".env",
        "lib/.cache/x",
        "lib/__pycache__/x.pyc",
        "venv/x",
        ".venv/x",
        "wandb/x",
        "runs/old/journal.jsonl",
        "tmp/session_2026-11-23_04-03-46_541306_27852/runtime_resources/1_1__ray_pkg_1.zip",
    ):
        write(here / left)
    write(here / "out" / "journal.jsonl")
    data = write(here / "odd" / "data [1]*.bin")
    env = code_shipping.runtime_env("auto", here / "out", [data])
    assert shipped(env) == {"my_model.py", "lib/__init__.py", "lib/layers.py", "odd/data.bin2"}


def test_a_local_cluster_is_shipped_nothing(here: Path) -> None:
    assert code_shipping.runtime_env(None, here / "runs" / "s") == {}


def test_paths_elsewhere_and_the_directory_itself_leave_nothing_out(here: Path, tmp_path: Path) -> None:
    env = code_shipping.runtime_env("auto", here, [tmp_path, tmp_path / "data.bin"])
    assert shipped(env) == {"my_model.py"}


def test_what_is_no_file_is_left_out(here: Path) -> None:
    """Ray would wait for ever for somebody to write into the pipe."""
    os.mkfifo(here / "pipe [1]")
    (here / "gone").symlink_to("nowhere")
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(os.path.relpath(here / "socket"))
        assert shipped(code_shipping.runtime_env("auto", here / "runs")) == {"my_model.py"}


# Root may read everything, and this process must stay what it is.
AS_NOBODY = f"""
import os
from pathlib import Path
from batchscout.orchestrator.execution import code_shipping
if os.geteuid() == 0:
    os.seteuid({NOBODY})
try:
    print(code_shipping.runtime_env("auto", Path("runs"))["working_dir"])
except ValueError as error:
    print(error)
"""


def said_to_nobody(folder: Path) -> str:
    done = python("-c", AS_NOBODY, cwd=folder)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_what_cannot_be_read_is_named() -> None:
    with tempfile.TemporaryDirectory(dir="/tmp") as name:
        folder = Path(name).resolve()
        for file, right in (("key.pem", 0o000), ("secrets/key.pem", 0o600), ("model.py", 0o644)):
            write(folder / file).chmod(right)
        secrets = folder / "secrets"
        secrets.chmod(0o000)
        folder.chmod(0o755)
        first = rf"but {folder}/(secrets|key.pem) and 1 more cannot be read; make it readable, list it in .*/.rayignore if it is a"
        assert re.search(first, said_to_nobody(folder))
        write(folder / ".rayignore", "secrets\n*.pem\n").chmod(0o644)
        refused = said_to_nobody(folder)  # Ray itself would enter it
        assert re.search(rf"but {secrets} cannot be read; .* or run from another directory$", refused)
        secrets.chmod(0o755)
        assert said_to_nobody(folder) == str(folder)


def test_too_large_a_directory_is_refused_with_what_is_large_in_it(here: Path) -> None:
    with write(here / "weights" / "big.bin").open("wb") as file:
        file.truncate(300 * 2**20)
    with pytest.raises(
        ValueError, match=r"research is shipped .* holds 300 MiB.* 200 MiB; .*: weights \(300 MiB\), my_mo.*rayignore"
    ):
        code_shipping.runtime_env("auto", here / "runs")
    assert code_shipping.runtime_env(None, here / "runs") == {}


@pytest.mark.parametrize("line", ["weights/", "/weights", "*.bin", "weights/*.bin", "**/big.bin"])
@pytest.mark.parametrize("file", [".gitignore", ".rayignore"])
def test_what_ray_ignores_does_not_count(here: Path, file: str, line: str) -> None:
    with write(here / "weights" / "big.bin").open("wb") as big:
        big.truncate(300 * 2**20)
    write(here / file, f"# large\n{line}\n")
    env = code_shipping.runtime_env("auto", here / "runs")
    assert shipped(env) == {"my_model.py"}


@pytest.mark.parametrize("name", ["batchscout/__init__.py", "batchscout/mine.py", "batchscout.py"])
@pytest.mark.parametrize("address", [None, "auto"])
def test_a_directory_that_would_hide_our_package_is_refused(here: Path, name: str, address: str | None) -> None:
    write(here / name)
    for ask in (lambda: code_shipping.runtime_env(address, here / "runs"), code_shipping.import_from_here):
        with pytest.raises(
            ValueError, match=rf"research/{name.split('/')[0]} would hide .* run from another directory"
        ):
            ask()


def test_the_clone_itself_a_copy_of_it_and_a_folder_without_code_are_not_refused(
    here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copytree(CLONE / "batchscout", here / "batchscout")
    code_shipping.refuse_hidden_packages()
    write(here / "batchscout" / "trainers" / "loop.py", "changed")
    with pytest.raises(ValueError, match="pip install -e"):
        code_shipping.refuse_hidden_packages()
    shutil.rmtree(here / "batchscout")
    write(here / "batchscout" / "notes.txt")
    code_shipping.refuse_hidden_packages()
    monkeypatch.chdir(CLONE)
    code_shipping.refuse_hidden_packages()


@pytest.mark.parametrize(
    ("name", "is_refused"),
    [
        ("token.py", True),
        ("random.py", True),
        ("logging/__init__.py", True),
        ("torch.py", True),
        ("numpy/__init__.py", True),
        ("typing_extensions.py", True),
        ("test/__init__.py", False),  # nobody imports Python's own
        ("logging/a.log", False),  # no package
        ("mine.py", False),
    ],
)
def test_a_module_that_would_hide_one_of_python_or_a_library_is_refused(
    here: Path, name: str, is_refused: bool
) -> None:
    write(here / name)
    with pytest.raises(ValueError, match=rf"{name} would hide .*; rename it") if is_refused else nullcontext():
        code_shipping.refuse_hidden_packages()


def test_the_program_itself_imports_nothing_from_the_directory_that_it_is_typed_in(here: Path) -> None:
    write(here / "study.yaml", "{name: a, model: {target: gpt}, data: {target: python_stdlib}}")
    assert_refused_beside_token(here, "plan", "study.yaml", "--no-memory")


@pytest.mark.parametrize("verb", ["plan", "run", "trial"])
def test_no_script_is_watched_beside_such_a_module(here: Path, verb: str) -> None:
    """What it fails of then would be told as a fault of the script."""
    write(here / "train.py", "import tokenize\n")
    write(here / "study.yaml", "{name: a, from: {script: train.py}}")
    assert_refused_beside_token(here, verb, "study.yaml")


def assert_refused_beside_token(here: Path, *arguments: str) -> None:
    write(here / "token.py")
    program = python("-m", "batchscout", *arguments, cwd=here)
    assert (program.returncode, "token.py would hide Python's own 'token'" in program.stderr) == (2, True), program


def test_the_remedy_for_a_hidden_package_can_be_pasted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(clone := tmp_path / "my clone" / "batchscout" / "loop.py", "changed")
    monkeypatch.chdir(here := clone.parents[1])
    with pytest.raises(ValueError, match="would hide") as refused:
        code_shipping.refuse_hidden_packages()
    said = str(refused.value)
    assert shlex.split(said)[0] == str(here / "batchscout")
    assert shlex.split(said.split("`")[1]) == ["pip", "install", "-e", str(here)]


def test_data_paths_are_the_existing_absolute_ones(here: Path) -> None:
    data = write(here / "train.txt")
    kwargs = {"train": str(data), "more": [{"val": str(data)}, "train.txt", "/not/there"], "seq_len": 8}
    assert list(code_shipping.absolute_paths(kwargs)) == [data, data]


@pytest.mark.parametrize("chosen", ["file", "RAY_AUTH_MODE", "RAY_AUTH_TOKEN_PATH"])
def test_a_users_own_choice_of_token_stands(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, chosen: str) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    for name in ("RAY_AUTH_MODE", "RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"):
        monkeypatch.delenv(name, raising=False)
    if chosen == "file":
        write(tmp_path / ".ray" / "auth_token")
    else:
        monkeypatch.setenv(chosen, "disabled")
    local_cluster.protect_local_cluster()
    assert "RAY_AUTH_TOKEN" not in os.environ


# A stand-in for the `batchscout` script: its folder is on the path, the user's directory is not.
DRIVER = """
import sys
from pathlib import Path
from batchscout.orchestrator.execution import code_shipping, local_cluster, session
from tests.support.cluster_file import cluster_yaml, local_variant
code_shipping.import_from_here()
import my_model
address = sys.argv[1] if sys.argv[1:] else None
if address is None:
    local_cluster.protect_local_cluster()
import ray
kwargs = {} if address else dict(num_cpus=1, include_dashboard=False, object_store_memory=80 * 2**20)
env = code_shipping.runtime_env(address, Path("runs"))
ray.init(address=address or "local", runtime_env=env, log_to_driver=False, **kwargs)
@ray.remote
def width():
    import my_model
    return my_model.WIDTH, my_model.__file__
print("RESULT", *ray.get(width.remote()), Path.home().joinpath(".ray").exists())
if address is None:
    import os, subprocess
    print(subprocess.run([sys.executable, *sys.argv, ray.get_runtime_context().gcs_address], text=True,
        env=os.environ | {"RAY_AUTH_MODE": "token"}, capture_output=True).stdout)
"""


@pytest.mark.ray
def test_a_model_in_the_users_directory_resolves_on_driver_and_workers(here: Path, tmp_path: Path) -> None:
    script = write(tmp_path / "bin" / "driver.py", DRIVER)
    env = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    env |= {"HOME": str(tmp_path / "home"), "PYTHONPATH": str(CLONE)}
    (tmp_path / "home").mkdir()
    done = subprocess.run(
        [sys.executable, script], env=env, capture_output=True, text=True, timeout=HANGS_AFTER_SECONDS, check=False
    )
    results = [line.split()[1:] for line in done.stdout.splitlines() if line.startswith("RESULT")]
    assert len(results) == 2, done.stdout + done.stderr
    (local, remote) = results
    assert local == ["7", str(here / "my_model.py"), "False"]
    assert remote[0] == "7"
    assert "working_dir_files" in remote[1]


@pytest.mark.parametrize("config", [cluster_yaml(), local_variant()], ids=["aws", "local"])
def test_ray_up_accepts_the_cluster_file(config: dict[str, Any]) -> None:
    from ray.autoscaler._private.util import prepare_config, validate_config

    prepared = prepare_config(config)
    validate_config(prepared)
    assert any("batchscout" in command for command in prepared["head_setup_commands"])
    assert any("batchscout" in command for command in prepared["worker_setup_commands"])


def test_ray_would_refuse_a_key_it_does_not_know() -> None:
    from jsonschema import ValidationError
    from ray.autoscaler._private.util import prepare_config, validate_config

    with pytest.raises(ValidationError, match="setup_comands"):
        validate_config(prepare_config(cluster_yaml() | {"setup_comands": []}))


def installed_by_the_cluster_file() -> str:
    """The target of the one `pip install -e` among the setup commands."""
    installs = [shlex.split(line) for line in cluster_yaml()["setup_commands"] if "pip install" in line]
    (words,) = [words for words in installs if "-e" in words]
    return words[words.index("-e") + 1]


def test_the_cluster_file_installs_the_clone_that_it_mounts() -> None:
    assert cluster_yaml()["file_mounts"][installed_by_the_cluster_file()] == "."
    assert (CLONE / "pyproject.toml").is_file()
    for command in cluster_yaml()["setup_commands"]:
        subprocess.run(["bash", "-nc", command], check=True)


@pytest.mark.parametrize("config", [cluster_yaml(), local_variant()], ids=["aws", "local"])
def test_every_node_of_the_cluster_file_demands_the_token_that_it_is_sent(config: dict[str, Any]) -> None:
    token = "~/.ray/auth_token"
    assert config["file_mounts"][token] == token
    for commands in (config["head_start_ray_commands"], config["worker_start_ray_commands"]):
        (start,) = [command for command in commands if "ray start" in command]
        assert "RAY_AUTH_MODE=token ray start" in start


def submit(home: Path, arguments: str) -> subprocess.CompletedProcess:
    """As `ray submit` does: one file copied to the home folder, the arguments joined unquoted for a login shell."""
    shutil.copy(CLONE / "configs" / "submit.py", home / "submit.py")
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    env = os.environ | {"HOME": str(home), "PATH": path, "PYTHONPATH": str(CLONE)}
    # -l would read this machine's profiles, which may set another PATH.
    return subprocess.run(
        ["bash", "-c", f"python ~/submit.py {arguments}"],
        env=env,
        capture_output=True,
        text=True,
        check=False,
        cwd=home,
    )


@pytest.fixture
def home(tmp_path: Path) -> Path:
    """The head's home folder, with the clone where the cluster file mounts it."""
    mount = tmp_path / Path(installed_by_the_cluster_file()).relative_to("~")
    mount.symlink_to(CLONE, target_is_directory=True)
    return tmp_path


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ("configs/none.yaml", "there is no study configs/none.yaml in"),
        ("", "takes one study path and then options of `batchscout run`, but was given []"),
        ("my study.yaml", "but was given ['my', 'study.yaml']; ray submit has a shell read what it is given"),
        ("--help", "takes one study path"),
        ("'my study.yaml'", "there is no study my study.yaml in"),
        ("'$(touch x).yaml'", "there is no study $(touch x).yaml in"),
        ("'a;touch x'", "there is no study a;touch x in"),
        ("/etc/passwd", "'/etc/passwd' is not a path inside"),
        ("../study.yaml", "'../study.yaml' is not a path inside"),
    ],
)
def test_submit_refuses_what_is_no_study_in_the_clone(home: Path, arguments: str, says: str) -> None:
    done = submit(home, arguments)
    assert (done.returncode, done.stdout) == (2, "")
    assert says in done.stderr
    assert "Traceback" not in done.stderr
    assert not (home / "x").exists()


def test_submit_runs_the_study_in_the_clone_and_passes_its_exit_code_on(tmp_path: Path) -> None:
    write(tmp_path / "batchscout" / "configs" / "bad.yaml", "model: {target: gpt}\nwhat_is_this: 1\n")
    done = submit(tmp_path, "configs/bad.yaml --set optimizer.lr=1e-3")
    assert done.returncode == 2, done.stderr
    assert "configs/bad.yaml does not describe a study" in done.stderr
    assert "what_is_this: no such key" in done.stderr
    assert "Traceback" not in done.stderr


def test_a_cluster_whose_node_is_on_its_way_is_waited_for_and_not_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    import ray

    from batchscout.orchestrator.execution.session import wait_for_nodes

    said, seen = list[str](), [{"memory": 1.0}, {}, {"CPU": 2.0}]
    monkeypatch.setattr(ray, "nodes", lambda: [{"Alive": True}])
    monkeypatch.setattr(ray, "cluster_resources", lambda: seen.pop(0))
    wait_for_nodes(1, said.append)
    assert (seen, said) == ([], ["the cluster has no CPUs: waiting for a node (at most 60 s)"])
    monkeypatch.setattr(ray, "cluster_resources", dict)
    wait_for_nodes(1, said.append, seconds=0.0)
    assert len(said) == 2
    with pytest.raises(
        ValueError, match="the cluster has 1 of 3 nodes after 0 s, and --min-nodes is 3: see why the others"
    ) as refused:
        wait_for_nodes(3, said.append, seconds=0.0)
    assert str(refused.value).endswith("or lower --min-nodes (in a job it is the number of its nodes)")
