"""What the Dispatcher says of a rank's process that has ended, told with real processes and without Ray."""

from __future__ import annotations

import fcntl
import os
import resource
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from batchscout.orchestrator.execution import process_endings
from batchscout.orchestrator.execution.dispatcher import Dispatcher, crash_log
from batchscout.orchestrator.study.causes import Cause
from batchscout.orchestrator.study.messages import Assignment, Host, Message
from batchscout.orchestrator.units import ending_text, exit_text
from tests.support.processes import HANGS_AFTER_SECONDS, WAITS, kernel_tells

needs_a_new_kernel = pytest.mark.skipif(not kernel_tells(), reason="Linux tells of another's end since 6.15")


@contextmanager
def child_that(does: str) -> Iterator[subprocess.Popen[bytes]]:
    """Another process, which does this once it is let."""
    process = subprocess.Popen(
        [sys.executable, "-c", f"{WAITS}; {does}"], stdin=subprocess.PIPE, stderr=subprocess.DEVNULL
    )
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


@needs_a_new_kernel
@pytest.mark.parametrize(
    ("does", "text"),
    [
        ("import os; os._exit(3)", "exited with status 3"),
        ("import os; os.kill(os.getpid(), 9)", "was killed by SIGKILL"),
        ("import ctypes; ctypes.string_at(0)", "was killed by SIGSEGV"),
        ("import os; os.abort()", "was killed by SIGABRT"),
        ("pass", "exited with status 0"),
    ],
)
def test_the_end_of_a_process_that_somebody_else_has_waited_for_is_known(does: str, text: str) -> None:
    with child_that(does) as child:
        pidfd = process_endings.open_process(child.pid)
        assert pidfd is not None
        assert process_endings.exit_code(pidfd) is None, "it runs"
        child.communicate()
        code = process_endings.exit_code(pidfd)
        os.close(pidfd)
    assert code is not None
    assert code == child.returncode
    assert ending_text(code) == text


def test_the_end_of_a_process_is_known_before_anybody_has_waited_for_it() -> None:
    """As that of a rank whose raylet is gone: who waits for it then may be slow."""
    with child_that("import os; os.kill(os.getpid(), 9)") as child:
        pidfd = process_endings.open_process(child.pid)
        assert pidfd is not None
        assert child.stdin is not None
        child.stdin.close()
        assert process_endings.wait_for_end(pidfd, seconds=HANGS_AFTER_SECONDS)
        assert not process_endings.was_waited_for(pidfd)
        assert process_endings.exit_code(pidfd) == -9
        child.stdin = None
        child.communicate()
        assert process_endings.was_waited_for(pidfd)
        os.close(pidfd)


def test_a_process_that_is_gone_cannot_be_watched() -> None:
    with child_that("pass") as child:
        child.communicate()
        assert process_endings.open_process(child.pid) is None


@pytest.mark.parametrize(
    ("code", "text"),
    [
        (None, "exited with status 0 (sys.exit)"),
        (3, "exited with status 3 (sys.exit)"),
        ("no data\nat all", "exited with status 1 (sys.exit): no data"),
    ],
)
def test_what_sys_exit_asks_for_is_said_as_the_shell_would_see_it(code: object, text: str) -> None:
    assert exit_text(SystemExit(code)) == text


# What becomes of the trial


async def die_twice(does: str, directory: Path, *, kills: int = 0, ranks: int = 1) -> Message:
    """Run a trial on processes of which the last rank ends so, twice. kills: what the kernel counts each time."""
    dispatcher = Dispatcher(num_lanes=1)
    await dispatcher.assign(Assignment("a", "{}", str(directory), "token", key="a"))
    for turn in (1, 2, 3):
        with ExitStack() as stack:
            children = [stack.enter_context(child_that(does)) for _ in range(ranks)]
            for rank, child in enumerate(children):
                host = Host("here", "", turn * kills, child.pid, process_endings.pid_namespace())
                await dispatcher.introduce("lane", host, None, rank)
            if turn == 3:
                await dispatcher.assign(Assignment("next", "{}", str(directory), "token", key="next"))
            await dispatcher.take("lane", f"group {turn}", 1)
            if turn < 3:
                children[-1].communicate()
                said = f"rank {ranks - 1}: its process died without a message"
                await dispatcher.group_died("lane", said, "trial", [ranks - 1])
    assert (await dispatcher.next_message("a")).notice is not None, "it survived the first"
    return await dispatcher.next_message("a")


@needs_a_new_kernel
@pytest.mark.parametrize(
    ("does", "text"),
    [
        ("import os; os._exit(3)", "exited with status 3"),
        ("import os; os.kill(os.getpid(), 9)", "was killed by SIGKILL"),
    ],
)
async def test_a_trial_that_fails_with_its_process_names_the_rank_and_how_it_ended(
    tmp_path: Path, does: str, text: str
) -> None:
    ended = await die_twice(does, tmp_path, ranks=2)
    assert (ended.outcome, ended.reason) == ("failed", f"it ended its lane 2 times; last: rank 1 {text}")


@needs_a_new_kernel
async def test_a_crash_is_shown_with_the_file_that_has_its_stack(tmp_path: Path) -> None:
    (directory := tmp_path / "a trial").mkdir()
    logs = f"{str(crash_log(str(directory), 0, 1))[:-5]}{{os.getpid()}}.log"
    crash = f"import ctypes, faulthandler, os; faulthandler.enable(open(f{logs!r}, 'w')); ctypes.string_at(0)"
    ended = await die_twice(crash, directory)
    log = max(directory.iterdir(), key=lambda log: log.stat().st_mtime_ns)
    assert ended.reason.endswith(f"last: rank 0 was killed by SIGSEGV (its stack is in '{log}')"), "it can be pasted"
    assert "Segmentation fault" in log.read_text()


@needs_a_new_kernel
async def test_the_kernel_ended_a_process_for_want_of_memory_if_it_counted_one_and_sent_sigkill(tmp_path: Path) -> None:
    """On whatever rank: the others may have died of that, and on the same host another process may have starved."""
    starved = await die_twice("import os; os.kill(os.getpid(), 9)", tmp_path, kills=1, ranks=2)
    assert (starved.outcome, starved.cause) == ("out_of_memory", Cause.HOST_MEMORY)
    crashed = await die_twice("import os; os.abort()", tmp_path, kills=1)
    assert crashed.outcome == "failed"
    assert "SIGABRT" in crashed.reason


async def test_where_nobody_knows_the_end_the_counted_kill_and_rays_words_decide(tmp_path: Path) -> None:
    """As on an older kernel: nothing is watched."""

    async def scene(kills: int) -> Message:
        dispatcher = Dispatcher(num_lanes=1)
        await dispatcher.assign(Assignment("a", "{}", str(tmp_path), "token", key="a"))
        for turn in (1, 2, 3):
            await dispatcher.introduce("lane", Host("here", "", turn * kills))
            if turn == 3:
                await dispatcher.assign(Assignment("next", "{}", str(tmp_path), "token", key="next"))
            await dispatcher.take("lane", f"group {turn}", 1)
            await dispatcher.group_died("lane", "rank 0: its process died without a message", "trial", [0])
        assert (await dispatcher.next_message("a")).notice is not None, "it survived the first"
        return await dispatcher.next_message("a")

    assert (await scene(kills=1)).outcome == "out_of_memory"
    assert (await scene(kills=0)).reason.endswith("last: rank 0: its process died without a message")


async def test_processes_of_the_lane_are_not_watched_for_ever() -> None:
    """Each of them takes a file descriptor."""
    before, dispatcher = len(os.listdir("/proc/self/fd")), Dispatcher(num_lanes=1)
    for _ in range(100):
        await dispatcher.introduce("lane", Host("here", "", 0, os.getpid(), process_endings.pid_namespace()))
    assert len(os.listdir("/proc/self/fd")) < before + 20


def test_a_process_is_watched_whatever_the_number_of_its_descriptor() -> None:
    allowed, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    process = subprocess.Popen(["sleep", "60"])
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (min(4096, most), most))
        pidfd = os.pidfd_open(process.pid)
        high = fcntl.fcntl(pidfd, fcntl.F_DUPFD, 2000)
        assert not process_endings.has_ended(high)
        process.kill()
        process.wait()
        assert process_endings.has_ended(high)
        os.close(pidfd)
        os.close(high)
    finally:
        process.kill()
        process.wait()
        resource.setrlimit(resource.RLIMIT_NOFILE, (allowed, most))
