"""A study never costs more than its budget, and its answer is made from what has ended by then."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from batchscout.orchestrator.config.keys import Budget, StudyConfig
from batchscout.orchestrator.decisions.budget import Spending
from batchscout.orchestrator.decisions.further import events_to_go_further, kept_by_the_budget
from batchscout.orchestrator.output.recommendation import recommend
from batchscout.orchestrator.output.results import finish
from batchscout.orchestrator.stages.context import StageContext
from batchscout.orchestrator.stages.findings import Findings
from batchscout.orchestrator.stages.train import TrainFindings
from batchscout.orchestrator.study.causes import Cause
from batchscout.orchestrator.study.events import (
    Concluded,
    Ended,
    Evaluated,
    FactsRead,
    Reopened,
    RunBegan,
    RunStopped,
    StageBegan,
    Started,
    proposed,
)
from batchscout.orchestrator.study.facts import Facts
from batchscout.orchestrator.study.journal import Journal, replay
from batchscout.orchestrator.study.state import Study
from batchscout.orchestrator.study.trial import PLANNED_RATE, Proposal, TrialState
from batchscout.trainers.config import BranchPoint
from tests.support.lane_player import Player, World, director_of, know, study_of
from tests.support.loss_worlds import IDEAL
from tests.support.outcome import found_by, recommendation_of
from tests.support.worlds import field_config, field_curves

BATCHES = (4, 8, 16, 32, 64)
RUN_SECONDS = 8192 / IDEAL.samples_per_second(8)
"""Every run is planned to take so long, at equal time."""
SECONDS_PER_MESSAGE = RUN_SECONDS / 8
"""What the clock of these studies says: a run has 8 messages."""


@dataclass
class Clock:
    num_lanes: int = 1
    now: float = 0.0

    def __call__(self) -> float:
        return self.now

    def tick(self) -> None:
        self.now += SECONDS_PER_MESSAGE / self.num_lanes  # the lanes work side by side, and speak in turn


def played(
    path: Path, config: StudyConfig, stage: str, world: World, found: tuple[Findings, ...] = (), lanes: int = 1
) -> Study:
    clock = Clock(lanes)
    with Journal(path, config.name) as journal:
        journal.append(RunBegan(token="first"))
        know(journal, found)
        director = director_of(config, journal, stage, num_lanes=lanes, clock=clock)
        return Player(director, world, lanes, before_message=clock.tick).play()


def trained(path: Path, seconds: float | None, lanes: int = 1, **changes: Any) -> tuple[StudyConfig, Study]:
    """The train stage, with a budget of so many seconds of one device."""
    budget = {} if seconds is None else {"budget": {"device_hours": seconds / 3600}}
    config = study_of(stages=[{"type": "train"}], sample_budget=8192, **budget, **changes)
    return config, played(path, config, "train", IDEAL, (IDEAL.rates(BATCHES),), lanes)


def names(study: Study, *states: TrialState) -> list[str]:
    return [trial.id for trial in study.trials.values() if trial.state in states]


@pytest.mark.slow
@pytest.mark.parametrize("lanes", [1, 3])
@pytest.mark.parametrize("num_runs", [1.6, 2.5])
def test_it_holds_and_the_answer_is_made_from_what_fitted_in(tmp_path: Path, num_runs: float, lanes: int) -> None:
    seconds = num_runs * RUN_SECONDS
    _, without = trained(tmp_path / "without.jsonl", None, lanes)
    config, known = trained(tmp_path / "with.jsonl", seconds, lanes)
    assert without.lane_seconds > 1.2 * seconds, "else the budget would change nothing"
    assert known.lane_seconds <= seconds + lanes * SECONDS_PER_MESSAGE, "every lane is stopped at its next message"
    assert names(known, TrialState.COMPLETE)
    assert known.conclusions["train"].ok
    findings = found_by(known, TrainFindings)
    assert findings.regret_time is not None
    is_decided = findings.regret_time <= config.useful_gain
    assert is_decided or any("of budget.device_hours (0.0" in note for note in known.conclusions["train"].notes)
    assert recommend(config, known) is not None


def test_a_run_that_would_not_end_in_time_is_not_started_and_the_note_says_what_it_needs(tmp_path: Path) -> None:
    _, known = trained(tmp_path / "journal.jsonl", 1.6 * RUN_SECONDS)
    assert all(trial.cause is not Cause.BUDGET for trial in known.trials.values())
    note = next(note for note in known.conclusions["train"].notes if "budget" in note)
    assert f" would take {RUN_SECONDS:.0f} s, and " in note
    assert note.endswith(
        f" s of budget.device_hours ({1.6 * RUN_SECONDS / 3600:.3g}) were left; raise it to go further"
    )


def test_a_budget_that_holds_no_run_says_what_one_takes(tmp_path: Path) -> None:
    config, known = trained(tmp_path / "journal.jsonl", RUN_SECONDS / 2)
    conclusion = known.conclusions["train"]
    assert not conclusion.ok
    assert f" would take {RUN_SECONDS:.0f} s, and {RUN_SECONDS / 2:.0f} s of budget.device_hours" in conclusion.reason
    assert recommend(config, known) is None


def test_without_known_rates_the_running_ones_are_stopped_and_the_waiting_ones_never_start(tmp_path: Path) -> None:
    config = field_config().model_copy(update={"budget": Budget(device_hours=6 / 3600)})
    known = played(tmp_path / "journal.jsonl", config, "grid", field_curves)
    cut = [trial for trial in known.trials.values() if trial.cause is Cause.BUDGET]
    assert cut
    assert all(trial.state.ended for trial in known.trials.values())
    assert {trial.explanation for trial in cut} == {"budget: budget.device_hours (0.00167) is spent"}
    assert known.lane_seconds <= 6 + SECONDS_PER_MESSAGE
    assert f"{len(cut)} trials were stopped: budget.device_hours (0.00167) is spent" in known.conclusions["grid"].reason


def test_a_study_that_goes_on_counts_what_was_spent_before(tmp_path: Path) -> None:
    config, known = trained(tmp_path / "journal.jsonl", 1.6 * RUN_SECONDS)
    assert replay(tmp_path / "journal.jsonl", config.name).lane_seconds == pytest.approx(known.lane_seconds)
    clock = Clock()
    with Journal(tmp_path / "journal.jsonl", config.name) as journal:
        director = director_of(config, journal, "train", clock=clock)
        director.advance()
        assert director.next_trial() is None
        assert director.is_finished()


def test_what_ran_when_its_driver_ended_has_spent_what_it_held_its_lane_for() -> None:
    """A driver that stops in order says when; of one that is killed the last line of a trial tells how long it lived at least."""
    config = study_of(stages=[{"type": "train"}], budget={"device_hours": 1})
    study = Study(config.name)
    context = StageContext(config.stages[0], config, study)
    run = context.trial(context.split(4, 1), None, sample_budget=1000)
    events = (
        RunBegan(token="first", time=0),
        proposed(Proposal("a", "train", run, candidate="a")),
        Started(id="a", time=10),
        RunStopped(time=1010),
        RunStopped(time=1012),
        RunBegan(token="second", time=100_000),
        Started(id="a", time=100_010),
        Evaluated(id="a", time=100_510, metrics={"samples_seen": 500}),
        FactsRead(facts=Facts(), time=199_990),
        RunBegan(token="third", time=200_000),
        Started(id="a", time=200_010),
        Ended(id="a", time=200_040, state=TrialState.COMPLETE, cause=None, reason="", metrics={}, seconds=30),
    )
    for event in (*events[:-1], *events):
        study.apply(event)
    assert study.lane_seconds == study.trials["a"].seconds == 1000 + 500 + 30
    assert Spending(config, study, lambda: 0.0).left() == 3600 - 1530


def test_two_ranks_spend_it_twice_as_fast(tmp_path: Path) -> None:
    _, one = trained(tmp_path / "one.jsonl", 1.6 * RUN_SECONDS)
    _, two = trained(tmp_path / "two.jsonl", 3.2 * RUN_SECONDS, world_size=2)
    assert two.lane_seconds == pytest.approx(one.lane_seconds, abs=RUN_SECONDS)


@pytest.mark.parametrize(("begins_at", "fits"), [(0, False), (900, True)])
def test_a_branch_costs_what_it_trains_itself(begins_at: int, fits: bool) -> None:
    """At 10 samples/s a whole run takes 100 s, and its last tenth 10 s."""
    config = study_of(stages=[{"type": "train"}], budget={"device_hours": 20 / 3600})
    study = Study(config.name)
    context = StageContext(config.stages[0], config, study)
    begin = BranchPoint(directory="/run/trials/trunk", samples=begins_at) if begins_at else None
    run = context.trial(context.split(4, 1), None, sample_budget=1000, branch_from=begin)
    wanted = [Proposal("branch", "branch", run, candidate="branch", expected={PLANNED_RATE: 10.0})]
    assert Spending(config, study, lambda: 0.0).affordable(wanted, ()) == (wanted if fits else [])


# What a study does that is let go further than before


def answer_of(config: StudyConfig, study: Study) -> tuple[int, float]:
    found = recommendation_of(config, study)
    return found.effective_batch_size, found.learning_rate


def go_further(path: Path, before: StudyConfig, now: StudyConfig) -> Study:
    """As a driver does that finds the other keys."""
    clock = Clock()
    with Journal(path, now.name) as journal:
        for event in events_to_go_further(before, now, journal.study):
            journal.append(event)
        assert "train" not in journal.study.conclusions
        journal.append(RunBegan(token="second"))
        director = director_of(now, journal, "train", clock=clock)
        return Player(director, IDEAL, before_message=clock.tick).play()


def with_budget(config: StudyConfig, seconds: float | None) -> StudyConfig:
    budget = None if seconds is None else Budget(device_hours=seconds / 3600)
    return config.model_copy(update={"budget": budget})


@pytest.mark.parametrize("num_runs", [0.5, 1.6, 2.5])
def test_with_a_larger_budget_it_ends_as_if_it_had_had_that_from_the_beginning(tmp_path: Path, num_runs: float) -> None:
    whole, without = trained(tmp_path / "without.jsonl", None)
    config, short = trained(tmp_path / "with.jsonl", num_runs * RUN_SECONDS)
    assert kept_by_the_budget(config, short)
    larger = with_budget(config, 100 * RUN_SECONDS)
    known = go_further(tmp_path / "with.jsonl", config, larger)
    assert answer_of(larger, known) == answer_of(whole, without)
    assert set(short.trials) <= set(known.trials), "what has ended stands"
    assert not kept_by_the_budget(larger, known)
    assert replay(tmp_path / "with.jsonl", config.name).conclusions == known.conclusions


def test_what_the_budget_stopped_goes_on_where_it_was_and_no_time_is_spent_twice(tmp_path: Path) -> None:
    whole = played(tmp_path / "whole.jsonl", field_config(), "grid", field_curves)
    config, larger = with_budget(field_config(), 6), with_budget(field_config(), None)
    with Journal(tmp_path / "journal.jsonl", config.name) as journal:
        journal.append(RunBegan(token="first"))
        clock = Clock()
        first = Player(director_of(config, journal, "grid", clock=clock), field_curves, before_message=clock.tick)
        first.play()
        stopped = {trial.id: trial for trial in journal.study.trials.values() if trial.cause is Cause.BUDGET}
        assert any(trial.history for trial in stopped.values())
        no_more = with_budget(config, 6.001)
        assert events_to_go_further(config, no_more, journal.study) == [], "it is spent all the same"
        for event in events_to_go_further(config, larger, journal.study):
            journal.append(event)
        assert all(journal.study.trials[name].history == trial.history for name, trial in stopped.items())
        journal.append(RunBegan(token="second"))
        director = director_of(larger, journal, "grid", clock=clock)
        known = Player(director, field_curves, disk=first.disk, before_message=clock.tick).play()
    assert {t.id: t.state for t in known.trials.values()} == {t.id: t.state for t in whole.trials.values()}
    assert known.lane_seconds == pytest.approx(whole.lane_seconds, abs=2 * SECONDS_PER_MESSAGE)
    assert replay(tmp_path / "journal.jsonl", config.name).trials == known.trials


def test_more_runs_are_made_by_their_own_stage_alone(tmp_path: Path) -> None:
    """How much a frontier probes depends on how many runs there may be, and what it decided stands."""

    def config(max_runs: int) -> StudyConfig:
        stages = [{"type": "frontier"}, {"type": "train", "max_runs": max_runs}]
        return study_of(stages=stages, sample_budget=8192)

    few, path = config(2), tmp_path / "journal.jsonl"
    with Journal(path, few.name) as journal:
        journal.append(RunBegan(token="first"))
        journal.append(StageBegan(stage="frontier"))
        journal.append(Concluded(stage="frontier", ok=True, reason="as measured"))
        know(journal, (IDEAL.rates(BATCHES),))
        before = Player(director_of(few, journal, "train"), IDEAL).play()
        first = {trial.id: trial for trial in before.of_stage("train")}
        (event,) = events_to_go_further(few, config(12), before)
    assert isinstance(event, Reopened)
    assert event.stage == "train"
    known = go_further(path, few, config(12))
    assert first.items() <= known.trials.items()
    assert len(known.of_stage("train")) > len(first)


def test_what_is_printed_at_its_end_names_the_key(tmp_path: Path) -> None:
    for num_runs in (0.5, 1.6):
        config, short = trained(tmp_path / f"{num_runs}.jsonl", num_runs * RUN_SECONDS)
        message = finish(config, tmp_path, short).message
        assert message.splitlines()[-1].startswith("It stopped for budget.device_hours: raise it, and run the same")
    config, whole = trained(tmp_path / "whole.jsonl", 100 * RUN_SECONDS)
    assert "budget.device_hours" not in finish(config, tmp_path, whole).message
