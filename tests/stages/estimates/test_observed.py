"""What runs that were cut, or missed a target, would have come to."""

from __future__ import annotations

import math
from collections.abc import Sequence

import pytest

from batchscout.orchestrator.config.trial import base_trial
from batchscout.orchestrator.stages.estimates.observed import observations
from batchscout.orchestrator.stages.estimates.surface import Observation
from batchscout.orchestrator.study.causes import Cause
from batchscout.orchestrator.study.events import Ended, Evaluated, Promoted, Started, proposed
from batchscout.orchestrator.study.state import Study
from batchscout.orchestrator.study.trial import Metrics, Proposal, TrialState
from tests.support.every import for_every
from tests.support.lane_player import study_of

BASE = base_trial(study_of(), None)


def ran(study: Study, name: str, batch: int, rate: float, at_quarter: float, end: float | None, seed: int = 0) -> None:
    """A run of 512 samples; end: None where it is cut at its first rung."""
    candidate, name = name, f"{name}-s{seed}"
    changes = {
        "seed": seed,
        "micro_batch_size": batch,
        "learning_rate": rate,
        "sample_budget": 512,
        "rungs": (128, 256),
        "evaluations": (128, 512),
    }
    study.apply(proposed(Proposal(name, "train", BASE.model_copy(update=changes), candidate=candidate)))
    study.apply(Started(id=name))
    study.apply(Evaluated(id=name, metrics={"samples_seen": 128, "val_loss": at_quarter}, rungs={128: at_quarter}))
    if end is None:
        study.apply(Ended(id=name, state=TrialState.PRUNED, cause=Cause.RUNG, reason="", metrics={}, seconds=1.0))
        return
    study.apply(Promoted(id=name, rung=128, reason=""))
    study.apply(Evaluated(id=name, metrics={"samples_seen": 512, "val_loss": end}, rungs={}))
    ended = Ended(id=name, state=TrialState.COMPLETE, cause=None, reason="", metrics={"val_loss": end}, seconds=1.0)
    study.apply(ended)


def test_what_was_cut_behind_a_run_of_its_batch_would_have_ended_behind_it() -> None:
    """However far ahead another batch ends: on the way a small one is no nearer to it than that run of its own was."""
    study = Study("s")
    ran(study, "small", 4, 5e-4, 6.23, 5.64)
    ran(study, "large", 8, 7e-4, 6.02, 5.17)
    ran(study, "small-lower-rate", 4, 2.5e-4, 6.49, None)
    cut = next(one for one in observations(study.of_stage("train"), None) if one.learning_rate == 2.5e-4)
    assert cut.loss is not None
    assert 5.64 < cut.loss < 5.64 + (6.49 - 6.23)
    assert 0 < cut.extra_deviation < 6.49 - 6.23


def test_where_none_of_its_batch_went_on_the_best_of_all_is_what_it_is_held_against() -> None:
    study = Study("s")
    ran(study, "large", 8, 7e-4, 6.02, 5.17)
    ran(study, "small", 4, 2.5e-4, 6.49, None)
    cut = next(one for one in observations(study.of_stage("train"), None) if one.effective_batch_size == 4)
    assert cut.loss is not None
    assert 5.17 < cut.loss < 5.17 + (6.49 - 6.02)


def test_what_seeds_differ_by_is_told_of_those_that_were_all_run_to_their_end() -> None:
    study = Study("s")
    for seed, end in enumerate((5.0, 5.1, 5.5)):
        ran(study, "whole", 8, 7e-4, 6.02, end, seed)
        ran(study, "cut", 8, 2.5e-4, 6.49 + end, None, seed)
    told = {one.learning_rate: (one.num_seeds, one.squares) for one in observations(study.of_stage("train"), None)}
    assert told == {7e-4: (3, pytest.approx(0.2**2 + 0.1**2 + 0.3**2)), 2.5e-4: (3, None)}


# To a target loss

TARGET, SECONDS = 3.0, 64
FALL = [(second, 2.0 + 8 / second**0.5) for second in range(8, SECONDS + 1, 8)]
"""(seconds, validation loss) of a run that comes to the target after all of its seconds."""


def slower(times: float, until: int = SECONDS) -> list[tuple[float, float]]:
    """What a run shows until then that comes to every loss so many times later."""
    return [(second, 2.0 + 8 / (second / times) ** 0.5) for second, _ in FALL if second <= until]


def to_target(
    *runs: Sequence[tuple[float, float]], state: TrialState = TrialState.PRUNED, cause: Cause | None = Cause.RUNG
) -> list[Observation]:
    """What is observed of runs that ended so at their last point, the first of which is complete."""
    study = Study("s")
    for number, points in enumerate(runs):
        name, ended = f"run-{number}", (state, cause) if number else (TrialState.COMPLETE, None)
        changes = {"micro_batch_size": 2**number, "sample_budget": 512}
        study.apply(proposed(Proposal(name, "train", BASE.model_copy(update=changes), candidate=name)))
        study.apply(Started(id=name))
        for seconds, loss in points:
            metrics: Metrics = {"samples_seen": 8 * seconds, "train_seconds": seconds, "val_loss": loss}
            study.apply(Evaluated(id=name, metrics=metrics, rungs={}))
        last: Metrics = {"val_loss": points[-1][1]} if points else {}
        study.apply(Ended(id=name, state=ended[0], cause=ended[1], reason="", metrics=last, seconds=1.0))
    return observations(study.of_stage("train"), TARGET)


@for_every(times=[1.1, 1.5, 2.0, 3.0], until=[32, 64], state=[TrialState.PRUNED, TrialState.COMPLETE])
def test_a_run_that_comes_to_every_loss_later_comes_to_the_target_as_many_times_later(
    times: float, until: int, state: TrialState
) -> None:
    """Whether it was cut on its way, or ran to its end and missed the target."""
    found = to_target(FALL, slower(times, until), state=state, cause=None)
    assert [one.loss for one in found] == [pytest.approx(SECONDS), pytest.approx(times * SECONDS, rel=0.1)]
    whole, cut = found
    assert whole.extra_deviation == 0
    assert 0.3 < cut.extra_deviation / (times * SECONDS - until) < 0.7, "the longer what it did not show"


def test_a_run_that_was_cut_after_it_had_reached_the_target_is_known_to_the_second() -> None:
    _, cut = to_target(FALL, [(8, 4.0), (16, 3.5), (24, 2.5), (32, 2.6)])
    assert (cut.loss, cut.extra_deviation) == (20, 0)


@pytest.mark.parametrize("state", [TrialState.PRUNED, TrialState.COMPLETE])
def test_a_run_whose_loss_rose_at_the_end_comes_later_than_it_trained(state: TrialState) -> None:
    """Its last two evaluations lead nowhere, and one that is noise must not make it say nothing."""
    _, rising = to_target(FALL, [*slower(2.0, 56), (64, 3.6)], state=state, cause=None)
    assert rising.loss is not None
    assert SECONDS < rising.loss < 4 * SECONDS


def test_a_run_that_shows_next_to_nothing_of_its_seconds_says_nothing() -> None:
    assert len(to_target(FALL, [])) == 1, "it was never evaluated"
    slow = to_target(FALL, slower(2.0, 32), cause=Cause.LOW_THROUGHPUT)
    assert len(slow) == 1, "its seconds may be those of a passing load"
    rest = [(second, 3.5) for second, _ in FALL]
    assert to_target(rest, slower(2.0, 32)) == [], "no run that ended comes near the target"


def test_seconds_that_no_run_showed_are_a_number_all_the_same() -> None:
    """Where none reached the target, it is told from the one that is projected to reach it first."""
    found = to_target(slower(1.5), slower(3.0, 32))
    assert all(one.loss is not None and SECONDS < one.loss < math.inf for one in found)
    assert found[1].loss == pytest.approx(2 * (found[0].loss or 0), rel=0.05)
