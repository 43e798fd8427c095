"""The figure of the surface: its colours fade from the best point, and every run is on it."""

from __future__ import annotations

import itertools

import pytest

from batchscout.orchestrator.config.stages import Train
from batchscout.orchestrator.stages.context import StageContext
from batchscout.orchestrator.stages.figures import Figure
from batchscout.orchestrator.stages.train.surface_figure import surface_figures
from batchscout.orchestrator.study.state import Study
from batchscout.orchestrator.study.trial import TrialState
from tests.support.outcome import GOLDEN, kept_in, recommendation_of


def context_of(study: Study | None = None) -> StageContext[Train]:
    config, kept = kept_in(GOLDEN / "quickstart")
    keys = config.keys_of(Train)
    assert keys is not None
    return StageContext(keys, config, study or kept)


@pytest.fixture(scope="module")
def figure() -> Figure:
    return next(one for one in surface_figures(context_of()) if one.name == "surface")


def test_every_run_that_came_to_something_is_on_it_and_the_recommended_one_is_ringed(figure: Figure) -> None:
    context = context_of()
    runs = next(series for series in figure.series if series.label == "runs")
    full = [*context.study.of_stage("train"), *context.study.of_stage("learning_rate")]
    settings = {(t.config.effective_batch_size, t.config.learning_rate) for t in full if t.rungs or t.history}
    assert {(mark.x, mark.y) for mark in runs.marks} == settings
    (ringed,) = [mark for mark in runs.marks if mark.kind == "chosen"]
    recommendation = recommendation_of(context.config, context.study)
    assert (ringed.x, ringed.y) == (recommendation.effective_batch_size, recommendation.learning_rate)
    ended = [mark for mark in runs.marks if not mark.text.startswith("~")]
    cut = {(t.config.effective_batch_size, t.config.learning_rate) for t in full if t.state is TrialState.PRUNED}
    assert {(mark.x, mark.y) for mark in runs.marks if mark not in ended} == cut, "a ~ marks what was extrapolated"
    told = {(mark.x, mark.y): mark.told for mark in runs.marks}
    for trial in full:
        if trial.state is TrialState.PRUNED:
            own = (f"{trial.measured('val_loss'):.3f}", f"{trial.measured('samples_seen'):,.0f} samples")
            assert all(one in told[trial.config.effective_batch_size, trial.config.learning_rate] for one in own)


def test_what_a_choice_may_lose_many_times_over_is_cut_and_said_to_be(monkeypatch: pytest.MonkeyPatch) -> None:
    for most_lost, is_cut in ((-10.0, False), (-0.1, True)):
        monkeypatch.setattr("batchscout.orchestrator.stages.train.surface_figure.MOST_LOST", most_lost)
        (against,) = [one for one in surface_figures(context_of()) if one.name == "differences"]
        marks = [mark for series in against.series for mark in series.marks]
        assert (against.y.bottom is not None, "goes on below" in against.caption) == (is_cut, is_cut)
        assert all(against.y.bottom is None or mark.y >= against.y.bottom for mark in marks), "no point is left out"


def test_each_batch_has_its_best_rate_with_an_interval_around_it(figure: Figure) -> None:
    best = next(series for series in figure.series if series.label == "best rate")
    assert [mark.x for mark in best.marks] == sorted({float(tick) for tick in figure.x.ticks})
    for mark in best.marks:
        assert mark.low is not None
        assert mark.high is not None
        assert mark.low < mark.y < mark.high


def test_the_cells_cover_the_plane_once_and_fade_from_the_lowest(figure: Figure) -> None:
    columns: dict[float, list[tuple[float, float, float]]] = {}
    for cell in figure.cells:
        columns.setdefault(cell.x_low, []).append((cell.y_low, cell.y_high, cell.strength))
    assert len(columns) == len(figure.x.ticks)
    for cells in columns.values():
        cells.sort()
        assert all(below[1] == pytest.approx(above[0]) for below, above in itertools.pairwise(cells))
        strengths = [strength for _, _, strength in cells]
        top = strengths.index(max(strengths))  # a column rises to its best rate and falls from there
        assert strengths[: top + 1] == sorted(strengths[: top + 1])
        assert strengths[top:] == sorted(strengths[top:], reverse=True)


def test_there_is_none_before_a_run_has_ended() -> None:
    assert surface_figures(context_of(Study("quickstart"))) == []


def test_each_batch_is_told_against_the_choice_which_lies_on_the_zero_line() -> None:
    """An interval that reaches across zero belongs to a batch that may be the best after all."""
    context = context_of()
    figure = next(one for one in surface_figures(context) if one.name == "differences")
    recommendation = recommendation_of(context.config, context.study)
    (choice,) = [mark for one in figure.series for mark in one.marks if mark.kind == "chosen"]
    assert (choice.x, choice.y) == (recommendation.effective_batch_size, 0.0)
    assert [line.value for line in figure.lines] == [0.0]
    others = next(one for one in figure.series if one.label == "at its best rate").marks
    assert {mark.x for mark in others} == {*figure.x.ticks} - {choice.x}
    for mark in others:
        assert mark.low is not None
        assert mark.high is not None
        assert mark.low <= mark.y <= mark.high
    assert max(mark.y for mark in others) > 0
