"""How figures name runs and what their colours stand for, over the studies that the tests keep."""

from __future__ import annotations

import dataclasses
import itertools
from pathlib import Path

import pytest

from batchscout.orchestrator.config.stages import Frontier, Throughput
from batchscout.orchestrator.stages import stage_of
from batchscout.orchestrator.stages.context import StageContext
from batchscout.orchestrator.stages.curves import best_so_far, loss_curves, with_deviation
from batchscout.orchestrator.stages.figures import (
    AUXILIARY_COLOUR,
    BASELINE_COLOUR,
    CATEGORIES,
    CHOSEN_COLOUR,
    COMPILING_COLOUR,
    FAILED_COLOUR,
    OTHERS_COLOUR,
    PRUNED_COLOUR,
    Figure,
    Mark,
    names_of,
    split_text,
)
from batchscout.orchestrator.stages.findings import found
from batchscout.orchestrator.stages.frontier.findings import FrontierFindings
from batchscout.orchestrator.study.causes import Cause
from batchscout.orchestrator.study.trial import TrialState
from tests.support.example_study import example_config, example_study
from tests.support.outcome import GOLDEN, RECORDED, kept_in

RUNS = [*sorted(GOLDEN.iterdir()), RECORDED]
WINNER, BASELINE = "train-m16k2", "train-m1k1"


@pytest.mark.parametrize("run", RUNS, ids=lambda run: run.parent.name + "-" + run.name)
def test_the_names_of_a_stage_s_trials_begin_with_their_batch_and_are_never_the_same(run: Path) -> None:
    config, study = kept_in(run)
    for keys in config.stages:
        trials = study.of_stage(keys.type)
        names = names_of(trials)
        assert len({*names.values()}) == len(trials)
        for trial in trials:
            split = f"({trial.config.micro_batch_size} x {trial.config.gradient_accumulation_steps})"
            assert names[trial.id].startswith(f"batch {trial.config.effective_batch_size} {split}")


def test_a_name_says_no_more_than_tells_the_trials_apart() -> None:
    study = example_study(example_config())
    names = names_of(study.of_stage("train"))
    assert names["train-m24k1"] == "batch 24 (24 x 1)"
    assert names[WINNER] == "batch 32 (16 x 2), lr 0.0006"


def test_a_run_has_the_colour_of_its_role_in_every_figure() -> None:
    study = example_study(example_config())
    trials = study.of_stage("train")
    names = names_of(trials)
    roles = {names[WINNER]: CHOSEN_COLOUR, names[BASELINE]: BASELINE_COLOUR}
    for figure in loss_curves(trials, WINNER):
        for series in figure.series:
            assert series.colour == roles.get(series.label, OTHERS_COLOUR)


@pytest.mark.parametrize("evaluations", [1, 6])
def test_a_run_that_diverged_with_huge_losses_does_not_flatten_the_others(evaluations: int) -> None:
    study = example_study(example_config())
    trials = [trial for trial in study.of_stage("train") if trial.history]
    huge = tuple(
        {"samples_seen": 64.0 * i, "train_seconds": 1.0 * i, "val_loss": 1e6} for i in range(1, evaluations + 1)
    )
    proposal = dataclasses.replace(trials[0].proposal, id="train-lost")
    lost = dataclasses.replace(
        trials[0], proposal=proposal, history=huge, state=TrialState.PRUNED, cause=Cause.DIVERGED
    )
    alone, *_ = loss_curves(trials, WINNER)
    figure, *_ = loss_curves([*trials, lost], WINNER)
    assert alone.y.top is None, "nothing of it is cut"
    assert figure.y.top is not None
    assert figure.y.top <= max(mark.y for series in alone.series for mark in series.marks)
    assert f"{evaluations} evaluation" in figure.caption


def test_the_caption_of_loss_curves_names_the_looks_that_are_drawn_and_no_other() -> None:
    trials = example_study(example_config()).of_stage("train")
    complete = [trial for trial in trials if trial.state is TrialState.COMPLETE and not trial.protected]
    cut = [trial for trial in trials if trial.state is TrialState.PRUNED and len(trial.history) > 1]
    baseline = [trial for trial in trials if trial.id == BASELINE]
    for some, winner, said in (
        (complete, WINNER, {"chosen"}),
        (complete, None, set[str]()),
        ([*complete, *cut], WINNER, {"chosen", "dashed"}),
        ([*complete, *baseline], WINNER, {"chosen", "green"}),
        ([*complete, *baseline], BASELINE, {"chosen"}),
    ):
        assert some
        for figure in loss_curves(some, winner):
            assert {look for look in ("chosen", "green", "dashed") if look in figure.caption} == said


@pytest.mark.parametrize("run", RUNS, ids=lambda run: run.parent.name + "-" + run.name)
def test_a_caption_names_no_mark_and_no_line_that_is_not_drawn(run: Path) -> None:
    config, study = kept_in(run)
    for keys in config.stages:
        for figure in stage_of(keys).figures(StageContext(keys, config, study)):
            if figure.name not in ("speed_by_memory", "surface"):
                continue
            marks = [mark for series in figure.series for mark in series.marks]
            looks = {
                "ringed": any(mark.kind == "chosen" for mark in marks),
                "cross: ": any(mark.kind == "cross" for mark in marks) and figure.name == "speed_by_memory",
                "green": any(mark.kind == "baseline" for mark in marks),
                "with a ~": any("~" in mark.text for mark in marks),
                "Pareto front": any(series.label == "Pareto front" for series in figure.series),
            }
            assert {look: look in figure.caption for look in looks} == looks


@pytest.mark.parametrize("run", RUNS, ids=lambda run: run.parent.name + "-" + run.name)
def test_the_frontiers_chart_has_the_speeds_that_its_sentence_and_its_front_have(run: Path) -> None:
    config, study = kept_in(run)
    findings = found(study, FrontierFindings)
    keys = config.keys_of(Frontier)
    assert findings is not None
    assert keys is not None
    (figure,) = stage_of(keys).figures(StageContext(keys, config, study))
    drawn = {mark.y for series in figure.series for mark in series.marks if series.label != "Pareto front"}
    measured = {one.tokens_per_second for one in findings.measured}
    assert measured <= drawn
    chosen = [mark.y for series in figure.series for mark in series.marks if mark.kind == "chosen"]
    assert chosen == [findings.chosen.tokens_per_second]


def test_no_interval_of_a_loss_reaches_below_zero_unless_the_loss_does() -> None:
    assert with_deviation(Mark(1, 0.1), 0.25).low == 0
    assert with_deviation(Mark(1, 0.5), 0.25).low == 0.25
    assert with_deviation(Mark(1, -0.5), 0.25).low == -0.75


def test_no_series_of_a_kind_without_a_role_has_the_colour_of_one() -> None:
    config = example_config()
    study = example_study(config)
    contexts = [StageContext(keys, config, study) for keys in config.stages]
    figures: dict[str, Figure] = {
        one.name: one for context in contexts for one in stage_of(context.stage).figures(context)
    }
    modes = [series.colour for series in figures["speed_by_memory"].series]
    roles = {
        CHOSEN_COLOUR,
        FAILED_COLOUR,
        BASELINE_COLOUR,
        OTHERS_COLOUR,
        AUXILIARY_COLOUR,
        PRUNED_COLOUR,
        COMPILING_COLOUR,
    }
    assert len(roles) == 7
    assert roles.isdisjoint(CATEGORIES)
    assert {*modes} <= {*CATEGORIES, AUXILIARY_COLOUR}
    assert len({*modes}) == len(modes)


def test_every_whole_run_stands_at_its_own_loss_and_the_lowest_so_far_never_rises() -> None:
    _, study = kept_in(RECORDED)
    runs = study.of_stage("train")
    complete = [trial for trial in runs if trial.state == "complete"]
    (figure,) = best_so_far(study, runs, complete[1].id)
    lowest, own = (series.marks for series in figure.series)
    assert sorted(mark.y for mark in own) == sorted(trial.measured("val_loss") for trial in complete)
    assert [mark.y for mark in own if mark.kind == "chosen"] == [complete[1].measured("val_loss")]
    assert all(one.x < other.x and one.y >= other.y for one, other in itertools.pairwise(lowest))
    assert lowest[-1].y == min(mark.y for mark in own)
    assert own[-1].x <= sum(trial.seconds for trial in study.trials.values())
    assert best_so_far(study, runs[:1], None) == [], "no chart of a single point"


@pytest.mark.parametrize("run", RUNS, ids=lambda run: run.parent.name + "-" + run.name)
def test_splits_of_one_batch_lie_beside_each_other_each_with_its_own_name_and_interval(run: Path) -> None:
    config, study = kept_in(run)
    for context in [StageContext(keys, config, study) for keys in config.stages if isinstance(keys, Throughput)]:
        drawn = {one.name: one.series[0].marks for one in stage_of(context.stage).figures(context)}
        first = [one for one in context.trials() if one.proposal.round in (None, 1)]
        for name, low in (("noise_scale", "noise_scale_low"), ("coherence", None)):
            measured = [one for one in first if one.metric(name) is not None]
            marks = drawn[name]
            assert sorted(mark.y for mark in marks) == sorted(one.measured(name) for one in measured)
            assert len({(mark.x, mark.aside) for mark in marks}) == len(marks)
            for mark in marks:
                (mine,) = [one for one in measured if one.measured(name) == mark.y]
                several = sum(other.x == mark.x for other in marks) > 1
                assert mark.text == (split_text(mine.config.split) if several else "")
                assert low is None or mark.low == mine.metric(low)
