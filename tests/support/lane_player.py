"""Plays Tune, the lanes and the training runs for a Director, in one thread and without Ray.

A run here does what `batchscout.trainers.loop.train` does: it saves a checkpoint before it reports a milestone, waits there for the
verdict, and when started again goes on from its checkpoint and repeats the report that was saved with it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from batchscout.orchestrator.config.keys import StudyConfig
from batchscout.orchestrator.config.load import parse_study
from batchscout.orchestrator.decisions.decision import Action
from batchscout.orchestrator.decisions.director import Director
from batchscout.orchestrator.decisions.observer import Observer
from batchscout.orchestrator.stages.context import StageContext
from batchscout.orchestrator.stages.findings import Findings, concluded
from batchscout.orchestrator.study.events import Concluded, FactsRead, RunBegan
from batchscout.orchestrator.study.facts import Facts
from batchscout.orchestrator.study.journal import Journal
from batchscout.orchestrator.study.messages import Message
from batchscout.orchestrator.study.state import Study
from batchscout.orchestrator.study.trial import Trial
from batchscout.trainers.config import TrialConfig
from batchscout.trainers.step_log import Step

KEYS: dict[str, Any] = {
    "name": "played",
    "model": {"target": "gpt"},
    "data": {"target": "python_stdlib"},
    "optimizer": {"lr": 1e-3, "reference_batch_size": 8},
    "sample_budget": 512,
}


def study_of(**changes: Any) -> StudyConfig:
    return parse_study(KEYS | changes, "the test's study")


World = Callable[[TrialConfig, int], dict[str, Any]]
"""(trial, samples seen) -> its metrics there; "outcome" and "reason" among them end the run."""


@dataclass
class Player:
    """Lanes that run the Director's trials one message at a time, in turn."""

    director: Director
    world: World
    num_lanes: int = 1
    disk: dict[str, tuple[int, Message | None]] = field(default_factory=dict)
    """What outlives the driver: of each trial the samples of its checkpoint and the report saved with it."""
    before_message: Callable[[], None] = lambda: None
    sent: int = 0
    stop_after: int | None = None
    """Leave the stage as it is after so many messages."""

    def __post_init__(self) -> None:
        self.running: dict[str, Iterator[Message]] = {}

    def play(self) -> Study:
        """Until the stage has nothing left to run; its conclusion is journaled."""
        for _ in range(100_000):
            while (trial := next_trial(self.director)) is not None:
                assert trial.id not in self.running, "started twice"
                self.director.on_started(trial.id)
                self.running[trial.id] = self._run(trial.id, trial.config)
                wanted = [one for one in self.running if not self.director.study.trials[one].state.ended]
                assert len(wanted) <= self.num_lanes
            if not self.running:
                break
            self._one_message()
            if self.sent == self.stop_after:
                return self.director.study
        assert self.director.is_finished(), {t.id: str(t.state) for t in self.director.study.trials.values()}
        self.director.conclude()
        return self.director.study

    def _one_message(self) -> None:
        trial_id, run = next(iter(self.running.items()))
        del self.running[trial_id]
        message = next(run)
        self.before_message()
        self.sent += 1
        decision = self.director.on_message(trial_id, message)
        if message.outcome is None and decision.action is Action.GO_ON:
            self.running[trial_id] = run  # at the end: every run has its turn

    def _run(self, trial_id: str, config: TrialConfig) -> Iterator[Message]:
        begin = config.branch_from.samples if config.branch_from else 0
        samples, unheard = self.disk.get(trial_id, (begin, None))
        if unheard is not None:
            yield unheard
        heard_to, losses = samples, list[float]()
        for milestone in sorted({*config.rungs, *config.evaluations, *config.kept_checkpoints, config.sample_budget}):
            if milestone <= samples and milestone < config.sample_budget:
                continue
            while samples < milestone:
                samples += config.split_in(config.phase_at(samples)).effective_batch_size
                point = self.world(config, samples)
                if "outcome" in point:
                    yield Message(outcome=point["outcome"], reason=point["reason"])
                losses.append(point["loss"])
            rungs = tuple(rung for rung in config.rungs if heard_to < rung <= samples)
            metrics = {"samples_seen": samples, **self.world(config, samples)}
            if samples >= config.sample_budget:
                break
            said = Message(metrics, rungs, evaluated=True)
            self.disk[trial_id], heard_to = (samples, said), samples
            yield Message(metrics, rungs, self._steps(config, samples, losses), evaluated=True)
            losses = []
        self.disk[trial_id] = (samples, None)
        metrics = {"samples_seen": samples, **self.world(config, samples)}
        yield Message(metrics, (), self._steps(config, samples, losses), outcome="complete")

    @staticmethod
    def _steps(config: TrialConfig, samples: int, losses: Sequence[float]) -> tuple[Step, ...]:
        """Those that led to so many samples, the last of all."""
        return steps_of(losses, first=config.num_steps_at(samples) - len(losses) + 1)


def steps_of(losses: Sequence[float], first: int = 1) -> tuple[Step, ...]:
    """Steps of these losses, one after the other."""
    return tuple(Step(number, 0, loss, 1.0, 1e-3, 0.0) for number, loss in enumerate(losses, start=first))


def next_trial(director: Director) -> Trial | None:
    """Ask as Tune does: whatever follows from what has happened comes first."""
    director.advance()
    return director.next_trial()


def director_of(
    config: StudyConfig,
    journal: Journal,
    stage: str,
    num_lanes: int = 1,
    observer: Observer | None = None,
    clock: Callable[[], float] = time.monotonic,
) -> Director:
    keys = next(keys for keys in config.stages if keys.type == stage)
    context = StageContext(keys, config, journal.study)
    return Director(context, journal, [observer] if observer else [], num_lanes, clock=clock)


def play_stage(
    path: Path,
    config: StudyConfig,
    stage: str,
    world: World,
    num_lanes: int = 1,
    found: Sequence[Findings] = (),
    facts: Facts | None = None,
) -> Study:
    """A stage from its start to its conclusion, with a journal in `path`; `found` is what earlier stages found."""
    with Journal(path, config.name) as journal:
        journal.append(RunBegan(token="first"))
        know(journal, found, facts)
        return Player(director_of(config, journal, stage, num_lanes), world, num_lanes).play()


def play_study(
    path: Path, config: StudyConfig, world: World, found: Sequence[Findings] = (), facts: Facts | None = None
) -> Study:
    """Its stages one after another, as `play_stage` does each, on one lane."""
    with Journal(path, config.name) as journal:
        journal.append(RunBegan(token="first"))
        know(journal, found, facts)
        for stage in config.stages:
            Player(director_of(config, journal, stage.type), world).play()
        return journal.study


def know(journal: Journal, found: Sequence[Findings] = (), facts: Facts | None = None) -> None:
    """Journal facts, and what earlier stages found."""
    if facts is not None:
        journal.append(FactsRead(facts=facts))
    for findings in found:
        journal.append(Concluded(**asdict(concluded(findings, ""))))
