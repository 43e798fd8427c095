"""Which batch is best at equal cost, played in worlds where the answer is known."""

from __future__ import annotations

import json
import math
import random
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from batchscout.orchestrator.config.keys import StudyConfig
from batchscout.orchestrator.config.stages import Train
from batchscout.orchestrator.config.trial import optimizer_at
from batchscout.orchestrator.decisions.further import wanted_by
from batchscout.orchestrator.output.deciding import to_decide
from batchscout.orchestrator.stages import train
from batchscout.orchestrator.stages.context import StageContext
from batchscout.orchestrator.stages.estimates.observed import observations
from batchscout.orchestrator.stages.estimates.ranking import standings
from batchscout.orchestrator.stages.train import FIRST_RUNS, TrainFindings, full_runs
from batchscout.orchestrator.stages.train.conclude import WINNERS_CUT
from batchscout.orchestrator.study.causes import Cause
from batchscout.orchestrator.study.events import RunBegan
from batchscout.orchestrator.study.facts import Facts
from batchscout.orchestrator.study.journal import Journal, replay
from batchscout.orchestrator.study.state import Study
from batchscout.orchestrator.study.trial import Proposal, Trial, TrialState
from batchscout.trainers.config import TrialConfig
from tests.support.known_stage import Known
from tests.support.lane_player import Player, World, director_of, know, play_stage, study_of
from tests.support.loss_worlds import FLAT, IDEAL, SMALL_IS_RIGHT, LossWorld
from tests.support.outcome import found_by, recommendation_of
from tests.support.real_player import run_for_real
from tests.support.studies import tiny_study
from tests.support.tiny import ROOT, newest_state
from tests.support.worlds import failing

BATCHES = (4, 8, 16, 32, 64, 128, 256)
BUDGET = 8192
OFF = "runs did not train at the speed they were timed at"


def study(**changes: Any) -> StudyConfig:
    stage = {"type": "train"} | changes.pop("stage", {})
    return study_of(**{"stages": [stage], "sample_budget": BUDGET} | changes)


def played(
    path: Path,
    truth: LossWorld,
    world: World | None = None,
    batches: tuple[int, ...] = BATCHES,
    facts: Facts | None = None,
    **changes: Any,
) -> tuple[StudyConfig, Study]:
    config, found = study(**changes), [truth.rates(batches)]
    path.mkdir(exist_ok=True)
    return config, play_stage(path / "journal.jsonl", config, "train", world or truth, found=found, facts=facts)


def findings_of(known: Study) -> TrainFindings:
    return found_by(known, TrainFindings)


def chosen(known: Study) -> int:
    return known.trials[findings_of(known).winner].config.effective_batch_size


def at_equal_time(world: LossWorld, batch: int) -> float:
    """What the batch comes to at its best learning rate, in the time that batch 8 takes for the budget."""
    return world.best_loss(batch, BUDGET * world.samples_per_second(batch) / world.samples_per_second(8))


# Worlds


def test_a_batch_that_is_far_slower_than_it_was_timed_is_stopped_and_not_chosen(tmp_path: Path) -> None:
    """Its samples were planned for that speed, so at their end it would be held against others at three times their cost."""
    _, known = played(tmp_path, IDEAL, slowed_by(3.0, 64))
    stopped = too_slow(known)
    assert {trial.config.effective_batch_size for trial in stopped} == {64}
    assert {trial.state for trial in stopped} == {TrialState.PRUNED}
    assert all(
        trial.reason.endswith("it would take 3.0 x the training time that every candidate has") for trial in stopped
    )
    assert chosen(known) != 64
    assert too_slow(played(tmp_path / "as timed", IDEAL)[1]) == []


def slowed_by(factor: float, *batches: int) -> World:
    def world(config: TrialConfig, samples: int) -> dict[str, Any]:
        found = IDEAL(config, samples)
        slower = factor if config.effective_batch_size in batches else 1.0
        return found | {"step_seconds": slower * found["step_seconds"]}

    return world


def too_slow(known: Study) -> list[Trial]:
    return [trial for trial in known.of_stage("train") if trial.cause is Cause.LOW_THROUGHPUT]


def test_a_batch_that_cannot_win_at_the_speed_it_has_is_stopped_with_the_numbers(tmp_path: Path) -> None:
    """At 0.55 x its speed it is above the half at which any run is stopped: what the others came to decides."""
    rates, slowed = [IDEAL.rates(BATCHES)], slowed_by(1 / 0.55, 256)
    known = play_stage(tmp_path / "journal.jsonl", study(), "train", slowed, num_lanes=4, found=rates)
    stopped = too_slow(known)
    assert {trial.config.effective_batch_size for trial in stopped} == {256}
    for trial in stopped:
        told = re.fullmatch(
            r"runs of effective batch 256 trained at 0\.55 x the speed that they were timed at, beside the others: at equal cost it "
            r"would end at val loss ([\d.]+), ([\d.]+) at best, even at its best learning rate, and effective batch (\d+) ends at ([\d.]+)",
            trial.reason,
        )
        assert told is not None
        middle, best, _, others = map(float, told.groups())
        assert middle > best > others


def test_where_nobody_is_to_be_stopped_for_being_slow_nobody_is(tmp_path: Path) -> None:
    config, slowed = study(kill={"min_relative_throughput": None}), slowed_by(1 / 0.55, 256)
    rates = [IDEAL.rates(BATCHES)]
    known = play_stage(tmp_path / "journal.jsonl", config, "train", slowed, num_lanes=4, found=rates)
    assert too_slow(known) == []


def test_a_batch_is_held_against_the_others_at_the_speed_that_its_runs_have(tmp_path: Path) -> None:
    def p_best(share: float) -> float:
        _, known = played(tmp_path / str(share), IDEAL, slowed_by(1 / share, 64))
        mine = findings_of(known).of_batch(64)
        assert mine is not None
        return mine.p_best

    assert p_best(0.75) < 0.1
    assert p_best(0.85) > 0.3, "within what statistics take of a run's speed"


@pytest.mark.slow
@pytest.mark.parametrize("share", [0.6, 0.4])
def test_what_slows_all_batches_alike_stops_none_and_changes_nothing(tmp_path: Path, share: float) -> None:
    winners = set()
    for name, world in (("slowed", slowed_by(1 / share, *BATCHES)), ("as timed", IDEAL)):
        _, known = played(tmp_path / name, IDEAL, world)
        assert too_slow(known) == []
        assert OFF not in " ".join(known.conclusions["train"].notes)
        winners.add(findings_of(known).winner)
    assert len(winners) == 1


@pytest.mark.slow
@pytest.mark.parametrize("share", [0.7, 0.3])
def test_what_else_had_the_machine_is_not_held_against_the_batch_whose_runs_it_slowed(
    tmp_path: Path, share: float
) -> None:
    """Nothing stops such a run, below half its planned speed neither, and the order of the batches is that of a quiet machine."""

    def beside_others(config: TrialConfig, samples: int) -> dict[str, Any]:
        found = slowed_by(1 / share, 64)(config, samples)
        return found | ({"other_cpu_share": 0.6} if config.effective_batch_size == 64 else {})

    found = {}
    for name, world in (("disturbed", beside_others), ("quiet", IDEAL)):
        _, known = played(tmp_path / name, IDEAL, world)
        assert too_slow(known) == []
        assert findings_of(known).off_speed == {}
        found[name] = findings_of(known).winner, [one.p_best for one in findings_of(known).batches]
    assert found["disturbed"] == found["quiet"]


def test_a_passing_load_is_not_held_against_the_batch_whose_run_it_slowed(tmp_path: Path) -> None:
    begun: list[TrialConfig] = []

    def first_run_of_64(config: TrialConfig, samples: int) -> dict[str, Any]:
        found = IDEAL(config, samples)
        begun.extend([config] if config.effective_batch_size == 64 and config not in begun else [])
        slower = 3.0 if begun and config == begun[0] else 1.0
        return found | {"step_seconds": slower * found["step_seconds"]}

    _, known = played(tmp_path, IDEAL, first_run_of_64)
    assert [trial.config.effective_batch_size for trial in too_slow(known)] == [64]
    mine = findings_of(known).of_batch(64)
    assert mine is not None
    assert mine.p_best > 0.5
    assert findings_of(known).off_speed == {}


def test_vague_speeds_leave_more_open(tmp_path: Path) -> None:
    """A single timing is known within 20 %, so which of the large batches is best stays open whatever is run."""
    regrets = []
    for within in (0.01, 0.2):
        (path := tmp_path / str(within)).mkdir()
        config, found = study(stage={"max_runs": 12}), [IDEAL.rates(BATCHES, within=within)]
        known = play_stage(path / "journal.jsonl", config, "train", IDEAL, found=found)
        recommendation = recommendation_of(config, known)
        assert recommendation.regret_time is not None
        regrets.append(recommendation.regret_time)
    assert regrets[1] > 1.2 * regrets[0]
    assert recommendation.decided is False
    assert recommendation.would_decide is not None


def test_to_a_target_the_runs_own_seconds_count_whatever_was_timed(tmp_path: Path) -> None:
    """Some never come there, so their seconds are infinite; the findings must be readable all the same."""
    config, found = study(objective="target", target_loss=2.3), [IDEAL.rates(BATCHES, within=0.2)]
    known = play_stage(tmp_path / "journal.jsonl", config, "train", slowed_by(1 / 0.6, 64), found=found)
    assert too_slow(known) == []
    assert findings_of(replay(tmp_path / "journal.jsonl", config.name)).off_speed == {}


def test_a_speed_that_was_not_as_timed_is_told(tmp_path: Path) -> None:
    _, known = played(tmp_path, IDEAL, slowed_by(1 / 0.7, 64))
    (told,) = [note for note in known.conclusions["train"].notes if OFF in note]
    assert f"{OFF}: effective batch 64 at 0.70 x; the probabilities count the" in told


def test_the_verdict_does_not_claim_equal_time_where_speeds_were_off(tmp_path: Path) -> None:
    config, known = played(tmp_path, IDEAL, slowed_by(1 / 0.7, 8))
    said = recommendation_of(config, known).verdict
    assert "Warning: some batches did not train at the speed they were timed at (effective batch 8 at 0.70 x)" in said


@pytest.mark.slow
@pytest.mark.parametrize("offset", [0.0, 1.0, -1.5])
@pytest.mark.parametrize("batches", [BATCHES, (4, 8, 16, 64, 256)], ids=str)
def test_where_a_large_batch_is_faster_and_wastes_little_a_large_one_is_chosen(
    tmp_path: Path, batches: tuple[int, ...], offset: float
) -> None:
    """Whatever the error of the scaling rule; at equal time 4 is far behind, 64 and 128 are alike, and 256 is past it."""
    world = LossWorld(IDEAL.noise_scale, IDEAL.half_speed_batch, offset=offset)
    truth = {batch: at_equal_time(world, batch) for batch in batches}
    assert truth[4] > 1.1 * truth[64]
    _, known = played(tmp_path, world, batches=batches)
    assert chosen(known) >= 64
    assert truth[chosen(known)] < 1.01 * min(truth.values())


def test_where_the_small_batch_is_right_it_is_chosen(tmp_path: Path) -> None:
    truth = {batch: at_equal_time(SMALL_IS_RIGHT, batch) for batch in BATCHES}
    assert min(truth, key=lambda batch: truth[batch]) == 4
    _, known = played(tmp_path, SMALL_IS_RIGHT)
    assert chosen(known) == 4


def test_where_both_are_alike_your_own_setting_stays(tmp_path: Path) -> None:
    config, known = played(tmp_path, FLAT, batches=(8, 64))
    recommendation = recommendation_of(config, known)
    assert (chosen(known), recommendation.learning_rate) == (8, 1e-3)
    assert (
        "your own setting stays: none of the others is shown to save 3% of the training time" in recommendation.verdict
    )
    assert recommendation.decided is False


@pytest.mark.parametrize(("lower_by", "is_sure"), [(0.05, False), (1.0, True)])
def test_nothing_is_chosen_that_ended_worse_than_your_own_setting(
    tmp_path: Path, lower_by: float, is_sure: bool
) -> None:
    """Whatever all runs together make of it."""
    _, usual = played(tmp_path / "usual", IDEAL)
    lowest = min(trial.measured("val_loss") for trial in full_runs(usual) if trial.state is TrialState.COMPLETE)
    assert chosen(usual) >= 64

    def own_is_lower(config: TrialConfig, samples: int) -> dict[str, Any]:
        point = IDEAL(config, samples)
        is_own = config.effective_batch_size == 8 and config.learning_rate == pytest.approx(1e-3)
        return point | ({"val_loss": lowest - lower_by} if is_own else {})

    config, known = played(tmp_path / "lower", IDEAL, own_is_lower)
    recommendation = recommendation_of(config, known)
    assert (chosen(known), recommendation.learning_rate) == (8, pytest.approx(1e-3))
    assert recommendation.time is None
    assert recommendation.p_best is not None
    assert (recommendation.p_best > 0.9) is is_sure
    assert (recommendation.answer.badge == "keep yours") is is_sure


def overfitting(config: TrialConfig, samples: int) -> dict[str, Any]:
    """Where batch 4 is right; every run learns its samples by heart from three eighths of it on."""
    share, point = samples / config.sample_budget, SMALL_IS_RIGHT(config, samples)
    return point | {"val_loss": point["val_loss"] * (1 + max(0.0, share - 0.375)), "loss": 3.0 * (1 - share)}


def test_where_your_own_run_overfits_from_early_on_its_end_decides_nothing_and_a_shorter_run_is_asked_for(
    tmp_path: Path,
) -> None:
    config, known = played(tmp_path / "time", SMALL_IS_RIGHT, overfitting)
    recommendation = recommendation_of(config, known)
    assert (chosen(known), recommendation.learning_rate) == (8, 1e-3)
    assert len(full_runs(known)) == FIRST_RUNS, "no further one of this length tells more"
    assert (recommendation.decided, recommendation.time) == (False, None)
    answer = recommendation.answer
    assert answer.badge == "undetermined"
    lowest = 3 * BUDGET // 8
    assert answer.because.startswith(f"the run with it overfits: validation loss was lowest after {lowest:,} samples (")
    assert answer.gain == "not known: your own setting overfits"
    assert "too short" not in recommendation.verdict
    assert answer.next.endswith(f"--dir RUN_DIR-shorter --set sample_budget={lowest}")
    _, to_target = played(tmp_path / "target", SMALL_IS_RIGHT, overfitting, objective="target", target_loss=3.5)
    assert findings_of(to_target).overfitting is None, "what comes after the target does not count"


def test_where_many_are_alike_it_says_between_which_it_is_undetermined(tmp_path: Path) -> None:
    """Which of six equals is the best takes more runs than there are; the choice is no worse than the others all the same."""
    config, known = played(tmp_path, FLAT, batches=BATCHES[:-1])
    recommendation = recommendation_of(config, known)
    assert len(recommendation.undecided_between) >= 3
    named = ", ".join(map(str, recommendation.undecided_between[:-1]))
    assert f"; undetermined between effective batches {named} and " in recommendation.verdict
    assert recommendation.decided is False


def test_what_a_target_is_reached_sooner_by_is_told_against_a_run_that_missed_it(tmp_path: Path) -> None:
    config, known = played(tmp_path, IDEAL, objective="target", target_loss=2.45)
    recommendation = recommendation_of(config, known)
    assert (
        "your own setting (effective batch 8, learning rate 0.001) ends at val loss 2.521 and would reach"
        in recommendation.verdict
    )
    assert recommendation.time is not None
    assert 0 < recommendation.time.low <= recommendation.time.share < 1


def test_at_equal_samples_the_smallest_is_the_best_in_the_same_world(tmp_path: Path) -> None:
    config, known = played(tmp_path, LossWorld(noise_scale=50, half_speed_batch=16), objective="samples")
    assert chosen(known) == 4
    assert findings_of(known).seconds is None
    assert {trial.config.sample_budget for trial in known.trials.values()} == {BUDGET}
    assert "after the same samples" in recommendation_of(config, known).verdict


def test_to_a_target_the_batch_that_gets_there_first_is_chosen(tmp_path: Path) -> None:
    """And its seconds are told beside the baseline's."""
    target = at_equal_time(IDEAL, 64) + 0.15
    config, known = played(tmp_path, IDEAL, objective="target", target_loss=target)
    assert chosen(known) >= 64
    best = standings(full_runs(known), target)[0]
    assert best.reached
    assert best.score < BUDGET / IDEAL.samples_per_second(8)
    assert f"reaches val loss {target:g} after" in recommendation_of(config, known).verdict


@pytest.mark.parametrize("share", [0.3, 0.7])
def test_to_a_target_what_was_cut_is_not_asked_for_again_and_again(tmp_path: Path, share: float) -> None:
    """A batch that would come there in many times the seconds of the best is given up after the run that was cut."""
    target = SMALL_IS_RIGHT.best_loss(8, share * BUDGET)
    config, known = played(tmp_path, SMALL_IS_RIGHT, objective="target", target_loss=target)
    recommendation, findings = recommendation_of(config, known), findings_of(known)
    hopeless = [one for one in findings.batches if one.effective_batch_size >= 32]
    assert sum(one.num_runs for one in hopeless) == 1, "the largest is one of the first runs"
    assert sum(one.p_best for one in hopeless) < 0.05
    assert (recommendation.decided, recommendation.effective_batch_size) == (True, 4)
    assert sum(one.num_runs for one in findings.batches) <= 6


def test_no_further_run_is_made_to_a_target_that_the_first_evaluation_has_reached(tmp_path: Path) -> None:
    target = SMALL_IS_RIGHT.best_loss(8, 0.05 * BUDGET)
    config, known = played(tmp_path / "8", SMALL_IS_RIGHT, objective="target", target_loss=target)
    assert len(full_runs(known)) == FIRST_RUNS
    assert recommendation_of(config, known).answer.badge == "undetermined"
    often, seen = played(tmp_path / "64", SMALL_IS_RIGHT, objective="target", target_loss=target, evaluations=64)
    assert len(full_runs(seen)) > FIRST_RUNS
    assert (recommendation_of(often, seen).decided, chosen(seen)) == (True, 4), "more evaluations tell it"


def test_to_a_target_the_surface_shows_what_was_cut_and_what_missed_it(tmp_path: Path) -> None:
    config, known = played(tmp_path, IDEAL, objective="target", target_loss=2.45)
    context = StageContext(Train(), config, known)
    (figure,) = [one for one in train.figures(context) if one.name == "surface"]
    assert "with a ~, what a run that did not reach the target would have come to" in figure.caption
    told = {mark.told.split(":")[0] for series in figure.series for mark in series.marks if "~" in mark.text}
    assert told == {"extrapolated"}


# How it goes about it


def test_the_first_runs_are_the_baseline_and_the_batches_furthest_from_each_other_at_the_rules_rates() -> None:
    known = Known({"type": "train"}, sample_budget=BUDGET).concluded(IDEAL.rates(BATCHES))
    first = known.propose()
    assert [p.config.effective_batch_size for p in first] == [8, 4, 256]
    assert [p.protected for p in first] == [True, False, False]
    for proposal in first:
        assert proposal.config.learning_rate == pytest.approx(1e-3 * (proposal.config.effective_batch_size / 8) ** 0.5)


def test_runs_are_asked_for_one_after_the_other_and_no_more_than_allowed(tmp_path: Path) -> None:
    """In a world that stays undecided: only what the last run came to says which is next."""
    _, known = played(tmp_path, IDEAL, stage={"max_runs": 5}, batches=(32, 64, 128))
    trials = list(known.trials.values())
    assert len({trial.candidate for trial in trials}) <= 5
    points = [(t.config.effective_batch_size, t.config.learning_rate) for t in trials]
    assert len(set(points)) == len(points), "nothing is run twice"


def test_it_stops_asking_once_no_run_is_worth_its_time(tmp_path: Path) -> None:
    config, known = played(tmp_path, SMALL_IS_RIGHT, stage={"max_runs": 30})
    findings = findings_of(known)
    assert FIRST_RUNS <= len({trial.candidate for trial in known.trials.values()}) < 25
    assert findings.regret_time is not None
    assert findings.regret_time < 2 * config.useful_gain


def test_with_several_lanes_as_many_runs_are_asked_for_at_a_time() -> None:
    known = Known({"type": "train"}, sample_budget=BUDGET).concluded(IDEAL.rates(BATCHES))
    for proposal in known.propose():
        known.end(proposal.id, val_loss=IDEAL(proposal.config, proposal.config.sample_budget)["val_loss"])
    wanted = [train.propose(replace(known.context, num_lanes=lanes)) for lanes in (1, 2, 4)]
    assert [len(proposals) - FIRST_RUNS for proposals in wanted] == [1, 2, 4]
    assert wanted[2][: FIRST_RUNS + 2] == wanted[1], "the same first"


def settings_of(proposals: list[Proposal]) -> list[tuple[int, float]]:
    return [(p.config.effective_batch_size, p.config.learning_rate) for p in proposals]


def test_at_the_start_every_lane_has_a_run_at_the_rules_rates_first_and_then_beside_them() -> None:
    known = Known({"type": "train", "max_runs": 15}, sample_budget=BUDGET).concluded(IDEAL.rates(BATCHES))
    at_rule = {batch: 1e-3 * (batch / 8) ** 0.5 for batch in BATCHES}
    wanted = {lanes: train.propose(replace(known.context, num_lanes=lanes)) for lanes in (2, 5, 7, 16, 99)}
    assert [len(proposals) for proposals in wanted.values()] == [FIRST_RUNS, 5, 7, 15, 15], "15 is max_runs"
    for lanes, proposals in wanted.items():
        assert proposals[: len(wanted[2])] == wanted[2], lanes
        assert len({proposal.id for proposal in proposals}) == len(proposals)
        for batch, rate in settings_of(proposals[: len(BATCHES)]):
            assert rate == pytest.approx(at_rule[batch])
    factors = [rate / at_rule[batch] for batch, rate in settings_of(wanted[16][len(BATCHES) :])]
    assert factors == pytest.approx([2.0] * len(BATCHES) + [0.5])
    known.end(wanted[2][0].id, val_loss=3.0)
    assert len(train.propose(replace(known.context, num_lanes=7))) <= 8, "from now on the runs say what is next"


def test_each_further_lane_has_two_runs_more_unless_the_study_file_says_how_many() -> None:
    assert [Train().most_runs(lanes) for lanes in (1, 4, 8)] == [12, 18, 26]
    assert [Train(max_runs=5).most_runs(lanes) for lanes in (1, 8)] == [5, 5]
    known = Known({"type": "train"}, sample_budget=BUDGET).concluded(IDEAL.rates(BATCHES))
    known.context = replace(known.context, num_lanes=4)
    noise = random.Random(0)
    known.play(lambda known, trial: known.end(trial.id, val_loss=noise.gauss(3.0, 0.2)))  # which decides nothing
    assert 12 < (ran := len(known.study.of_stage("train"))) <= 18
    known.study.most_lanes = 4  # as far as its journal says
    assert train.num_full_runs(replace(known.context, num_lanes=1)) == 18, "whoever goes on with it"
    assert len(train.propose(replace(known.context, num_lanes=1))) >= ran


def test_with_several_seeds_a_setting_is_asked_for_only_once_a_lane_is_free(tmp_path: Path) -> None:
    """Each is a run for every seed: one for each lane would be chosen long before the results that should decide it."""
    config, seeds, lanes = study(seeds=[0, 1, 2]), 3, 4
    with Journal(tmp_path / "journal.jsonl", config.name) as journal:
        journal.append(RunBegan(token="first"))
        know(journal, [IDEAL.rates(BATCHES)])
        num_open = list[int]()

        def look() -> None:
            num_open.append(sum(not trial.state.ended for trial in journal.study.of_stage("train")))

        known = Player(director_of(config, journal, "train", lanes), IDEAL, lanes, before_message=look).play()
    first = FIRST_RUNS * seeds
    assert max(num_open) == first
    assert max(num_open[num_open.index(first - seeds) :]) < lanes + seeds
    assert len(known.of_stage("train")) > first, "further ones were asked for"


@pytest.mark.parametrize("highest", [1 / 300, 1 / 5])
def test_what_is_said_to_decide_a_study_makes_a_run(tmp_path: Path, highest: float) -> None:
    """The first rates diverge, and runs that diverge before any completes are none of `max_runs`."""

    def world(config: TrialConfig, samples: int) -> dict[str, Any]:
        limit = highest * 1e-3 * (config.effective_batch_size / 8) ** 0.5
        off = math.log2(config.learning_rate / (limit / 4))
        noise = random.Random(f"{config.effective_batch_size}{config.learning_rate:.4g}").gauss(0, 0.004)
        loss = IDEAL.best_loss(config.effective_batch_size, samples) * (1 + 0.012 * off**2) * (1 + noise)
        loss = loss if config.learning_rate <= limit else math.nan
        return IDEAL(config, samples) | {"loss": loss, "val_loss": loss}

    config, known = played(tmp_path, IDEAL, world)
    deciding = to_decide(config, known, known.trials[findings_of(known).winner])
    assert deciding is not None
    stage = Train(max_runs=int(deciding.keys.get("stages.train.max_runs", 0)) or 12)
    wanted = wanted_by(stage, config.model_copy(update={"stages": (stage,)}), known)
    assert bool(wanted) == ("stages.train.max_runs" in deciding.keys)


@pytest.mark.parametrize(("max_runs", "is_told"), [(None, True), (12, False)])
def test_plan_says_that_further_lanes_have_further_runs(max_runs: int | None, is_told: bool) -> None:
    config = study_of(stages=[{"type": "frontier"}, {"type": "train", "max_runs": max_runs}])
    context: StageContext[Any] = StageContext(config.stages[1], config, Study("s"))
    told = "\n".join(train.STAGE.describe(context))
    assert "12 runs at most" in told
    assert ("2 for each further lane" in told) is is_told


def test_a_single_batch_has_one_run_however_many_lanes_there_are() -> None:
    known = Known({"type": "train"}, sample_budget=BUDGET).concluded(IDEAL.rates([8]))
    assert len(train.propose(replace(known.context, num_lanes=8))) == 1


def test_the_same_world_leads_to_the_same_runs_and_findings(tmp_path: Path) -> None:
    studies = []
    for run in ("a", "b"):
        (tmp_path / run).mkdir()
        studies.append(played(tmp_path / run, IDEAL)[1])
    assert list(studies[0].trials) == list(studies[1].trials)
    assert findings_of(studies[0]) == findings_of(studies[1])


def test_what_follows_batch_and_rate_is_a_part_of_every_run(tmp_path: Path) -> None:
    rules = {"beta2_scaling": "samples", "weight_decay_scaling": "samples"}
    config, known = played(tmp_path, IDEAL, optimizer=rules)
    runs = [trial.config for trial in known.trials.values()]
    for run in runs:
        assert run.optimizer == optimizer_at(config.optimizer, run.effective_batch_size, run.learning_rate)
    assert len({run.optimizer.betas for run in runs}) > 1
    assert len({run.optimizer.weight_decay for run in runs}) > len({run.effective_batch_size for run in runs})


def test_every_seed_of_a_run_is_trained_and_a_run_counts_once(tmp_path: Path) -> None:
    _, known = played(tmp_path, SMALL_IS_RIGHT, seeds=[0, 1], stage={"max_runs": 4, "pruner": {"type": "none"}})
    runs = {trial.candidate for trial in known.trials.values()}
    assert len(runs) <= 4
    assert len(known.trials) == 2 * len(runs)
    assert chosen(known) == 4


# What is not as it should be


def test_a_batch_that_cannot_run_is_no_candidate_any_more(tmp_path: Path) -> None:
    _, known = played(tmp_path, IDEAL, failing(IDEAL, lambda one: one.effective_batch_size >= 128))
    assert chosen(known) == 64
    batches = {one.effective_batch_size for one in findings_of(known).batches}
    assert 256 not in batches
    tries = [t for t in known.trials.values() if t.config.effective_batch_size == 256]
    assert len(tries) == 1, "once is enough"


def full_from(share: float) -> World:
    """The ideal world, in which a run in micro-batches of 64 or more fills the memory after this share of its samples."""

    def point(config: TrialConfig, samples: int) -> dict[str, Any]:
        if config.micro_batch_size >= 64 and samples > share * config.sample_budget:
            return {"outcome": "out_of_memory", "reason": "too large"}
        return IDEAL(config, samples)

    return point


@pytest.mark.slow
@pytest.mark.parametrize("seeds", [[0], [0, 1]])
def test_a_micro_batch_that_does_not_fit_after_all_is_trained_in_smaller_ones(tmp_path: Path, seeds: list[int]) -> None:
    """Half-way through a run in micro-batches of 64 memory is full."""
    fills_up = full_from(0.5)
    _, fitting = played(tmp_path, IDEAL, seeds=seeds)
    config, known = played(tmp_path / "full", IDEAL, fills_up, seeds=seeds)
    lost = {one.candidate for one in known.trials.values() if one.state is TrialState.OUT_OF_MEMORY}
    assert lost == {"train-m64k4"}, "the runs after it begin with the smaller ones"
    smaller = {one.config.micro_batch_size for one in known.trials.values() if one.candidate not in lost}
    assert max(smaller) == 32
    assert chosen(known) == chosen(fitting) >= 64
    assert recommendation_of(config, known).micro_batch_size == 32
    [note] = [one for one in known.conclusions["train"].notes if "out of memory" in one]
    assert all(one in note for one in ("effective batch 256 as 64 x 4", "it was made again as 32 x 8")), note


def test_a_longer_run_is_recommended_in_a_micro_batch_that_was_trained(tmp_path: Path) -> None:
    fills_up = full_from(0.5)
    config, known = played(tmp_path, IDEAL, fills_up, real_run={"samples": 4 * BUDGET})
    known = play_stage(tmp_path / "journal.jsonl", config, "horizons", fills_up)
    recommendation = recommendation_of(config, known)
    assert recommendation.effective_batch_size >= 64
    assert recommendation.micro_batch_size == 32


def test_a_run_that_was_made_again_counts_once(tmp_path: Path) -> None:
    """It had passed rungs before it filled the memory, with the losses of the one after it."""

    _, known = played(tmp_path, IDEAL, full_from(0.9), seeds=[0, 1])
    again = [one for one in known.trials.values() if one.state is TrialState.OUT_OF_MEMORY]
    assert any(one.rungs for one in again)
    settings = [(one.effective_batch_size, one.learning_rate) for one in observations([*known.trials.values()], None)]
    assert len(settings) == len(set(settings))


def test_a_run_that_fills_memory_in_micro_batches_of_any_size_is_given_up_soon(tmp_path: Path) -> None:
    fills_up = failing(IDEAL, lambda one: one.effective_batch_size >= 256, "out_of_memory")
    _, known = played(tmp_path, IDEAL, fills_up)
    tries = [one.config.micro_batch_size for one in known.trials.values() if one.config.effective_batch_size == 256]
    assert tries == [64, 32, 16]
    assert 256 not in {one.effective_batch_size for one in findings_of(known).batches}


def test_where_no_candidate_has_finished_with_every_seed_it_is_undetermined(tmp_path: Path) -> None:
    _, known = played(tmp_path, IDEAL, failing(IDEAL, lambda one: one.seed == 1), seeds=[0, 1])
    assert sum(trial.state is TrialState.COMPLETE for trial in known.trials.values()) >= FIRST_RUNS
    conclusion = known.conclusions["train"]
    assert not conclusion.ok
    assert conclusion.reason.startswith("undetermined: ")
    assert "none finished with every seed; see the trials' reasons" in conclusion.reason


def test_a_rate_that_diverges_is_answered_with_lower_ones(tmp_path: Path) -> None:
    """The rule's rate is too high for every batch but the smallest."""
    world = LossWorld(IDEAL.noise_scale, IDEAL.half_speed_batch, offset=-2.0)

    def diverges(config: TrialConfig, samples: int) -> dict[str, Any]:
        point = world(config, samples)
        too_high = config.learning_rate > 0.7e-3 * (config.effective_batch_size / 8) ** 0.5 and samples > BUDGET / 3
        return point | (
            {"loss": math.nan, "val_loss": math.nan} if too_high and config.effective_batch_size > 8 else {}
        )

    _, known = played(tmp_path, world, diverges)
    assert any(trial.cause is Cause.DIVERGED for trial in known.trials.values())
    assert chosen(known) >= 64


def test_the_conclusion_has_every_batch_with_its_intervals_and_the_winner_is_a_run_of_the_likeliest(
    tmp_path: Path,
) -> None:
    _, known = played(tmp_path, SMALL_IS_RIGHT, batches=BATCHES[:-1])
    findings = findings_of(known)
    assert [one.effective_batch_size for one in findings.batches] == list(BATCHES[:-1])
    for one in findings.batches:
        assert one.learning_rate_low <= one.learning_rate <= one.learning_rate_high
        assert one.score_low <= one.score <= one.score_high
    assert max(findings.batches, key=lambda one: one.p_best).effective_batch_size == 4
    of_winner = [
        t for t in known.trials.values() if t.config.effective_batch_size == 4 and t.state is TrialState.COMPLETE
    ]
    assert findings.val_loss == min(trial.measured("val_loss") for trial in of_winner)
    assert findings.seconds == pytest.approx(BUDGET / SMALL_IS_RIGHT.samples_per_second(8))
    reason = known.conclusions["train"].reason
    assert reason.startswith(
        f"effective batch 4 (4 x 1; most samples/s) ends at val loss {findings.val_loss:.3f} at learning rate "
    )
    assert (
        f", at equal cost (8 s of training planned for each), and wastes {findings.regret_time:.1%} of the training time on average"
        in reason
    )
    assert (
        f" of {len(findings.batches)} batches were run, in {len({t.candidate for t in known.trials.values()})} runs, "
        in reason
    )


def test_the_conclusion_tells_the_ranks_among_which_a_batch_is_split(tmp_path: Path) -> None:
    _, known = played(tmp_path, SMALL_IS_RIGHT, batches=(8, 64), world_size=2)
    batch = known.trials[findings_of(known).winner].config.effective_batch_size
    assert known.conclusions["train"].reason.startswith(f"effective batch {batch} ({batch // 2} x 1 x 2; ")


def test_what_was_left_out_is_noted(tmp_path: Path) -> None:
    _, known = played(tmp_path, SMALL_IS_RIGHT, sample_budget=2048)
    notes = known.conclusions["train"].notes
    assert any(note.startswith("left out: effective batches 64, 128, 256: in a full run ") for note in notes)


@pytest.mark.slow
@pytest.mark.parametrize("too_high", [4, 16, 500])
@pytest.mark.parametrize("max_runs", [5, 12])
def test_a_learning_rate_that_diverges_everywhere_is_lowered_until_there_is_an_answer(
    tmp_path: Path, too_high: float, max_runs: int
) -> None:
    """A cliff just above the best rate, and the user's rate beyond it at every batch."""
    world = replace(IDEAL, offset=-math.log2(too_high))

    def over_a_cliff(config: TrialConfig, samples: int) -> dict[str, Any]:
        above = math.log2(config.learning_rate / (1e-3 * (config.effective_batch_size / 8) ** 0.5)) - world.offset
        return world(config, samples) | ({"loss": math.nan} if above > math.log2(1.23) else {})

    config, known = played(tmp_path, world, over_a_cliff, stage={"max_runs": max_runs})
    diverged = [trial for trial in known.trials.values() if trial.cause is Cause.DIVERGED]
    assert len(diverged) >= FIRST_RUNS
    assert len(known.trials) <= 2 * max_runs + 3
    recommendation = recommendation_of(config, known)
    assert (
        "; your own setting (effective batch 8, learning rate 0.001) diverged; this setting wastes "
        in recommendation.verdict
    )
    batch = recommendation.effective_batch_size
    best = min(at_equal_time(world, one) for one in BATCHES)
    assert at_equal_time(world, batch) <= 1.1 * best


@pytest.mark.slow
@pytest.mark.parametrize("slope", [0.1, 0.3])
def test_a_rate_that_is_wrong_by_thousands_does_not_hide_the_best_run(tmp_path: Path, slope: float) -> None:
    """The best rate lies 17 factors of 2 below the rule's, and six below the highest that trains."""

    def world(config: TrialConfig, samples: int) -> dict[str, Any]:
        batch = config.effective_batch_size
        u = math.log2(config.learning_rate / (1e-3 * (batch / 8) ** 0.5))
        chance = random.Random(f"{batch} {config.learning_rate:.6g}").gauss(0, 0.03)
        loss = 0.7 + slope * abs(u + 17) + 0.32 * (1 - samples / config.sample_budget) + chance
        return IDEAL(config, samples) | {"loss": loss if u < -11 else math.nan, "val_loss": loss}

    _, known = played(tmp_path, IDEAL, world)
    lowest = min(one.measured("val_loss") for one in known.trials.values() if one.state is TrialState.COMPLETE)
    assert known.trials[findings_of(known).winner].measured("val_loss") <= lowest + 0.06, "two deviations of a run"


def test_where_nothing_trains_or_nothing_is_learned_the_last_line_says_what_was_tried_and_what_to_change(
    tmp_path: Path,
) -> None:
    constant = lambda config, samples: IDEAL(config, samples) | {"loss": 2.3, "val_loss": 2.3}  # noqa: E731
    nowhere = lambda config, samples: IDEAL(config, samples) | {"loss": math.nan}  # noqa: E731
    for name, world, said in (
        (
            "constant",
            constant,
            (
                "nothing is learned: ",
                "is 2.3 from the first evaluation to the last",
                "requires_grad",
                "optimizer.lr is far too low",
            ),
        ),
        ("nowhere", nowhere, ("nothing trains: ", "at learning rates from 1.53e-08 to ", "look at the loss")),
    ):
        _, known = played(tmp_path / name, IDEAL, world)
        assert not known.conclusions["train"].ok
        assert all(one in known.conclusions["train"].reason for one in said), known.conclusions["train"].reason


def test_the_protected_run_alone_measures_its_noise_once_it_is_warm_and_along_its_way(tmp_path: Path) -> None:
    _, known = played(tmp_path, IDEAL)
    for trial in known.trials.values():
        snapshots, budget = trial.config.noise_snapshots, trial.config.sample_budget
        if trial.protected:
            assert snapshots[0] >= trial.config.warmup_samples
            assert {round(share * budget) for share in (0.25, 0.5, 1.0)} <= set(snapshots)
        else:
            assert snapshots == ()
    _, without = played(tmp_path / "without", IDEAL, statistics=False)
    assert not any(trial.config.noise_snapshots for trial in without.trials.values())


def test_data_that_is_trained_on_more_than_once_is_said_with_how_often(tmp_path: Path) -> None:
    _, known = played(tmp_path, IDEAL, facts=Facts(num_train_samples=10_000))
    complete = [trial.config for trial in known.trials.values() if trial.state is TrialState.COMPLETE]
    budgets = {config.effective_batch_size: config.sample_budget for config in complete}
    note = next(note for note in known.conclusions["train"].notes if "repeated" in note)
    assert note.startswith("the data (10,000 training samples) was repeated: effective batch ")
    for batch, budget in budgets.items():
        assert (f"effective batch {batch} {budget / 10_000:.1f} times" in note) == (budget > 10_000)
    _, enough = played(tmp_path / "enough", IDEAL, facts=Facts(num_train_samples=10**6))
    assert not any("repeated" in note for note in enough.conclusions["train"].notes)


def test_who_leads_at_equal_samples_is_said_where_it_is_another_batch(tmp_path: Path) -> None:
    _, known = played(tmp_path, IDEAL)
    note = next(
        note for note in known.conclusions["train"].notes if note.startswith("at equal samples (8,192, read from")
    )
    assert "effective batch 8 leads with val loss" in note or "effective batch 4 leads with val loss" in note
    assert f"and effective batch {chosen(known)} has " in note
    _, small = played(tmp_path / "small", SMALL_IS_RIGHT)
    assert not any(note.startswith("at equal samples") for note in small.conclusions["train"].notes)


def test_where_all_train_on_as_many_samples_none_of_their_schedules_had_yet_to_end(tmp_path: Path) -> None:
    """Another ends lower than the setting that is kept, by less than is sure."""
    _, known = played(tmp_path, FLAT, slightly_better_at_16, objective="samples")
    assert findings_of(known).keeps_own
    assert not any(note.startswith("at equal samples") for note in known.conclusions["train"].notes)


def slightly_better_at_16(config: TrialConfig, samples: int) -> dict[str, Any]:
    point = FLAT(config, samples)
    return point | {"val_loss": point["val_loss"] * (0.994 if config.effective_batch_size == 16 else 1.0)}


def test_how_goodput_did_is_told_beside_the_order_that_came_out(tmp_path: Path) -> None:
    def told(goodput: dict[int, float]) -> str:
        config = study()
        foretold = replace(IDEAL.rates((8, 64, 256)), goodput=goodput)
        known = play_stage(tmp_path / f"{goodput[8]}.jsonl", config, "train", IDEAL, found=[foretold])
        return next(
            note for note in known.conclusions["train"].notes if note.startswith("the goodput estimate predicted")
        )

    assert told({8: 0.2, 64: 1.0, 256: 0.9}) == "the goodput estimate predicted this order of the batches: 64, 256, 8"
    assert told({8: 1.0, 64: 0.5, 256: 0.9}) == (
        "the goodput estimate predicted the order 8, 256, 64; at their best rates the batches came out 64, 256, 8"
    )


def test_a_single_batch_is_not_said_to_be_the_best_of_anything(tmp_path: Path) -> None:
    _, known = played(tmp_path, IDEAL, batches=(8,))
    reason = known.conclusions["train"].reason
    assert reason.startswith("effective batch 8 (8 x 1; ")
    assert ", the only batch, ends at val loss " in reason
    assert "probability" not in reason
    assert "at equal cost" not in reason


@pytest.mark.slow
def test_a_study_that_finetunes_begins_every_run_with_the_weights(tmp_path: Path) -> None:
    """For real: at a hundredth of the rate it ends far below where the random weights began."""
    model = {"num_layers": 2, "num_heads": 2, "hidden_dim": 16}
    tiny: dict[str, Any] = {
        "model": {"target": "gpt", "kwargs": model},
        "data": {"target": "tests.support.tiny:data", "kwargs": {"num_train": 256}},
        "compile": False, "statistics": False, "stages": [{"type": "train"}], "batch": {"micro_batch_size": 4},
    }  # fmt: skip
    for name in ("before", "tuned"):
        (tmp_path / name).mkdir()
    before = run_for_real(
        tiny_study(**tiny, optimizer={"lr": 1e-2, "reference_batch_size": 4}, sample_budget=1024), tmp_path / "before"
    )
    checkpoint = newest_state(tmp_path / "before/trials/train-m4k1/checkpoints")
    torch.save(checkpoint["model"], tmp_path / "weights.pt")
    tuning = tiny_study(
        **tiny,
        optimizer={"lr": 1e-4},
        sample_budget=256,
        regime="finetune",
        initial_weights=str(tmp_path / "weights.pt"),
    )
    tuned = run_for_real(tuning, tmp_path / "tuned")
    ended = before.of_stage("train")[0].measured("val_loss")
    assert ended < 1.5
    trial = tuned.of_stage("train")[0]
    assert trial.config.warmup_samples == 40, "10 steps"
    assert all((point["val_loss"] or 9.9) < ended + 0.1 for point in (*trial.history, trial.metrics))


def test_how_often_a_rung_cuts_the_best_run_is_told_as_it_was_recorded(tmp_path: Path) -> None:
    recorded = json.loads((ROOT / "benchmarks/results/recommendation.json").read_text())["last_line"]["pruning"][
        "winner_cut"
    ]
    assert pytest.approx(recorded, abs=0.005) == WINNERS_CUT
    _, known = played(tmp_path, IDEAL, seeds=[0, 1])
    cut = {
        one.candidate for one in known.of_stage("train") if (one.cause, one.state) == (Cause.RUNG, TrialState.PRUNED)
    }
    assert cut
    said = f"{len(cut)} run{'s were' if len(cut) > 1 else ' was'} stopped at a rung; in {WINNERS_CUT:.0%} of replayed studies the best one was among them"
    assert any(note.startswith(said) for note in known.conclusions["train"].notes)
