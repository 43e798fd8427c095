"""One process writes a journal at a time, on whatever file system, and whoever is kept out is told by whom."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import time
from pathlib import Path

import pytest

from batchscout.orchestrator.study.events import RunBegan
from batchscout.orchestrator.study.journal import Journal, replay
from batchscout.orchestrator.study.state import Halted, Study
from batchscout.orchestrator.study.storage.lock import is_locked, note_of
from tests.support.journal_writer import call_on, contend, watched, writer
from tests.support.processes import next_line
from tests.support.storage import fault, interposed_library

LET_IN = (False, "it was let in")


@pytest.fixture
def no_locks() -> dict[str, str]:
    """The environment of a process on a file system without locks."""
    return {"LD_PRELOAD": str(interposed_library()), **fault("lock", "journal.", "ENOLCK")}


def test_a_second_writer_is_refused_while_the_first_lives_and_told_who_that_is(tmp_path: Path) -> None:
    path = tmp_path / "the run" / "journal.jsonl"
    path.parent.mkdir()
    before = time.strftime("%Y-%m-%d %H:%M:%S")
    with writer(path, "hold") as first:
        locked, said = call_on(path)
        assert locked
        found = re.fullmatch(
            rf"another process \(process {first.pid} on {socket.gethostname()}, since (.*), last seen \d+ s ago\) is running the study in "
            rf"'{path.parent}'; wait for it, end it, or choose another --dir",
            said,
        )
        assert found, said
        assert before <= found[1] <= time.strftime("%Y-%m-%d %H:%M:%S")
        assert replay(path, "s") == Study("s"), "reading is not writing"
        first.communicate("")
    assert call_on(path) == LET_IN
    assert not note_of(path).exists()


@pytest.mark.parametrize("forked_by", ["fork", "library"])
def test_a_fork_of_the_driver_does_not_keep_its_lock(path: Path, forked_by: str) -> None:
    """User code has forked a helper, which lives on when the driver is killed: by Python, or by a library's own code, of
    which Python does not know."""
    with writer(path, forked_by) as driver:
        helper = int(next_line(driver))
        assert call_on(path)[0]
        os.kill(driver.pid, signal.SIGKILL)
        driver.wait()
        try:
            os.kill(helper, 0)
            assert call_on(path) == LET_IN
        finally:
            os.kill(helper, signal.SIGKILL)


def test_a_journal_that_this_process_writes_is_not_opened_twice(tmp_path: Path, path: Path) -> None:
    """The kernel would give a process its own lock again, and take it when either file is closed."""
    with Journal(path, "s"):
        again = tmp_path / "." / "journal.jsonl"
        assert is_locked(again)
        with pytest.raises(ValueError, match=rf"another process \(process {os.getpid()} on .*wait for it, end it"):
            Journal(again, "s")
        assert replay(path, "s") == Study("s")
        assert call_on(path)[1].startswith(f"another process (process {os.getpid()} on "), "the lock is still there"
    assert call_on(path) == LET_IN


def test_to_ask_for_the_lock_keeps_no_driver_out(path: Path) -> None:
    """`status` asks while a driver may be starting."""
    path.touch()
    note_of(path).touch()
    with watched(path):
        for _ in range(200):
            Journal(path, "s").close()


@pytest.mark.slow
def test_of_many_that_come_and_go_only_one_has_the_lock(path: Path) -> None:
    """Whoever has opened the note just before it was removed must not take a lock that nobody else finds."""
    path.touch()
    assert sum(contend(path, num_processes=4)) > 30


def test_a_driver_whose_note_was_removed_halts_before_it_writes_on(path: Path) -> None:
    """Whoever removes it lets another driver in."""
    with Journal(path, "s") as journal:
        journal.append(RunBegan(token="a"))
        note_of(path).unlink()
        with writer(path, "hold") as other:
            with pytest.raises(
                Halted, match=r"journal\.lock was deleted, moved or replaced while the study ran: another"
            ):
                journal.append(RunBegan(token="b"))
            assert journal.has_vanished()
            journal.close()
            assert call_on(path)[1].startswith(f"another process (process {other.pid} on "), "the other's note stays"
            other.communicate("")
    assert replay(path, "s").tokens == {"a"}


def test_a_fork_that_ends_takes_no_lock_away(path: Path) -> None:
    with Journal(path, "s") as journal:
        child = os.fork()
        if child == 0:
            journal.close()
            os._exit(0)
        assert os.waitpid(child, 0)[1] == 0
        assert note_of(path).exists()
        assert call_on(path)[1].startswith(f"another process (process {os.getpid()} on ")


def test_a_file_system_without_locks_lets_one_writer_in(path: Path, no_locks: dict[str, str]) -> None:
    with writer(path, "hold", **no_locks) as first:
        locked, said = call_on(path, **no_locks)
        assert locked
        assert said.startswith(f"another process (process {first.pid} on {socket.gethostname()}, since")
        assert re.search(r"if it is no more, its lease runs out in \d+ s by itself$", said)
        first.communicate("")
    assert call_on(path, **no_locks) == LET_IN


def test_on_a_file_system_without_locks_who_was_killed_is_followed_by_the_next(
    path: Path, no_locks: dict[str, str]
) -> None:
    with writer(path, "hold", **no_locks) as first:
        os.kill(first.pid, signal.SIGKILL)
    assert call_on(path, **no_locks) == LET_IN


def test_a_note_that_cannot_be_read_names_nobody(tmp_path: Path, path: Path) -> None:
    """An earlier version's driver has no lease."""
    with writer(path, "hold") as first:
        note_of(path).write_text('{"host": 5')
        for term in (tmp_path / ".lease").iterdir():
            term.unlink()
        assert call_on(path)[1].startswith("another process is running the study in")
        first.communicate("")


@pytest.mark.parametrize("pid", [1, os.getpid()], ids=["the first process", "this process"])
def test_with_locks_a_note_that_was_left_locks_nobody_out(path: Path, pid: int) -> None:
    note_of(path).write_text(json.dumps({"host": socket.gethostname(), "pid": pid, "since": 0.0}))
    assert call_on(path) == LET_IN
