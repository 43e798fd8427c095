"""What an event costs the driver does not depend on how many trials the study has."""

from __future__ import annotations

import contextlib
import gc
import itertools
import math
import random
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from orchestrator.config.trial import base_trial
from orchestrator.decisions.observer import Observer
from orchestrator.stages import stage_of
from orchestrator.study.events import Ended, Evaluated, Event, Paused, Promoted, RunBegan, Started, proposed
from orchestrator.study.journal import Journal
from orchestrator.study.messages import Assignment, Message
from orchestrator.study.state import Study
from orchestrator.study.trial import Proposal, Trial, TrialState
from tests.support.lane_player import Player, director_of, know, study_of
from tests.support.worlds import KNOWN, by_rate, curves

CONFIG = base_trial(study_of(), None)


def random_events(draw: random.Random, number: int) -> Iterator[Event]:
    """What happens to trials of two stages, in any order: a journal's are a few of these."""
    names: list[str] = []
    for _ in range(number):
        stage, name = draw.choice(["train", "grid"]), draw.choice(names) if names else ""
        if not names or draw.random() < 0.2:
            names.append(f"{stage}-{len(names)}")
            yield proposed(Proposal(names[-1], stage, CONFIG, candidate=names[-1]))
        elif draw.random() < 0.02:
            yield RunBegan(token="again")
        else:
            yield draw.choice(EVENTS)(name, draw.choice([1, 2, 4]), draw)


EVENTS: list[Callable[[str, int, random.Random], Event]] = [
    lambda name, rung, draw: Started(id=name),
    lambda name, rung, draw: Started(id=name),
    lambda name, rung, draw: Evaluated(id=name, metrics={"samples_seen": rung}, rungs={rung: 3.0}),
    lambda name, rung, draw: Paused(id=name, rung=rung, reason="", seconds=1.0),
    lambda name, rung, draw: Promoted(id=name, rung=rung, reason=""),
    lambda name, rung, draw: Promoted(id=name, rung=rung, reason=""),
    lambda name, rung, draw: Ended(
        id=name, state=draw.choice(ENDS), cause=None, reason="", metrics={"samples_seen": rung}, seconds=1.0
    ),
]
ENDS = [state for state in TrialState if state.ended]


@pytest.mark.parametrize("seed", range(5))
def test_what_is_found_by_state_is_what_a_look_at_all_trials_finds(seed: int) -> None:
    study = Study("s")
    for event in random_events(random.Random(seed), 400):
        study.apply(event)
        for stage in ("train", "grid", "frontier"):
            for state in TrialState:
                scanned = [trial for trial in study.of_stage(stage) if trial.state is state]
                scanned.sort(key=lambda trial: -len(trial.promoted))
                assert study.in_state(stage, state) == scanned, event
                assert study.furthest(stage, state) == next(iter(scanned), None)
                assert study.count(stage, state) == len(scanned)
    assert {trial.state for trial in study.trials.values()} == set(TrialState), "some of each"


class Counted(dict[str, Trial]):
    """Trials that count how often one of them is looked at."""

    looks = 0

    def __getitem__(self, key: str) -> Trial:
        self.looks += 1
        return super().__getitem__(key)

    def get(self, key: str, default: Any = None) -> Any:
        self.looks += 1
        return super().get(key, default)

    def __contains__(self, key: object) -> bool:
        self.looks += 1
        return super().__contains__(key)

    def values(self) -> Any:
        self.looks += len(self)
        return super().values()


def looks_per_trial(folder: Path, num_rates: int, num_lanes: int) -> float:
    rates = [1e-5 * (i + 1) for i in range(num_rates)]
    config = study_of(stages=[{"type": "grid", "micro_batch_size": [8], "learning_rate": rates}], evaluations=4)
    with Journal(folder / f"{num_rates}.jsonl", config.name) as journal:
        journal.study.trials = counted = Counted()
        study = Player(director_of(config, journal, "grid", num_lanes), by_rate, num_lanes).play()
    assert study.count("grid", TrialState.COMPLETE) == num_rates
    return counted.looks / num_rates


@pytest.mark.parametrize("num_lanes", [1, 4])
def test_a_trial_among_many_takes_no_more_looks_at_trials_than_one_among_few(tmp_path: Path, num_lanes: int) -> None:
    few, many = (looks_per_trial(tmp_path, num_rates, num_lanes) for num_rates in (20, 200))
    assert many == pytest.approx(few, rel=0.05)


@pytest.mark.parametrize(
    "stage",
    [
        {"type": "train", "pruner": {"type": "asha", "min_samples": 64}},
        {"type": "learning_rate"},
        {"type": "grid", "micro_batch_size": [4, 8], "learning_rate": [1e-3, 2e-3]},
    ],
)
def test_who_is_asked_once_would_never_answer_otherwise(tmp_path: Path, stage: dict[str, Any]) -> None:
    config = study_of(stages=[stage])
    assert stage_of(config.stages[0]).proposes_once
    with Journal(tmp_path / "journal.jsonl", config.name) as journal:
        know(journal, found=KNOWN)
        director = director_of(config, journal, stage["type"])
        wanted = director.proposals()
        player = Player(director, curves)
        player.before_message = lambda: check(director.proposals())

        def check(now: list[Any]) -> None:
            assert now == wanted

        study = player.play()
    assert len(wanted) == len(study.of_stage(stage["type"])) > 1


@pytest.mark.ray
@pytest.mark.parametrize("ending", ["complete", "pruned"])
def test_tune_holds_the_trials_that_run_and_one_actor_a_lane(ray_cluster: None, tmp_path: Path, ending: str) -> None:
    import ray
    from ray._private.state import state

    from orchestrator.execution.dispatcher import Dispatcher
    from orchestrator.execution.tune import run_stage

    num_trials, num_lanes = 60, 3
    config = study_of(stages=[{"type": "grid", "learning_rate": [1e-4 * (i + 1) for i in range(num_trials)]}])
    actor: Any = ray.remote(Dispatcher)
    dispatcher = actor.options(name=ending, num_cpus=0, max_concurrency=1000).remote(num_lanes)
    together = threading.Barrier(num_lanes, timeout=60)
    args = [(dispatcher, f"lane-{i}", together, ending == "pruned") for i in range(num_lanes)]
    lanes = [threading.Thread(target=end_together, args=one, daemon=True) for one in args]
    for lane in lanes:
        lane.start()

    def relays() -> int:
        return sum(one["ActorClassName"].endswith("ResourceTrainable") for one in state.actor_table(None).values())

    before = relays()
    with Journal(tmp_path / "journal.jsonl", config.name) as journal:
        counter = CountsTuneTrials(journal.study, TrialState(ending))
        director = director_of(config, journal, "grid", num_lanes, run_dir=str(tmp_path), observer=counter)
        run_stage(director, ending, tmp_path, "token")
        assert journal.study.count("grid", TrialState(ending)) == num_trials
    ray.get(dispatcher.close.remote())
    for lane in lanes:
        lane.join()
    ray.kill(dispatcher)
    assert max(counter.held) <= 2 * num_lanes, "those that run, and those that are being saved"
    assert relays() - before == num_lanes


class CountsTuneTrials(Observer):
    """Counts the trials that Tune holds whenever ten more have ended, as `ending`; in between, Tune has its own pace."""

    def __init__(self, study: Study, ending: TrialState) -> None:
        self._study, self._ending = study, ending
        self.held: list[int] = []

    def started(self, trial: Trial) -> None:
        self._count()

    def waits(self, trial: Trial) -> None:
        self._count()

    def ended(self, trial: Trial) -> None:
        self._count()

    def _count(self) -> None:
        from ray.tune.experiment import Trial as TuneTrial

        if self._study.count("grid", self._ending) % 10 == 0:
            gc.collect()
            self.held.append(sum(type(one) is TuneTrial for one in gc.get_objects()))


def end_together(dispatcher: Any, lane: str, together: threading.Barrier, diverge: bool) -> None:
    """A lane whose trials end at the moment when those of all lanes do; those that diverge when they are told to."""
    import ray

    for turn in itertools.count(1):
        assignment = ray.get(dispatcher.take.remote(lane, lane, turn))
        if assignment is None:
            return
        assert isinstance(assignment, Assignment)
        with contextlib.suppress(threading.BrokenBarrierError):  # then the counts say so
            together.wait()
        loss = math.nan if diverge else 3.0
        if diverge:
            ray.get(dispatcher.ask.remote(assignment.key, Message({"val_loss": loss}, evaluated=True)))
        outcome = "stopped" if diverge else "complete"
        ray.get(dispatcher.say.remote(assignment.key, Message({"val_loss": loss}, outcome=outcome)))
        ray.get(dispatcher.freed.remote(lane))
