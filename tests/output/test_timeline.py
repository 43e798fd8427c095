"""When trials held lanes: kept by the replay, and drawn without two at one place."""

from __future__ import annotations

import itertools

import pytest

from batchscout.orchestrator.output.report import timeline as module
from batchscout.orchestrator.output.report.timeline import MOST_HOLDS, MOST_OF_A_NODE, timeline
from batchscout.orchestrator.study.causes import Cause
from batchscout.orchestrator.study.events import (
    Ended,
    Evaluated,
    Event,
    Interrupted,
    Paused,
    Promoted,
    RunBegan,
    Started,
)
from batchscout.orchestrator.study.messages import HeldLane
from batchscout.orchestrator.study.state import Study
from batchscout.orchestrator.study.trial import Hold, TrialState
from tests.support.example_study import add_trial, example_config, tell

CONFIG = example_config()


def study_of(*events: Event, trials: tuple[str, ...] = ("a", "b")) -> Study:
    study = Study("s")
    for trial in trials:
        add_trial(study, CONFIG, trial)
    for event in events:
        tell(study, event)
    return study


def ended(trial: str, at: float, state: TrialState = TrialState.COMPLETE, **metrics: float | None) -> Ended:
    return Ended(id=trial, time=at, state=state, cause=None, reason="", metrics=metrics, seconds=1.0)


def test_a_hold_lasts_from_a_start_to_a_pause_a_loss_or_the_end() -> None:
    study = study_of(
        Started(id="a", time=10),
        Paused(id="a", time=20, rung=4, reason="", seconds=10),
        Promoted(id="a", time=25, rung=4, reason=""),
        Started(id="a", time=30),
        Interrupted(id="a", time=33, reason="", seconds=3),
        Started(id="a", time=40),
        ended("a", 50),
        Started(id="b", time=51),
    )
    assert study.trials["a"].holds == (Hold(10, 20), Hold(30, 33, lost=True), Hold(40, 50))
    assert study.trials["b"].holds == (Hold(51),)


def test_what_ran_when_its_driver_died_held_its_lane_until_the_last_that_is_known() -> None:
    study = study_of(Started(id="a", time=10), Started(id="b", time=14), RunBegan(token="t", time=99))
    assert study.trials["a"].holds == (Hold(10, 14, lost=True),)
    tell(study, Started(id="a", time=100))
    assert study.trials["a"].holds == (Hold(10, 14, lost=True), Hold(100))


def rows_of(study: Study) -> dict[str, list[str]]:
    """The trials in each row of the figure, by what stands beside the row."""
    figure = timeline(study)
    assert figure is not None
    names = {tick: figure.y.text(tick) for tick in figure.y.ticks}
    found: dict[str, list[str]] = {name: [] for name in names.values()}
    for cell in figure.cells:
        found[names[round((cell.y_low + cell.y_high) / 2)]].append(cell.told.split(":")[0])
    return found


def on(lane: HeldLane, trial: str, at: float) -> Ended:
    return ended(trial, at).model_copy(update={"lane": lane})


def test_the_rows_are_the_lanes_whichever_began_first() -> None:
    here, there = HeldLane(0, "n"), HeldLane(1, "n")
    study = study_of(
        Started(id="a", time=0), Started(id="b", time=1), on(there, "a", 5), on(here, "b", 6), Started(id="c", time=7),
        on(there, "c", 9), trials=("a", "b", "c"),
    )  # fmt: skip
    assert rows_of(study) == {"1": ["b"], "2": ["a", "c"]}
    figure = timeline(study)
    assert figure is not None
    assert "each row is a lane of n" in figure.caption
    assert "a: complete after 5 s on lane 2 of n" in figure.cells[0].told


def test_the_lanes_of_several_nodes_are_named_by_them() -> None:
    events = [
        Started(id="a", time=0),
        Started(id="b", time=1),
        on(HeldLane(0, "x" * 40), "a", 5),
        on(HeldLane(1, "y"), "b", 6),
    ]
    (first, second) = rows_of(study_of(*events))
    assert (first[:5], second) == ("1, xx", "2, y")
    assert len(first) <= MOST_OF_A_NODE + 5


def test_a_running_trial_and_two_on_one_lane_at_once_have_rows_of_their_own() -> None:
    """A trial that its lane died under goes on in another, where one may have been until then."""
    lane = HeldLane(0, "n")
    events = [
        Started(id="a", time=0),
        Started(id="b", time=1),
        on(lane, "a", 5),
        on(lane, "b", 6),
        Started(id="c", time=6),
    ]
    figure = timeline(study_of(*events, trials=("a", "b", "c")))
    assert figure is not None
    assert [figure.y.text(tick) for tick in figure.y.ticks] == ["1", "", ""]
    assert len({cell.y_low for cell in figure.cells}) == 3


def test_the_lane_of_a_running_trial_is_known_once_it_has_evaluated_itself() -> None:
    lane = HeldLane(0, "n")
    study = study_of(Started(id="a", time=0), Evaluated(id="a", time=2, metrics={}, lane=lane), Started(id="b", time=3))
    assert [study.trials[name].holds[0].lane for name in "ab"] == [lane, None]


def test_holds_at_one_time_lie_in_rows_of_their_own_and_others_do_not() -> None:
    study = study_of(
        Started(id="a", time=0), Started(id="b", time=1), ended("a", 5), Started(id="c", time=6), ended("b", 9),
        ended("c", 9), trials=("a", "b", "c"),
    )  # fmt: skip
    figure = timeline(study)
    assert figure is not None
    rows: dict[float, list[tuple[float, float]]] = {}
    for cell in figure.cells:
        rows.setdefault(cell.y_low, []).append((cell.x_low, cell.x_high))
    assert sorted(map(len, rows.values())) == [1, 2]
    for row in rows.values():
        assert all(earlier[1] <= later[0] for earlier, later in itertools.pairwise(sorted(row)))


@pytest.mark.parametrize(
    ("event", "told"),
    [
        (Paused(id="a", time=5, rung=4, reason="", seconds=5), "paused"),
        (Interrupted(id="a", time=5, reason="", seconds=5), "lost its lane"),
        (Ended(id="a", time=5, state=TrialState.PRUNED, cause=Cause.RUNG, reason="", metrics={}, seconds=5), "pruned"),
        (ended("a", 5, TrialState.OUT_OF_MEMORY), "out of memory"),
    ],
)
def test_a_bar_says_what_became_of_its_trial(event: Event, told: str) -> None:
    figure = timeline(study_of(Started(id="a", time=0), event))
    assert figure is not None
    assert f"a: {told} after 5 s" in figure.cells[0].told


def test_compiling_is_a_part_of_the_bar() -> None:
    figure = timeline(study_of(Started(id="a", time=0), ended("a", 10, compile_seconds=4.0)))
    assert figure is not None
    start = figure.cells[0].x_low
    assert [(cell.x_low - start, cell.x_high - start) for cell in figure.cells] == [(0, 4), (4, 10)]
    assert {"compiling", "complete"} == set(figure.key)


def test_of_very_many_the_longest_are_drawn_and_it_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    assert MOST_HOLDS >= 100
    monkeypatch.setattr(module, "MOST_HOLDS", 2)
    events = [(Started(id=name, time=10 * i), ended(name, 10 * i + i + 1)) for i, name in enumerate("abc")]
    figure = timeline(study_of(*itertools.chain(*events), trials=("a", "b", "c")))
    assert figure is not None
    assert len(figure.cells) == 2
    assert "The 2 longest of 3 stretches are shown." in figure.caption


def test_a_study_that_has_run_nothing_has_no_timeline() -> None:
    assert timeline(Study("s")) is None
