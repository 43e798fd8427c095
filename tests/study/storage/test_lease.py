"""One driver writes a study, on whatever machine: a second one is refused by name, a dead one's lease runs out, and one that was
followed notices before it writes the next line."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import tempfile
import time
from dataclasses import replace
from pathlib import Path

import pytest

from batchscout.orchestrator.study.events import ClusterReady
from batchscout.orchestrator.study.journal import Journal, replay
from batchscout.orchestrator.study.lines import read_lines
from batchscout.orchestrator.study.storage.lease import Holder, RunsOut
from batchscout.orchestrator.study.storage.lock import is_locked
from batchscout.trainers.files import StorageLost
from tests.support.journal_writer import IN_A_CONTAINER, call_on, writer
from tests.support.processes import answer
from tests.support.storage import fault, interposed_library
from tests.support.tiny import in_fresh_process

LEASE_SECONDS = "1"
NOBODY = 65534


@pytest.fixture(params=["locks", "no locks"])
def storage(request: pytest.FixtureRequest) -> dict[str, str]:
    """The environment of a process on a file system with locks, and on one without."""
    if request.param == "locks":
        return {}
    return {"LD_PRELOAD": str(interposed_library()), **fault("lock", "journal.", "ENOLCK")}


def tokens(path: Path) -> list[str]:
    return [line.event.token for line in read_lines(path) if isinstance(line.event, ClusterReady)]


def silence(run_dir: Path, seconds: float) -> None:
    """Have the holder of the last generation not have been heard of for so long."""
    (term,) = (run_dir / ".lease").iterdir()
    then = term.stat().st_mtime - seconds
    os.utime(term, (then, then))


def follow_the_suspended(path: Path, storage: dict[str, str]) -> subprocess.Popen[str]:
    """Start another writer as soon as it is let in."""
    while True:
        locked, said = call_on(path, **storage)
        assert locked or said == "it was let in"
        if said == "it was let in":
            return writer(path, "told", LEASE_SECONDS, **storage)


@pytest.mark.slow
def test_a_suspended_driver_that_was_followed_notices_before_its_next_line_and_nothing_is_lost(
    tmp_path: Path, path: Path, storage: dict[str, str]
) -> None:
    with writer(path, "told", LEASE_SECONDS, **storage) as first:
        assert answer(first, "one") == "written"
        os.kill(first.pid, signal.SIGSTOP)
        second = follow_the_suspended(path, storage)
        assert answer(second, "two") == "written"
        os.kill(first.pid, signal.SIGCONT)
        said = answer(first, "never")
        assert re.fullmatch(
            rf"another process \(process {second.pid} on .*\) has taken over the study in {tmp_path}, since this one was not heard from "
            r"for longer than its lease of 1 s, as if it had been suspended or cut off from its storage\. Nothing is lost: .*",
            said,
        ), said
        assert answer(first, "never") == said, "nor does it write later"
        assert answer(second, "three") == "written"
        first.communicate("")
        assert call_on(path, **storage)[1].startswith(f"another process (process {second.pid} on "), "its lease stays"
        second.communicate("")
    assert tokens(path) == ["one", "two", "three"]


@pytest.mark.slow
def test_a_driver_that_lives_keeps_its_lease_however_long_it_has_nothing_to_write(path: Path) -> None:
    with writer(path, "told", "2") as first:
        for _ in range(3):
            time.sleep(2.2)  # longer than the lease
            assert call_on(path)[1].startswith(f"another process (process {first.pid} on ")
        assert answer(first, "one") == "written"
        first.communicate("")


@pytest.fixture
def in_a_container() -> tuple[str, ...]:
    done = subprocess.run([*IN_A_CONTAINER, "true"], capture_output=True, text=True)
    if done.returncode:
        pytest.skip(f"nobody may make a pid namespace here: {done.stderr.strip()}")
    return IN_A_CONTAINER


@pytest.mark.slow
def test_a_driver_in_another_container_of_this_machine_is_not_taken_for_one_that_has_ended(
    path: Path, in_a_container: tuple[str, ...], storage: dict[str, str]
) -> None:
    """Both are the first of their containers, and so is another process here."""
    with writer(path, "told", within=in_a_container, **storage) as first:
        for within in ((), in_a_container):
            locked, said = call_on(path, within=within, **storage)
            assert locked
            assert "is running the study in" in said
        assert answer(first, "one") == "written"
        first.communicate("")
    assert call_on(path, **storage) == (False, "it was let in")


def test_nobody_can_say_that_a_process_of_another_container_has_ended() -> None:
    here = Holder.here()
    process = subprocess.Popen(["true"])
    process.wait()
    ended = replace(here, pid=process.pid)
    assert ended.is_gone()
    assert not replace(ended, numbered_in="pid:[1]").is_gone()
    assert not replace(ended, boot="another").is_gone()


def held_elsewhere(run_dir: Path) -> None:
    """Have a driver on another machine hold the study."""
    holder = {"host": "elsewhere", "pid": os.getpid(), "since": 0.0, "boot": "another"}
    (run_dir / ".lease").mkdir()
    told = holder | {"seconds": 60.0, "word": "w", "released": False, "silent": 0}
    (run_dir / ".lease" / "000007").write_text(json.dumps(told))


def test_a_driver_on_another_machine_is_named_with_when_it_was_last_seen(tmp_path: Path, path: Path) -> None:
    path.touch()
    began = time.time()
    held_elsewhere(tmp_path)
    silence(tmp_path, 12)
    assert is_locked(path)
    with pytest.raises(
        ValueError, match=rf"another process \(process {os.getpid()} on elsewhere, since 1970"
    ) as refused:
        Journal(path, "s")
    seen = re.search(r", last seen (\d+) s ago\) is running the study in", str(refused.value))
    left = re.search(r"if it is no more, its lease runs out in (\d+) s by itself$", str(refused.value))
    assert seen is not None
    assert left is not None
    assert 12 <= int(seen[1]) <= 13 + time.time() - began
    assert int(seen[1]) + int(left[1]) in (59, 60, 61), "each is rounded"
    assert not isinstance(refused.value, RunsOut), "it has been heard of lately"


def test_the_lease_of_a_driver_that_died_on_another_machine_runs_out(tmp_path: Path, path: Path) -> None:
    path.touch()
    began = time.time()
    held_elsewhere(tmp_path)
    silence(tmp_path, 40)
    with pytest.raises(RunsOut) as refused:
        Journal(path, "s")
    assert 19.9 - (time.time() - began) < refused.value.seconds_left <= 20
    silence(tmp_path, 21)
    assert not is_locked(path)
    with Journal(path, "s"):
        assert [term.name for term in (tmp_path / ".lease").iterdir()] == ["000008"], (
            "a later generation, and the only one"
        )


def test_generations_grow_also_over_drivers_that_have_ended(tmp_path: Path, path: Path) -> None:
    for number in (1, 2, 3):
        Journal(path, "s").close()
        assert [term.name for term in (tmp_path / ".lease").iterdir()] == [f"{number:06d}"]


def test_who_follows_a_silent_driver_writes_into_a_file_that_the_other_has_not_open(tmp_path: Path, path: Path) -> None:
    """Suspended between its look at the lease and its write, it would write into the middle of what follows."""
    Journal(path, "s").close()
    shutil.rmtree(tmp_path / ".lease")
    held_elsewhere(tmp_path)
    silence(tmp_path, 61)
    with path.open("r+b") as its_file:
        with Journal(path, "s") as journal:
            journal.append(ClusterReady(token="ours", seconds=1.0))
            its_file.write(b"its line, which nobody has heard of\n")
            its_file.flush()
            journal.append(ClusterReady(token="ours too", seconds=1.0))
        assert tokens(path) == ["ours", "ours too"]
    assert replay(path, "s").trials == {}


def test_a_lease_that_could_not_be_written_keeps_nobody_out(tmp_path: Path, path: Path) -> None:
    full = {"LD_PRELOAD": str(interposed_library()), **fault("write", ".lease/0", "ENOSPC")}
    said = subprocess.run(
        ["python", "-c", f"from batchscout.orchestrator.study.journal import *; Journal(Path({str(path)!r}), 's')"],
        env=os.environ | full, capture_output=True, text=True,
    ).stderr  # fmt: skip
    assert "StorageLost: " in said
    assert ".lease could not be written: No space left on device" in said
    assert list((tmp_path / ".lease").iterdir()) == []
    assert call_on(path) == (False, "it was let in")


@pytest.mark.slow
@pytest.mark.skipif(os.geteuid() != 0, reason="becomes another user for a while, which root may")
def test_whoever_may_read_a_run_directory_may_ask_whether_its_study_runs() -> None:
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:
        os.chmod(folder, 0o755)
        path = Path(folder) / "journal.jsonl"
        with Journal(path, "s"):
            assert in_fresh_process(asked_by_nobody, str(path)) == "True"
        assert in_fresh_process(asked_by_nobody, str(path)) == "False"
        (path.parent / ".lease").chmod(0o700)  # as earlier versions made it
        assert in_fresh_process(asked_by_nobody, str(path)) == f"{folder}/.lease could not be read: Permission denied"


def asked_by_nobody(path: str) -> str:
    """What another user is told who asks whether the study runs."""
    os.seteuid(NOBODY)
    try:
        return str(is_locked(Path(path)))
    except StorageLost as error:
        return str(error)
