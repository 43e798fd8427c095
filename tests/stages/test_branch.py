"""The critical batch is found where it is known, said to be undetermined where the seeds cannot tell, and where it grows
ramps are trained at equal cost."""

from __future__ import annotations

import itertools
import json
import math
import statistics
from collections import Counter
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

from batchscout.orchestrator.config.keys import StudyConfig
from batchscout.orchestrator.config.stages import Branch
from batchscout.orchestrator.output.recommendation import Recommendation, recommend
from batchscout.orchestrator.output.report.page import render_report
from batchscout.orchestrator.stages import branch, stage_of
from batchscout.orchestrator.stages.branch import BranchFindings, PointFindings
from batchscout.orchestrator.stages.branch.critical import growth
from batchscout.orchestrator.stages.branch.ramps import doublings
from batchscout.orchestrator.stages.context import StageContext
from batchscout.orchestrator.stages.estimates.ranking import standings, tie_width
from batchscout.orchestrator.stages.train import LearningRateFindings
from batchscout.orchestrator.study.causes import Cause
from batchscout.orchestrator.study.events import Concluded, Ended, Evaluated, RunBegan, proposed
from batchscout.orchestrator.study.journal import Journal
from batchscout.orchestrator.study.state import Study
from batchscout.orchestrator.study.trial import Proposal, Trial, TrialState
from batchscout.trainers.config import BranchPoint, TrialConfig
from batchscout.trainers.step_log import read_steps
from tests.support.lane_player import Player, World, director_of, play_stage, study_of
from tests.support.loss_worlds import CriticalWorld
from tests.support.outcome import found_by, recommendation_of
from tests.support.real_player import run_for_real
from tests.support.studies import tiny_study
from tests.support.worlds import BOOM, failing

BATCH, BUDGET = 8, 8192
POINTS = (2048, 4096)
SAMPLES = 1600
"""Of each branch: a fifth of the run, in whole steps of 64."""
GROWING = CriticalWorld(16, exponent=1.0, half_speed_batch=16)
"""16 at the first point, 32 at the second; and larger batches are faster."""
SEEDS = [0, 1, 2]
"""One seed tells no waste of a tenth of the run's samples from what seeds make."""


def study(**changes: Any) -> StudyConfig:
    stage = {"type": "branch"} | changes.pop("stage", {})
    stages = [{"type": "train"}, *changes.pop("between", []), stage]
    return study_of(**{"stages": stages, "sample_budget": BUDGET, "batch": {"micro_batch_size": BATCH}} | changes)


def played(world: World, **changes: Any) -> tuple[StudyConfig, Study]:
    """Every stage to its conclusion; `train` has one batch alone. Trials are not played step by step: each is evaluated
    where it is to be, and ends."""
    config = study(**changes)
    known = Study(config.name)
    for keys in config.stages:
        context = StageContext(keys, config, known)
        while new := [one for one in stage_of(keys).propose(context) if one.id not in known.trials]:
            for wanted in new:
                _run(known, wanted, world)
        known.apply(Concluded(**asdict(stage_of(keys).conclude(context))))
    return config, known


def _run(known: Study, wanted: Proposal, world: World) -> None:
    known.apply(proposed(wanted))
    config, end = wanted.config, {"cause": None, "reason": "", "metrics": {}, "seconds": 1.0}
    for samples in sorted({*config.evaluations, config.sample_budget}):
        point = world(config, samples)
        if "outcome" in point:
            end |= {"state": TrialState(point["outcome"]), "cause": Cause.OUT_OF_MEMORY, "reason": point["reason"]}
            break
        if math.isnan(point["loss"]):
            end |= {"state": TrialState.PRUNED, "cause": Cause.DIVERGED, "reason": "the loss is nan"}
            break
        known.apply(Evaluated(id=wanted.id, metrics=point))
    known.apply(Ended(**({"id": wanted.id, "state": TrialState.COMPLETE} | end)))


def findings_of(known: Study) -> BranchFindings:
    return found_by(known, BranchFindings)


def critical(known: Study) -> list[int | None]:
    return [point.critical_batch_size for point in findings_of(known).points]


def reason(known: Study) -> str:
    return known.conclusions["branch"].reason


def context_of(config: StudyConfig, known: Study) -> StageContext[Branch]:
    keys = config.keys_of(Branch)
    assert keys is not None
    return StageContext(keys, config, known)


def runs(known: Study) -> dict[str, Trial]:
    return {trial.id: trial for trial in known.of_stage("branch")}


# Worlds with a known critical batch


@pytest.mark.parametrize("truth", [8, 16, 32])
def test_one_seed_finds_the_critical_batch_within_a_factor_of_two(truth: int) -> None:
    _, known = played(CriticalWorld(truth))
    assert all(point.low <= truth < (point.high or math.inf) for point in findings_of(known).points)
    assert all(point.low >= truth / 2 and (point.high or 64) <= 4 * truth for point in findings_of(known).points)


@pytest.mark.parametrize("truth", [8, 16, 32])
def test_the_critical_batch_is_found_and_one_that_stays_makes_no_ramp(truth: int) -> None:
    _, known = played(CriticalWorld(truth), seeds=SEEDS)
    assert critical(known) == [truth, truth]
    assert [point.high for point in findings_of(known).points] == [2 * truth, 2 * truth]
    assert findings_of(known).growth == "stayed"
    assert reason(known).startswith(f"the critical batch is {truth} ({2 * truth} ends 0.")
    assert reason(known).endswith("at 4.1k samples: it did not grow")
    assert not any(trial.config.ramp for trial in runs(known).values())


def test_one_that_grows_is_found_at_both_points() -> None:
    _, known = played(GROWING, seeds=SEEDS)
    assert critical(known) == [16, 32]
    assert findings_of(known).growth == "grew"


def test_one_beyond_all_that_was_tried_is_told_as_that() -> None:
    _, known = played(CriticalWorld(1000))
    assert critical(known) == [64, 64]
    assert reason(known) == (
        "the critical batch is 64 or more at 2.05k samples, 64 or more at 4.1k samples: whether it grew is undetermined"
    )


@pytest.mark.parametrize("num_seeds", [2, 4])
def test_in_noise_as_large_as_what_is_lost_it_is_undetermined(num_seeds: int) -> None:
    """And hardly ever told wrongly, whatever the seeds draw."""
    world = CriticalWorld(16, seed_deviation=0.01, paired=2.0)
    told: list[int | None] = []
    for number in range(10):
        told += critical(played(world, seeds=[10 * number + seed for seed in range(num_seeds)])[1])
    assert told.count(None) >= len(told) / 2
    assert sum(value not in (None, 16) for value in told) <= 0.2 * len(told)


def test_undetermined_says_between_which_batches() -> None:
    def noisy_at_16(config: TrialConfig, samples: int) -> dict[str, Any]:
        point = CriticalWorld(16)(config, samples)
        return point | ({"val_loss": 1.017 * point["val_loss"]} if config.effective_batch_size == 16 else {})

    _, known = played(noisy_at_16)
    first = findings_of(known).points[0]
    assert (first.critical_batch_size, first.low, first.high) == (None, 8, 32)
    assert reason(known).startswith("the critical batch is undetermined (from 8 to below 32) at 2.05k samples")


def test_a_larger_batch_that_comes_back_while_a_smaller_does_not_leaves_all_open() -> None:
    def worse_at_16(config: TrialConfig, samples: int) -> dict[str, Any]:
        point = CriticalWorld(1000)(config, samples)
        return point | ({"val_loss": 1.1 * point["val_loss"]} if config.effective_batch_size == 16 else {})

    _, known = played(worse_at_16)
    assert [(p.low, p.high, p.critical_batch_size) for p in findings_of(known).points] == [(8, None, None)] * 2
    assert findings_of(known).growth == "undetermined"
    assert "undetermined (8 or more) at 2.05k samples" in reason(known)


def test_a_batch_that_diverges_is_lost_and_so_are_larger_ones() -> None:
    def diverges(config: TrialConfig, samples: int) -> dict[str, Any]:
        lost = config.branch_from is not None and config.effective_batch_size == 32
        return CriticalWorld(1000)(config, samples) | ({"loss": math.nan, "val_loss": math.nan} if lost else {})

    _, known = played(diverges, stage={"multiples": [2, 4]})
    assert critical(known) == [16, 16]
    assert "16 (32 diverges) at 2.05k samples" in reason(known)


# The runs


def test_branches_of_a_seed_begin_with_its_trunk_and_take_the_same_samples_at_the_rescaled_rate() -> None:
    config, known = played(CriticalWorld(16), seeds=[0, 1])
    chosen = known.trials[findings_of(known).source].config
    for seed in config.seeds:
        trunk = known.trials[f"branch-trunk-s{seed}"].config
        assert (trunk.kept_checkpoints, trunk.sample_budget, trunk.seed) == (POINTS, POINTS[-1] + BATCH, seed)
        assert (trunk.split, trunk.learning_rate, trunk.warmup_samples) == (
            chosen.split, chosen.learning_rate, chosen.warmup_samples
        )  # fmt: skip
        for point in POINTS:
            for multiple in (1, 2, 4, 8):
                run = known.trials[f"branch-at{point}-x{multiple}-s{seed}"].config
                assert run.branch_from == BranchPoint(directory=f"../branch-trunk-s{seed}", samples=point)
                assert (run.sample_budget, run.schedule.type) == (point + SAMPLES, "constant")
                assert run.effective_batch_size == multiple * BATCH
                assert run.micro_batch_size == chosen.micro_batch_size
                assert run.learning_rate == pytest.approx(chosen.learning_rate * multiple**0.5)
                assert SAMPLES % run.effective_batch_size == 0


def test_branches_wait_for_their_trunk() -> None:
    config, whole = played(CriticalWorld(16))
    known = Study(config.name, trials={"train-m8k1": whole.trials["train-m8k1"]}, conclusions=whole.conclusions)
    assert [wanted.id for wanted in branch.STAGE.propose(context_of(config, known))] == ["branch-trunk"]


def test_the_run_that_the_learning_rate_stage_chose_is_branched_from() -> None:
    def better_at_twice_the_rate(config: TrialConfig, samples: int) -> dict[str, Any]:
        point = CriticalWorld(16)(config, samples)
        return point | ({"val_loss": 0.9 * point["val_loss"]} if config.learning_rate > 1.5e-3 else {})

    _, known = played(
        better_at_twice_the_rate, between=[{"type": "learning_rate", "multipliers": [2, 1]}],
        stage={"multiples": [2]},
    )  # fmt: skip
    tuned = found_by(known, LearningRateFindings)
    assert findings_of(known).source == tuned.winner
    assert known.trials["branch-trunk"].config.learning_rate == pytest.approx(tuned.learning_rate)


def test_what_the_run_is_too_short_for_is_left_out_with_its_numbers() -> None:
    _, known = played(CriticalWorld(16), sample_budget=1600, stage={"at": [0.05, 0.5]}, optimizer={"warmup": 200})
    assert [point.samples_seen for point in findings_of(known).points] == [800]
    assert known.conclusions["branch"].notes[:2] == (
        "no branch begins at 0.05 of train-m8k1, 80 samples: its warm-up ends at 200; begin later (stages.branch.at)",
        "effective batch 64 was left out: the 320 samples of a branch are 5.0 of its optimizer steps, fewer than 10; "
        "raise stages.branch.samples or sample_budget",
    )
    assert "whether it grew" not in reason(known), "there is one point alone"


def test_a_run_that_is_too_short_for_any_branch_ends_with_that() -> None:
    config, known = played(CriticalWorld(16), sample_budget=400)
    assert known.conclusions["branch"].ok
    assert reason(known).startswith("undetermined: the chosen run is too short to branch from")
    assert not runs(known)
    assert recommend(config, known) is not None


def test_branches_that_all_fail_leave_the_chosen_run_recommended() -> None:
    config, known = played(failing(CriticalWorld(16), lambda one: one.branch_from is not None, "out_of_memory"))
    assert reason(known).startswith("undetermined:")
    assert known.conclusions["branch"].notes[0] == f"branch-at2048-x1 did not finish: out_of_memory: {BOOM}"
    recommended = recommendation_of(config, known)
    assert recommended.evidence.trial == "train-m8k1"
    assert [one.trial for one in recommended.alternatives] == []


def play(path: Path, config: StudyConfig, *stops: int) -> Study:
    """Step by step; the driver leaves the branch stage after so many messages, and comes again."""
    world, disk = CriticalWorld(32, exponent=1.0, half_speed_batch=16), dict[str, Any]()
    known = play_stage(path, config, "train", world)
    for stop_after in (*stops, None):
        with Journal(path, config.name) as journal:
            journal.append(RunBegan(token="next"))
            known = Player(director_of(config, journal, "branch"), world, disk=disk, stop_after=stop_after).play()
    return known


def test_a_study_that_is_stopped_in_the_middle_proposes_what_it_would_have(tmp_path: Path) -> None:
    """In trunk, branches and ramps, again and again; every run goes on from its checkpoint."""
    config = study(seeds=SEEDS, sample_budget=2048, stage={"multiples": [2]})
    whole, stopped = play(tmp_path / "whole", config), play(tmp_path / "stopped", config, 1, 4, 6, 9)
    assert "branch-doubling-s0" in whole.trials
    assert {name: trial.proposal for name, trial in stopped.trials.items()} == {
        name: trial.proposal for name, trial in whole.trials.items()
    }
    assert stopped.conclusions == whole.conclusions


# Ramps


def test_where_it_grows_ramps_follow_it_in_the_time_of_the_chosen_run() -> None:
    _, known = played(GROWING, seeds=SEEDS)
    doubling, linear = (known.trials[f"branch-{kind}-s0"].config for kind in ("doubling", "linear"))
    assert [(p.from_samples, p.gradient_accumulation_steps) for p in doubling.ramp] == [(2048, 2), (4096, 4)]
    assert [p.gradient_accumulation_steps for p in linear.ramp] == [2, 3, 4]
    assert linear.ramp[-1].from_samples == POINTS[-1]
    for ramp in (doubling, linear):
        for phase in ramp.ramp:
            expected = 1e-3 * phase.gradient_accumulation_steps**0.5
            assert phase.learning_rate == pytest.approx(expected)
        seconds = GROWING(ramp, ramp.sample_budget)["train_seconds"]
        assert seconds == pytest.approx(BUDGET / GROWING.samples_per_second(BATCH), rel=0.01)
        assert ramp.sample_budget > 1.3 * BUDGET


def mean_loss(known: Study, candidate: str) -> float:
    return statistics.fmean(known.trials[f"{candidate}-s{seed}"].measured("val_loss") for seed in SEEDS)


def test_a_ramp_that_wins_is_recommended_with_its_phases() -> None:
    config, known = played(GROWING, seeds=SEEDS)
    findings = findings_of(known)
    assert findings.winner == "branch-linear-s0"
    assert findings.ramps[0].val_loss < known.trials[findings.source].measured("val_loss")
    assert ": it grew; the linear ramp ends at " in reason(known)
    assert "the linear ramp wins by more than the seeds' spread (0.0" in reason(known)
    recommended = recommendation_of(config, known)
    assert recommended.evidence.trial == "branch-linear-s0"
    others = {known.trials[one.trial].candidate for one in recommended.alternatives}
    assert others == {"branch-doubling", "train-m8k1"}
    assert recommended.ramp == known.trials["branch-linear-s0"].config.ramp
    assert Recommendation.from_json(json.dumps(recommended.to_json())) == recommended
    chosen, ramp = (mean_loss(known, name) for name in ("train-m8k1", "branch-linear"))
    assert recommended.verdict == (
        "Train with micro-batch 8, no accumulation (effective batch 8), activation checkpointing none and learning rate 0.001, "
        "and let the effective batch grow: 16 after 1,365 samples (learning rate 0.00141), 24 after 2,731 samples (learning rate "
        f"0.00173), 32 after 4,096 samples (learning rate 0.002): it ends at val loss {ramp:.3f}, the same run with a batch that "
        f"stays ends at val loss {chosen:.3f} after the same training time; the difference is more than seeds vary; for that one, it "
        "is the only batch that was tried. Measured with 3 seeds, 256 validation samples, a run of 14.4k samples, effective batch "
        "8, accumulation up to 4."
    )
    page = render_report(config, known, recommended)
    assert "the batch is to grow (ramp), which a study file cannot express" in page


def test_a_ramp_has_the_doubts_about_the_rate_of_the_run_that_it_grows_from() -> None:
    def better_at_twice_the_rate(config: TrialConfig, samples: int) -> dict[str, Any]:
        point = GROWING(config, samples)
        return point | {"val_loss": point["val_loss"] - (0.05 if config.learning_rate > 1.5e-3 or config.ramp else 0)}

    config, known = played(
        better_at_twice_the_rate, seeds=SEEDS, between=[{"type": "learning_rate", "multipliers": [2, 1]}]
    )
    assert findings_of(known).winner == "branch-linear-s0"
    for on_edge in (False, True):
        tuned = known.conclusions["learning_rate"]
        assert isinstance(tuned.findings, dict)
        known.conclusions["learning_rate"] = replace(tuned, findings=tuned.findings | {"on_edge": on_edge})
        recommended = recommendation_of(config, known)
        assert any("at the edge" in caveat for caveat in recommended.answer.caveats) is on_edge
        assert ("at the edge" in recommended.verdict) is on_edge


def test_a_ramp_that_gains_nothing_is_not() -> None:
    config, known = played(replace(GROWING, half_speed_batch=0), seeds=SEEDS)
    assert findings_of(known).winner is None
    assert "no ramp wins by more than the seeds' spread (0.0" in reason(known)
    recommended = recommendation_of(config, known)
    assert recommended.evidence.trial == "train-m8k1-s0"
    assert "ramp" not in recommended.to_json()
    assert "grow" not in recommended.verdict


def test_the_better_of_two_ramps_wins_by_more_than_seeds_make_a_single_one_lower() -> None:
    config, known = played(replace(GROWING, half_speed_batch=0), seeds=SEEDS)

    def wins(lower_by: float) -> bool:
        """The linear ramp, where each of its seeds ends lower than the chosen run's by so much."""
        for seed in SEEDS:
            trial, chosen = known.trials[f"branch-linear-s{seed}"], known.trials[f"train-m8k1-s{seed}"]
            lower = {"val_loss": chosen.measured("val_loss") - lower_by}
            known.trials[trial.id] = replace(trial, metrics=trial.metrics | lower)
        findings = branch.STAGE.conclude(context_of(config, known)).findings
        assert isinstance(findings, dict)
        return findings["winner"] == "branch-linear-s0"

    wins(0.0)
    full = [trial for trial in known.trials.values() if trial.is_full_run]
    width = tie_width(standings(full))
    assert not wins(1.2 * width)
    assert wins(1.6 * width)


def test_at_equal_samples_a_ramp_has_as_many() -> None:
    _, known = played(GROWING, seeds=SEEDS, objective="samples")
    assert known.trials["branch-doubling-s0"].config.sample_budget == BUDGET


def test_to_a_target_the_ramp_that_gets_there_sooner_by_more_than_the_spread_wins() -> None:
    _, known = played(GROWING, seeds=SEEDS, objective="target", target_loss=2.55)
    assert findings_of(known).winner == "branch-linear-s0"
    assert "the linear ramp reaches the target after 1" in reason(known)


def test_two_ramps_that_are_the_same_are_trained_once() -> None:
    _, known = played(CriticalWorld(8, exponent=1.0), seeds=SEEDS, stage={"at": [0.25, 0.5]})
    assert [trial.id for trial in known.trials.values() if trial.config.ramp] == [
        f"branch-doubling-s{seed}" for seed in SEEDS
    ]


def test_no_ramp_is_trained_where_the_study_file_wants_none() -> None:
    _, known = played(GROWING, seeds=SEEDS, stage={"ramps": []})
    assert findings_of(known).growth == "grew"
    assert not any(trial.config.ramp for trial in known.trials.values())


def points(*found: tuple[int, int, int | None]) -> list[PointFindings]:
    """(samples, largest that comes back, smallest that does not)."""
    return [PointFindings(samples, (), low, high, low) for samples, low, high in found]


@pytest.mark.parametrize(
    ("known", "expected"),
    [
        (points((1000, 16, 32), (4000, 64, 128)), (1008, 2016, 4032)),  # 32 half way, in logarithms
        (points((1000, 8, 16), (4000, 32, 64)), (2000, 4000)),
        (points((1000, 64, None), (4000, 128, None)), (1008, 1024, 1088, 4096)),  # a step of each batch at least
        (points((1000, 8, 16), (2000, 32, 64), (4000, 16, 32)), (1424, 2016)),  # once grown it stays
        (points((1000, 8, 16), (2000, 24, 32)), (1552,)),  # 24 holds one doubling
    ],
)
def test_the_batch_doubles_where_the_critical_batch_is_that_large(
    known: list[PointFindings], expected: tuple[int, ...]
) -> None:
    assert doublings(8, known) == expected


@pytest.mark.parametrize(
    ("known", "expected"),
    [
        (points((1, 8, 16), (2, 16, 32)), "grew"),
        (points((1, 8, 16), (2, 16, None)), "grew"),
        (points((1, 8, 32), (2, 16, None)), "undetermined"),  # 16 may be lost at neither
        (points((1, 8, 16), (2, 8, 16)), "stayed"),
        (points((1, 64, None), (2, 64, None)), "undetermined"),
        (points((1, 16, 32), (2, 8, 16)), "shrank"),
        (points((1, 8, 16)), "undetermined"),
    ],
)
def test_growth_is_told_only_where_it_is_certain(known: list[PointFindings], expected: str) -> None:
    assert growth(known) == expected


# What it is shown as


def test_the_figures_are_the_branches_of_every_point_the_critical_batch_and_the_ramps() -> None:
    config, known = played(GROWING, seeds=SEEDS)
    first, second, batch, *ramps = branch.STAGE.figures(context_of(config, known))
    assert [series.label for series in first.series] == ["batch 8", "batch 16", "batch 32", "batch 64"]
    for series in second.series:
        assert [mark.x for mark in series.marks] == pytest.approx([4496, 4896, 5296, 5696], abs=64)
    ends = [known.trials[f"branch-at2048-x8-s{seed}"].measured("val_loss") for seed in SEEDS]
    assert first.series[-1].marks[-1].y == pytest.approx(statistics.fmean(ends))
    assert [(mark.x, mark.y, mark.high) for mark in batch.series[0].marks] == [(2048, 16, 32), (4096, 32, 64)]
    assert len(ramps) == 2


def test_branches_that_diverge_do_not_flatten_the_others() -> None:
    config, known = played(GROWING, seeds=SEEDS)
    plain, *_ = branch.STAGE.figures(context_of(config, known))
    for trial in known.of_stage("branch"):
        if trial.id.startswith("branch-at2048-x8"):
            huge = tuple(point | {"val_loss": 1e6} for point in trial.history)
            known.trials[trial.id] = replace(trial, history=huge)
    figure, *_ = branch.STAGE.figures(context_of(config, known))
    assert figure.y.top is not None
    assert figure.y.top <= max(mark.y for one in plain.series for mark in one.marks)
    assert "evaluations above" in figure.caption


def test_before_train_has_chosen_there_is_nothing_to_draw() -> None:
    config = study()
    assert branch.STAGE.figures(context_of(config, Study(config.name))) == []


def test_the_plan_says_what_it_would_run() -> None:
    config = study()
    context = context_of(config, Study(config.name))
    assert branch.STAGE.describe(context) == [
        "from 0.25, 0.5 of the chosen run, branches of 0.2 of it at 1, 2, 4, 8 x its batch: the critical batch; where that "
        "grows, a ramp: doubling, linear"
    ]
    assert branch.STAGE.num_full_runs(context) == 2 + 3, "0.5 of a run for the trunk, and 8 branches of a fifth"


def test_a_trunk_and_branches_are_no_full_runs() -> None:
    _, known = played(GROWING, seeds=SEEDS)
    full = [trial.id for trial in known.trials.values() if trial.is_full_run]
    assert full == [f"{name}-s{seed}" for name in ("train-m8k1", "branch-doubling", "branch-linear") for seed in SEEDS]
    assert all(trial.state is TrialState.COMPLETE for trial in known.trials.values())


# For real


@pytest.mark.slow
def test_a_real_run_is_branched_from_and_ramped(tmp_path: Path) -> None:
    """A model that is far from its data at the first point and near it at the second: its critical batch grows."""
    config = tiny_study(
        model={"target": "tests.support.studies:Mean"},
        data={"target": "tests.support.studies:points"},
        optimizer={
            "type": "sgd", "betas": [0, 0.95], "lr": 0.02, "lr_scaling": "none", "weight_decay": 0,
            "max_gradient_norm": None,
        },
        batch={"micro_batch_size": 4}, compile=False, statistics=False, sample_budget=2048, evaluation_samples=256,
        objective="samples",
        stages=[{"type": "train"}, {"type": "branch", "at": [0.25, 0.75], "multiples": [4], "samples": 0.25}],
    )  # fmt: skip
    known = run_for_real(config, tmp_path)
    findings = findings_of(known)
    assert [(point.low, point.high) for point in findings.points] == [(4, 16), (16, None)]
    by_samples = {point["samples_seen"]: point["val_loss"] for point in known.trials["train-m4k1"].history}
    first, last = (known.trials[f"branch-at{point}-x1"].measured("val_loss") for point in (512, 1536))
    assert first == by_samples[1024], "at 1 x a branch is the chosen run"
    assert last != by_samples[2048], "but its rate does not fall"
    for kind, expected in (("doubling", {4: 888, 8: 648, 16: 512}), ("linear", {4: 512, 8: 512, 12: 516, 16: 512})):
        trial = known.trials[f"branch-{kind}"]
        assert trial.state is TrialState.COMPLETE
        seen = [0, *(step.samples_seen for step in read_steps(tmp_path / "trials" / trial.id / "steps.jsonl"))]
        batches = Counter[int]()
        for before, after in itertools.pairwise(seen):
            batches[after - before] += after - before
        assert batches == expected
    assert findings.winner is None, "at equal samples a ramp gains nothing here"
    kept = {path.parent.name for path in tmp_path.glob("trials/*/checkpoints")}
    assert kept == {"train-m4k1", "branch-doubling", "branch-linear"}, (
        "nobody needs those of trunk and branches any more"
    )
