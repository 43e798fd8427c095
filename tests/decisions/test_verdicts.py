"""Who meets whom at a rung, and who is close enough to the best to go on."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

import pytest

from batchscout.orchestrator.config.stages import AshaPruner
from batchscout.orchestrator.config.trial import base_trial
from batchscout.orchestrator.decisions import verdicts
from batchscout.orchestrator.study.causes import Cause
from batchscout.orchestrator.study.events import Evaluated, Promoted, Started, proposed
from batchscout.orchestrator.study.messages import HeldLane
from batchscout.orchestrator.study.state import Study
from batchscout.orchestrator.study.trial import PLANNED_RATE, Proposal
from batchscout.trainers.config import BranchPoint, Phase, TrialConfig
from batchscout.trainers.strict import Strict
from tests.support.lane_player import play_stage, steps_of, study_of
from tests.support.worlds import train_config

STAGE = train_config().stages[0]
PRUNER = AshaPruner(min_samples=64)
BASE = base_trial(study_of(), None)
EARLY, LATE = 0, 2
"""Levels at an eighth and at half of the budget."""


def study_with(*runs: tuple[str, int, int, dict[float, float]]) -> Study:
    """Runs of (name, effective batch, budget, validation loss by share of the budget), each where its last loss is."""
    study = Study("s")
    for name, batch, budget, losses in runs:
        rungs = PRUNER.rungs(512, budget)
        changes = {"micro_batch_size": batch, "sample_budget": budget, "rungs": rungs}
        study.apply(proposed(Proposal(name, "train", BASE.model_copy(update=changes), candidate=name)))
        study.apply(Started(id=name))
        for share, loss in losses.items():
            samples = round(share * budget)
            metrics: dict[str, Any] = {"samples_seen": samples, "val_loss": loss}
            at_rung: dict[int, float | None] = {samples: loss} if samples in rungs else {}
            study.apply(Evaluated(id=name, metrics=metrics, rungs=at_rung))
            if at_rung and share < max(losses):
                study.apply(Promoted(id=name, rung=samples, reason=""))
    return study


def judged(study: Study, level: int, stage: Any = STAGE) -> dict[str, str]:
    return {name: str(one.action) for name, one in verdicts.at_rung(study, stage, level, 1).items()}


def test_candidates_of_different_budgets_meet_at_the_same_share_of_their_budgets() -> None:
    """At 256 samples one is half through, and the other a quarter."""
    half, quarter = {0.25: 3.0, 0.5: 3.0}, {0.25: 2.0}
    study = study_with(("short", 8, 512, half), ("long", 16, 1024, quarter), ("other", 4, 512, {0.25: 5.0, 0.5: 5.0}))
    assert judged(study, LATE) == {"short": "go on", "other": "pause"}
    study = study_with(("short", 8, 512, half), ("long", 16, 1024, quarter | {0.5: 2.0}))
    assert judged(study, LATE) == {"long": "go on", "short": "stop"}
    reason = verdicts.at_rung(study, STAGE, LATE, 1)["short"].reason
    assert reason == "ranked 2 of 2 after 256 to 512 samples (the same share of each budget); the best continues"


def test_a_stage_that_is_added_is_judged_by_its_own_pruner() -> None:
    class Added(Strict):
        type: Literal["train"] = "train"
        pruner: AshaPruner = PRUNER

    study = study_with(("a", 8, 512, {0.125: 3.0}), ("b", 8, 512, {0.125: 9.0}))
    assert judged(study, EARLY, Added()) == {"a": "go on", "b": "stop"}


def test_early_only_those_of_one_effective_batch_meet() -> None:
    first = 0.125
    study = study_with(
        ("8", 8, 512, {first: 3.0}),
        ("8-other", 8, 512, {first: 9.0}),
        ("16", 16, 1024, {first: 9.0}),
        ("4", 4, 256, {first: 10.0}),
    )
    assert judged(study, EARLY) == {"8": "go on", "8-other": "stop", "16": "go on", "4": "go on"}


def test_late_all_meet() -> None:
    late = {0.25: 3.0, 0.5: 3.0}
    study = study_with(
        ("8", 8, 512, late), ("16", 16, 1024, {0.25: 9.0, 0.5: 9.0}), ("4", 4, 256, {0.25: 10.0, 0.5: 10.0})
    )
    assert judged(study, LATE) == {"8": "go on", "16": "go on", "4": "stop"}


@pytest.mark.parametrize(
    ("quarter", "on"),
    [
        (4.0, {"best", "second", "within"}),  # it gained 1.0 since a quarter: that may still be caught up
        (3.1, {"best", "second"}),
        (2.9, {"best", "second"}),  # it got worse
    ],
)
def test_who_trails_the_leader_by_less_than_its_latest_gain_is_not_cut(quarter: float, on: set[str]) -> None:
    study = study_with(
        ("best", 8, 512, {0.25: quarter, 0.5: 3.0}),
        ("second", 16, 512, {0.25: 9.0, 0.5: 3.4}),
        ("within", 4, 512, {0.25: 9.0, 0.5: 3.99}),
        ("beyond", 2, 512, {0.25: 9.0, 0.5: 4.01}),
    )
    decisions = judged(study, LATE)
    assert {name for name, action in decisions.items() if action == "go on"} == on
    assert {action for name, action in decisions.items() if name not in on} == {"stop"}


@pytest.mark.parametrize("evaluations", [1, 2, 4, 5, 6, 8])
def test_however_seldom_runs_are_evaluated_none_is_cut_for_trailing_by_less_than_the_leader_gains(
    tmp_path: Path, evaluations: int
) -> None:
    """The higher rate ends lower, and trails at a quarter by a sixth of what the other has gained since an eighth."""

    def world(config: TrialConfig, samples: int) -> dict[str, Any]:
        share, is_higher = samples / config.sample_budget, config.learning_rate > 1e-3
        loss = 4 - share + is_higher * (0.04 - 0.08 * share)
        return {"loss": loss, "val_loss": loss, "train_seconds": samples / 100}

    rates = {"type": "grid", "micro_batch_size": [8], "learning_rate": [1e-3, 2e-3], "pruner": {"type": "asha"}}
    config = study_of(stages=[rates], evaluations=evaluations)
    study = play_stage(tmp_path / "journal.jsonl", config, "grid", world)
    assert [str(trial.state) for trial in study.of_stage("grid")] == ["complete", "complete"]


def test_who_has_reached_the_target_with_all_seeds_is_not_cut_for_its_loss(tmp_path: Path) -> None:
    """Its seconds are known, and only what ran to its end can be chosen. A seed that has not come there may still decide it."""
    levels = {1e-3: 2.0, 2e-3: 2.3, 3e-3: 2.6, 4e-3: 3.5}

    def world(config: TrialConfig, samples: int) -> dict[str, Any]:
        loss = levels[config.learning_rate] + (0.6 * config.seed if config.learning_rate == 3e-3 else 0.0)
        return {"loss": loss, "val_loss": loss, "train_seconds": samples / 100}

    rates = {"type": "grid", "micro_batch_size": [8], "learning_rate": [*levels], "pruner": {"type": "asha"}}
    for seeds, cut in (([0], {4e-3}), ([0, 1], {3e-3, 4e-3})):
        config = study_of(stages=[rates], objective="target", target_loss=3.0, seeds=seeds)
        study = play_stage(tmp_path / f"{len(seeds)}.jsonl", config, "grid", world)
        pruned = {one.config.learning_rate for one in study.of_stage("grid") if one.cause is Cause.RUNG}
        assert pruned == cut


def verdict_on(losses: list[float], samples_seen: int, **changes: Any) -> str:
    """Of a run with a step of 8 samples, or of 16 from 80 samples on where it has a ramp."""
    config = BASE.model_copy(update={"micro_batch_size": 8, "warmup_samples": 0, **changes})
    study = Study("s")
    study.apply(proposed(Proposal("run", "train", config, candidate="run")))
    decision = verdicts.on_losses(study_of(), study.trials["run"], {"samples_seen": samples_seen}, steps_of(losses))
    return str(decision.action)


def test_a_ramp_is_held_against_its_own_start() -> None:
    ramp = (Phase(from_samples=80, gradient_accumulation_steps=2, learning_rate=1e-3),)
    risen, seen = [3.0] * 5 + [9.0] * 15, 10 * 8 + 10 * 16
    assert verdict_on(risen, seen, ramp=ramp) == "stop"
    assert verdict_on(risen[1:], seen, ramp=ramp) == "go on", "the first losses were not heard"


def test_the_first_losses_of_a_branch_are_no_start() -> None:
    point = BranchPoint(directory="trials/trunk", samples=800)
    assert verdict_on([3.0] * 5 + [9.0] * 15, 800 + 20 * 8, branch_from=point, sample_budget=2048) == "go on"


def test_a_run_does_not_lose_for_the_node_that_it_runs_on() -> None:
    """Node b takes 2.5 times as long, and runs below half the speed of the best, or of the planned one, are stopped."""
    study = Study("s")
    runs = [(f"{node}{n}-{size}", node, size) for n in range(4) for size in (4, 8) for node in ("a", "b")]
    for name, node, size in runs:
        accumulation, seconds = 16 // size, (2.5 if node == "b" else 1.0) * 2 * (1 + 0.01 * len(study.trials))
        config = BASE.model_copy(update={"micro_batch_size": size, "gradient_accumulation_steps": accumulation})
        plan = {PLANNED_RATE: 8.0}
        study.apply(proposed(Proposal(name, "train", config, candidate=name, expected=plan)))
        study.apply(Started(id=name))
        metrics: dict[str, Any] = {"samples_seen": 400, "step_seconds": seconds, "tokens_per_second": 16 / seconds}
        study.apply(Evaluated(id=name, metrics=metrics, lane=HeldLane(0, node)))

    def verdict(name: str, share: float, objective: str = "time") -> str:
        config = study_of(kill={"min_relative_throughput": 0.5}, objective=objective)
        trial = study.trials[name]
        rates = {key: (trial.metric(key) or 0.0) * share for key in ("tokens_per_second",)}
        metrics: dict[str, Any] = trial.metrics | rates | {"step_seconds": trial.measured("step_seconds") / share}
        return str(verdicts.on_speed(study, config, trial, metrics).action)

    assert {verdict(name, 1.0) for name, _, _ in runs} == {"go on"}
    assert {verdict(name, 0.4) for name, _, _ in runs} == {"stop"}, "what is slow on any node is stopped on each"
    assert {verdict(name, 0.1, "samples") for name, _, _ in runs} == {"go on"}, (
        "where samples are compared no run is too slow"
    )
