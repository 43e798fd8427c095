"""What the fault harness judges by, its means of striking, and a study that it strikes seven times."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from tests.fault_harness import refusals
from tests.faults.laws import segments
from tests.faults.own_cluster import still_a_line
from tests.support.disk import NotHere
from tests.support.memory_group import MemoryGroup
from tests.support.processes import HANGS_AFTER_SECONDS, next_line, without_rays_settings
from tests.support.storage import fault, interposed_library
from tests.support.tiny import ROOT


def test_what_a_process_trained_is_told_apart_by_what_it_built() -> None:
    log = [
        {"pid": 1, "time": 1.0},
        {"pid": 1, "batch": 10},
        {"pid": 2, "time": 3.0},
        {"pid": 1, "batch": 11},
        {"pid": 1, "time": 2.0},
        {"pid": 1, "batch": 10},
        {"pid": 2, "batch": 12},
    ]
    assert list(segments(log)) == [
        {"time": 1.0, "batches": [10, 11]},
        {"time": 2.0, "batches": [10]},
        {"time": 3.0, "batches": [12]},
    ]


def test_a_flipped_line_is_another_line_and_one_still() -> None:
    line, chance = b'{"a":"*J"}\n', random.Random(0)  # a bit of * or J makes a line feed
    found = {still_a_line(line, chance) for _ in range(2000)}
    assert line not in found
    assert {(len(other), other.count(b"\n"), other[-1:]) for other in found} == {(len(line), 1, b"\n")}
    assert len(found) == 8 * (len(line) - 1) - 2


def test_a_level_that_takes_root_is_refused_with_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    assert refusals(["gcs", "power"]) == {"power": "only root can make a file system"}


RENAMES = """
import os
for number in range(5):
    open("partial", "w").close()
    try:
        os.rename("partial", f"file{number}")
    except OSError as error:
        print(number, error.strerror)
"""


def test_storage_fails_so_often_after_so_many_calls(tmp_path: Path) -> None:
    settings = {**os.environ, "LD_PRELOAD": str(interposed_library()), **fault("rename", "file", "EBUSY", 2, after=1)}
    done = subprocess.run([sys.executable, "-c", RENAMES], cwd=tmp_path, env=settings, capture_output=True, text=True)
    assert done.stdout == "1 Device or resource busy\n2 Device or resource busy\n", done.stderr


HAS_MEMORY = "import time; taken = [b'x' * 2**26]; print('ready', flush=True); "
WAITS, TAKES_MORE = "time.sleep(60)", "[(taken.append(b'x' * 2**20), time.sleep(0.02)) for _ in range(3000)]"


def test_the_kernel_ends_the_process_of_choice_for_want_of_memory_and_no_other() -> None:
    try:
        group = MemoryGroup()
    except NotHere as why:
        pytest.skip(str(why))
    other, victim = (
        subprocess.Popen([sys.executable, "-c", HAS_MEMORY + code], preexec_fn=group.enter, stdout=subprocess.PIPE)
        for code in (WAITS, TAKES_MORE)
    )
    try:
        for process in (other, victim):
            assert next_line(process) == b"ready\n"
        group.run_out(victim.pid, lambda: victim.poll() is not None, seconds=HANGS_AFTER_SECONDS)
        assert victim.returncode == -signal.SIGKILL
        assert other.poll() is None
    finally:
        for process in (other, victim):
            process.kill()
            process.communicate()
        group.remove()


SEVEN = ("--faults", "7", "--levels", "driver,lane,controller,relay,node,sigterm,drain", "--longest-quiet", "6")


@pytest.mark.ray
@pytest.mark.timeout(900)
def test_a_study_that_is_struck_seven_times_loses_nothing() -> None:
    settings = without_rays_settings()
    with tempfile.TemporaryDirectory(prefix="bs-", dir="/tmp") as folder:  # where no other test looks for a cluster
        command = [sys.executable, "-m", "tests.fault_harness", *SEVEN]
        settings["RAY_TMPDIR"] = folder
        done = subprocess.run(command, cwd=ROOT, env=settings, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    assert "7 faults, nothing lost: " in done.stdout
