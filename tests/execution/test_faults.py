"""A study that is struck at most levels once. `python -m tests.fault_harness --faults 100` goes on for half an hour."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.fault_harness import FAULTS, segments

pytestmark = [pytest.mark.ray, pytest.mark.timeout(1200)]

# Seven strikes are enough here; what the other levels strike is in test_relay and test_lanes.
LEVELS = ["driver", "lane", "controller", "relay", "node", "sigterm", "drain"]


def test_a_study_struck_at_one_level_after_another_ends_as_it_does_undisturbed() -> None:
    options = ["--faults", str(len(LEVELS)), "--levels", ",".join(LEVELS), "--longest-quiet", "6"]
    command = [sys.executable, "-m", "tests.fault_harness", *options]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=1100)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    each_once = ", ".join(f"1 x {level}" for level in LEVELS)
    assert ended.stdout.splitlines()[-1] == f"{len(LEVELS)} faults, nothing lost: {each_once}"


def test_every_level_named_here_is_one_of_the_harness() -> None:
    assert set(LEVELS) <= FAULTS.keys()


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
