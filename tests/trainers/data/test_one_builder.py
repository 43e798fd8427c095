"""The data cache is built by one process of a machine, whatever starts beside it, and who is killed keeps nobody waiting."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.support.processes import next_line
from tests.support.storage import fault, interposed_library

# A process that says when it builds, and then builds no further until it is told to.
BUILDER = """
import sys
from pathlib import Path
from batchscout.trainers.data.cache import cached
def build(aside):
    print("builds", flush=True)
    sys.stdin.readline()
    (aside / "rows").write_text(sys.argv[1])
    with open(sys.argv[2], "a") as log:
        log.write(sys.argv[1] + "\\n")
print("asks", flush=True)
entry = cached("the key of an entry", build)
print("has", (entry / "rows").read_text(), flush=True)
"""


class Process:
    def __init__(self, name: str, log: Path, **environment: str) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-c", BUILDER, name, str(log)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=os.environ | environment,
        )
        self.pid = self._process.pid
        assert self.says() == "asks"

    def says(self) -> str:
        return next_line(self._process).strip()

    def go_on(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write("\n")
        self._process.stdin.flush()

    def kill(self) -> None:
        self._process.kill()
        self._process.communicate()

    def wait_for_the_other(self) -> None:
        """Return once it has the lock's file open."""
        while not any(link.endswith(".lock") for link in self._open_files()):
            assert self._process.poll() is None
            time.sleep(0.02)

    def _open_files(self) -> list[str]:
        return [os.readlink(link) for link in Path(f"/proc/{self.pid}/fd").iterdir() if link.exists()]


@pytest.fixture
def log(tmp_path: Path) -> Path:
    return tmp_path / "builds"


@pytest.fixture
def started() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


def start(started: ExitStack, name: str, log: Path, **environment: str) -> Process:
    process = Process(name, log, **environment)
    started.callback(process.kill)
    return process


def left(cache: Path) -> list[str]:
    return [path.name for path in (cache / "data").iterdir()]


def test_of_several_processes_one_builds_and_the_others_wait_for_it(cache: Path, log: Path, started: ExitStack) -> None:
    first = start(started, "first", log)
    assert first.says() == "builds"
    (lock,) = (cache / "data").glob(".*.lock")
    assert lock.read_text() == f"{first.pid}\n", "who builds can be looked up"
    others = [start(started, name, log) for name in ("second", "third")]
    for other in others:
        other.wait_for_the_other()
    first.go_on()
    assert [process.says() for process in (first, *others)] == ["has first"] * 3
    assert log.read_text() == "first\n"
    assert left(cache) == ["the key of an entry"], "no lock is left"


def test_who_waited_for_a_process_that_was_killed_builds_itself(cache: Path, log: Path, started: ExitStack) -> None:
    first = start(started, "first", log)
    assert first.says() == "builds"
    second = start(started, "second", log)
    second.wait_for_the_other()
    os.kill(first.pid, signal.SIGKILL)
    assert second.says() == "builds"
    second.go_on()
    assert second.says() == "has second"
    assert log.read_text() == "second\n"


def test_where_there_are_no_locks_each_builds_and_the_first_wins(cache: Path, log: Path, started: ExitStack) -> None:
    no_locks = {"LD_PRELOAD": str(interposed_library()), **fault("lock", ".lock", "ENOLCK")}
    first, second = (start(started, name, log, **no_locks) for name in ("first", "second"))
    assert (first.says(), second.says()) == ("builds", "builds")
    first.go_on()
    assert first.says() == "has first"
    second.go_on()
    assert second.says() == "has first"
