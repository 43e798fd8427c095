"""Frontiers on real Ray: what fits next to what does not, in processes that ran nothing else, and measured once."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

from batchscout.orchestrator.stages.frontier.findings import FrontierFindings
from batchscout.orchestrator.study.trial import TrialState
from tests.support.outcome import found_by
from tests.support.study_runs import Ran, run, run_leaving_traces

# A fixture is a whole study, and the first test that asks for it waits for it.
pytestmark = [pytest.mark.ray, pytest.mark.usefixtures("ray_cluster"), pytest.mark.timeout(300)]

MIB = 2**20


def frontier_findings(ran: Ran) -> FrontierFindings:
    return found_by(ran.study, FrontierFindings)


@pytest.fixture(scope="module")
def frontier(tmp_path_factory: pytest.TempPathFactory, ray_cluster: None) -> Ran:
    """Of one mode, in a limit that some two hundred samples fill."""
    stage = {
        "type": "frontier",
        "smallest": 32,
        "compile": [False],
        "activation_checkpointing": ["none"],
        "cross_entropy": ["whole"],
        "finalists": 1,
        "rounds": 2,
    }
    folder = tmp_path_factory.mktemp("frontier")
    ran = run_leaving_traces(folder, stages=[stage], sample_budget=4096, memory_limit="48MiB")
    assert ran.ending.exit_code == 0, ran.ending.message
    return ran


def test_the_frontier_finds_the_edge_between_what_fitted_and_what_did_not(frontier: Ran) -> None:
    """A size that ran, but into the headroom of 5 % that is kept free, does not fit either, nor one that did so once and
    not again. In the fresh process of a verification a few more MiB may be set up, by which a smaller size can fail there."""
    edge = max(frontier_findings(frontier).fitting)
    inside, outside_of_verification = dict[int, bool](), set[int]()
    for trial in frontier.study.trials.values():
        fitted = trial.state is TrialState.COMPLETE and trial.measured("peak_memory_bytes") <= 0.95 * 48 * MIB
        size = trial.config.micro_batch_size
        inside[size] = fitted and inside.get(size, True)
        if not fitted and not trial.id.endswith("-verified"):
            outside_of_verification.add(size)
    assert inside[edge]
    outside = [size for size, fits in inside.items() if not fits]
    beyond = min(size for size in outside if size > edge)
    if beyond in outside_of_verification:  # else the largest that was timed below it is the edge
        assert beyond <= 1.02 * edge + 1, "the two are next to each other"
    of_the_heap = "what does not fit lies beyond what does, but for what the heap varies by"
    assert max(size for size, fits in inside.items() if fits) <= 1.02 * edge + 1, of_the_heap
    assert min(outside_of_verification) > 0.98 * edge, of_the_heap


def test_what_the_frontier_chooses_has_fitted_in_processes_that_ran_nothing_else(frontier: Ran) -> None:
    processes = frontier.lane_processes()
    others = processes[: processes.index(processes[-1])]
    assert set(processes[len(others) :]) == {processes[-1]}, "the verification comes last, and alone"
    assert max(Counter(others).values()) > 5, "trials before it shared a process"
    last = [*frontier.study.trials.values()][-1]
    assert last.id.endswith("-verified")
    assert frontier_findings(frontier).chosen.peak_memory_bytes >= last.measured("peak_memory_bytes")


def test_what_was_measured_in_another_study_is_not_measured_again(frontier: Ran, tmp_path: Path) -> None:
    if frontier_findings(frontier).disturbed:
        pytest.skip("the machine was busy while the first study timed: such figures are not kept")
    again = run(tmp_path, remeasure=False, **frontier.changes, seeds=[1])
    assert again.ending == frontier.ending
    assert frontier_findings(again) == frontier_findings(frontier)
    assert "started" not in again.kinds()
