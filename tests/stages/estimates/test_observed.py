"""What runs that were cut would have come to."""

from __future__ import annotations

import pytest

from batchscout.orchestrator.config.trial import base_trial
from batchscout.orchestrator.stages.estimates.observed import observations
from batchscout.orchestrator.study.causes import Cause
from batchscout.orchestrator.study.events import Ended, Evaluated, Promoted, Started, proposed
from batchscout.orchestrator.study.state import Study
from batchscout.orchestrator.study.trial import Proposal, TrialState
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
