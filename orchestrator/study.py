"""What is known of a study: values, built by replaying the journal. Nothing here acts."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Any

from trainers.config import TrialConfig


class Halted(Exception):
    """Nothing more can run for now: no lane, or no room on the disk. The trials wait for the next run of the study."""


class TrialState(StrEnum):
    WAITING = "waiting"
    RUNNING = "running"
    PAUSED = "paused"
    COMPLETE = "complete"
    PRUNED = "pruned"
    FAILED = "failed"
    OUT_OF_MEMORY = "out_of_memory"

    @property
    def ended(self) -> bool:
        return self in (TrialState.COMPLETE, TrialState.PRUNED, TrialState.FAILED, TrialState.OUT_OF_MEMORY)


# What the reason of a trial says that was measured before.
REUSED = "reused: "


@dataclass(frozen=True)
class Proposal:
    """A trial that a stage wants; its id says what it is, so that the same wish is the same trial."""

    id: str
    stage: str
    config: TrialConfig
    role: str = ""
    """Why it is here, for people: `baseline`, `best tokens/s`, ..."""
    protected: bool = False
    """Never pruned for losing."""
    fresh: bool = False
    """To be run in processes that have run nothing before."""
    expected: dict[str, float] = field(default_factory=dict)
    """Metrics that are known before it runs, such as predicted_memory_bytes."""


@dataclass(frozen=True)
class Trial:
    id: str
    stage: str
    config: TrialConfig
    role: str = ""
    protected: bool = False
    fresh: bool = False
    state: TrialState = TrialState.WAITING
    reason: str = ""
    metrics: dict[str, float] = field(default_factory=dict)
    rungs: dict[int, float] = field(default_factory=dict)
    """The objective's value at each rung reached."""
    paused_at: frozenset[int] = frozenset()
    """The rungs it has waited at."""
    promoted: frozenset[int] = frozenset()
    """The rungs it was let past."""
    history: tuple[dict[str, float], ...] = ()
    """The metrics of every evaluation."""
    seconds: float = 0.0
    """Wall-clock it has held a lane."""

    @property
    def reused(self) -> bool:
        """Whether it was measured in an earlier study, and not in this one."""
        return REUSED in self.reason


@dataclass(frozen=True)
class Conclusion:
    """What a stage found: numbers and names for the next stages, a sentence for people, findings beside it."""

    stage: str
    ok: bool
    reason: str
    values: dict[str, Any] = field(default_factory=dict)
    notes: tuple[str, ...] = ()


@dataclass
class Study:
    """The replay of a journal so far. `apply` is the only way it changes."""

    name: str
    trials: dict[str, Trial] = field(default_factory=dict)
    conclusions: dict[str, Conclusion] = field(default_factory=dict)
    started: list[str] = field(default_factory=list)
    """Stages, in the order in which they began."""
    facts: dict[str, Any] = field(default_factory=dict)
    """What was read from the machine once and holds for the whole study, such as memory_limit_bytes."""
    ready: dict[str, float] = field(default_factory=dict)
    """Of every run, by its token: seconds from the command to the cluster's being there."""

    @property
    def startup_seconds(self) -> list[float]:
        return list(self.ready.values())

    def is_over(self, stages: Iterable[str]) -> bool:
        """Whether all of these are concluded, or one has failed: what would follow it has nothing to stand on."""
        failed = any(not conclusion.ok for conclusion in self.conclusions.values())
        return failed or all(stage in self.conclusions for stage in stages)

    def of_stage(self, stage: str) -> list[Trial]:
        """The stage's trials in the order they were proposed."""
        return [trial for trial in self.trials.values() if trial.stage == stage]

    def value(self, stage: str, key: str, default: Any = None) -> Any:
        """What an earlier stage concluded, or the default where it did not run."""
        conclusion = self.conclusions.get(stage)
        return conclusion.values.get(key, default) if conclusion else default

    def apply(self, record: dict[str, Any]) -> None:
        """Take one journal record in. The same record twice changes nothing."""
        getattr(self, "_on_" + record["kind"])(record)

    def _on_run(self, record: dict[str, Any]) -> None:
        """A driver began: what the one before it left running waits again."""
        for trial in self.trials.values():
            if trial.state is TrialState.RUNNING:
                self.trials[trial.id] = replace(trial, state=TrialState.WAITING)

    def _on_ready(self, record: dict[str, Any]) -> None:
        self.ready[record["token"]] = record["seconds"]

    def _on_facts(self, record: dict[str, Any]) -> None:
        self.facts.update(record["facts"])

    def _on_stage(self, record: dict[str, Any]) -> None:
        if record["stage"] not in self.started:
            self.started.append(record["stage"])

    def _on_conclusion(self, record: dict[str, Any]) -> None:
        fields = {key: record[key] for key in ("stage", "ok", "reason", "values")}
        self.conclusions[record["stage"]] = Conclusion(**fields, notes=tuple(record["notes"]))

    def _on_trial(self, record: dict[str, Any]) -> None:
        if record["id"] not in self.trials:
            config = TrialConfig.model_validate(record["config"])
            fields = {key: record[key] for key in ("id", "stage", "role", "protected", "fresh")}
            self.trials[record["id"]] = Trial(**fields, config=config, metrics=record["expected"])

    def _on_started(self, record: dict[str, Any]) -> None:
        self._change(record, state=TrialState.RUNNING)

    def _on_interrupted(self, record: dict[str, Any]) -> None:
        trial = self.trials[record["id"]]
        seconds = trial.seconds + record["seconds"]
        self._change(record, state=TrialState.WAITING, reason=record["reason"], seconds=seconds)

    def _on_result(self, record: dict[str, Any]) -> None:
        trial = self.trials[record["id"]]
        metrics = record["metrics"]
        seen = [point.get("samples_seen") for point in trial.history]
        history = trial.history if metrics.get("samples_seen") in seen else (*trial.history, metrics)
        rungs = {int(rung): value for rung, value in record["rungs"].items()}
        self._change(record, metrics=trial.metrics | metrics, history=history, rungs=rungs | trial.rungs)

    def _on_paused(self, record: dict[str, Any]) -> None:
        trial, rung = self.trials[record["id"]], record["rung"]
        seconds = trial.seconds + (0 if rung in trial.paused_at else record["seconds"])
        paused_at = trial.paused_at | {rung}
        self._change(record, state=TrialState.PAUSED, reason=record["reason"], paused_at=paused_at, seconds=seconds)

    def _on_promoted(self, record: dict[str, Any]) -> None:
        trial = self.trials[record["id"]]
        state = TrialState.WAITING if trial.state is TrialState.PAUSED else trial.state
        self._change(record, state=state, reason=record["reason"], promoted=trial.promoted | {record["rung"]})

    def _on_ended(self, record: dict[str, Any]) -> None:
        trial = self.trials[record["id"]]
        metrics = trial.metrics | record["metrics"]
        end = {"state": TrialState(record["state"]), "reason": record["reason"], "metrics": metrics}
        self._change(record, **end, seconds=trial.seconds + record["seconds"])

    def _change(self, record: dict[str, Any], **changes: Any) -> None:
        """What has ended never changes again."""
        trial = self.trials[record["id"]]
        if not trial.state.ended:
            self.trials[trial.id] = replace(trial, **changes)
