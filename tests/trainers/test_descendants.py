"""What a process has started ends with it, told with real processes."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.processes import HANGS_AFTER_SECONDS, descended_from, kill, next_line, python, until

ROOT = Path(__file__).parents[2]
STARTS = {
    "a child": "subprocess.Popen(sleep)",
    "one with a session of its own": "subprocess.Popen(sleep, start_new_session=True)",
    "an orphan": "subprocess.run(['sh', '-c', 'sleep 60 & echo'], stdout=2)",
    "a fork": "os.fork() or time.sleep(60)",
}


def started(code: str, tmp_path: Path) -> subprocess.Popen[str]:
    """Return a process that runs this code; what it starts is found by `descended_from(tmp_path)`."""
    environment = os.environ | {"PYTHONPATH": str(ROOT), "DESCENDS_FROM": str(tmp_path)}
    return subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
    )


@pytest.mark.parametrize("what", STARTS)
def test_nothing_that_a_process_has_started_outlives_it(what: str, tmp_path: Path) -> None:
    code = f"""
import os, subprocess, time
from batchscout.trainers.descendants import adopt_orphans, end_descendants
sleep = ["sleep", "60"]
adopt_orphans()
{STARTS[what]}
print("started", flush=True)
input()
end_descendants()
"""
    process = started(code, tmp_path)
    try:
        next_line(process)
        until(lambda: len(descended_from(tmp_path)) >= 2, "it has started one", HANGS_AFTER_SECONDS)
        process.communicate("\n", timeout=HANGS_AFTER_SECONDS)
        assert process.returncode == 0
        assert descended_from(tmp_path) == []
    finally:
        kill(*descended_from(tmp_path))


def test_within_a_notebook_only_what_the_block_has_started_ends_with_it(tmp_path: Path) -> None:
    code = """
import subprocess, threading
from batchscout.trainers.descendants import adopts_orphans, ending_what_is_started
sleep = ["sleep", "60"]
kept = [subprocess.Popen(sleep)]
with ending_what_is_started():
    subprocess.Popen(sleep, start_new_session=True)
    subprocess.run(["sh", "-c", "setsid sleep 60 & echo"], stdout=subprocess.DEVNULL)
    may_end, has_started = threading.Event(), threading.Event()
    def of_another_thread():
        kept.append(subprocess.Popen(sleep))
        has_started.set()
        may_end.wait()
    threading.Thread(target=of_another_thread, daemon=True).start()
    has_started.wait()
assert not adopts_orphans()
print(*[one.pid for one in kept if one.poll() is None], flush=True)
input()
"""
    process = started(code, tmp_path)
    try:
        kept = [int(number) for number in next_line(process).split()]
        assert len(kept) == 2
        assert sorted(descended_from(tmp_path)) == sorted([process.pid, *kept])
    finally:
        kill(*descended_from(tmp_path))
        process.communicate()


def test_a_helper_that_puts_away_shared_memory_is_left_to_do_so() -> None:
    """It ends by itself, when nobody uses it any more."""
    code = """
from multiprocessing import resource_tracker
from batchscout.trainers.descendants import end_descendants
resource_tracker.ensure_running()
end_descendants()
assert resource_tracker._resource_tracker._check_alive()
"""
    assert python("-c", code).returncode == 0
