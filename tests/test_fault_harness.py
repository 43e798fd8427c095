"""What the fault harness judges by; `.ci/run` lets it strike a study seven times."""

from __future__ import annotations

from tests.fault_harness import segments


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
