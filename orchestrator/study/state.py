"""What is known of a study: values, built by replaying the journal. Nothing here acts."""

from __future__ import annotations

import sys
from bisect import bisect_left, insort
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
    interruptions: int = 0
    """How often its machine was taken away since its last evaluation."""
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
    num_records: int = field(default=0, init=False, compare=False)
    """Taken in so far: while it stays the same, so does every answer that is a function of the study."""
    _ranked: dict[tuple[str, TrialState], list[tuple[int, int, str]]] = field(
        default_factory=dict, init=False, repr=False, compare=False
    )
    """The trials by stage and state, ranked: what is asked at every event must not take a look at all of them."""
    _numbers: dict[str, int] = field(default_factory=dict, init=False, repr=False, compare=False)
    """Of every trial, how many were proposed before it."""
    _parts: dict[str, Any] = field(default_factory=dict, init=False, repr=False, compare=False)
    """What many trials have in common, once: by its text."""

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

    def count(self, stage: str, *states: TrialState) -> int:
        """How many of the stage's trials are in one of these states."""
        return sum(len(self._ranked.get((stage, state), ())) for state in states)

    def in_state(self, stage: str, state: TrialState) -> list[Trial]:
        """Those of the stage's trials, the furthest first: by the rungs they were let past, then in the order proposed."""
        return [self.trials[trial_id] for _, _, trial_id in self._ranked.get((stage, state), ())]

    def furthest(self, stage: str, state: TrialState) -> Trial | None:
        """The first of `in_state`."""
        ranked = self._ranked.get((stage, state))
        return self.trials[ranked[0][2]] if ranked else None

    def value(self, stage: str, key: str, default: Any = None) -> Any:
        """What an earlier stage concluded, or the default where it did not run."""
        conclusion = self.conclusions.get(stage)
        return conclusion.values.get(key, default) if conclusion else default

    def apply(self, record: dict[str, Any]) -> None:
        """Take one journal record in. The same record twice changes nothing."""
        self.num_records += 1
        getattr(self, "_on_" + record["kind"])(record)

    def _on_run(self, record: dict[str, Any]) -> None:
        """A driver began: what the one before it left running waits again."""
        for trial in [trial for trial in self.trials.values() if trial.state is TrialState.RUNNING]:
            self._put(replace(trial, state=TrialState.WAITING))

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
            config = self._sharing(TrialConfig.model_validate(record["config"]))
            fields = {key: record[key] for key in ("id", "stage", "role", "protected", "fresh")}
            self._put(Trial(**fields, config=config, metrics=record["expected"]))

    def _sharing(self, config: TrialConfig) -> TrialConfig:
        """The same, of the same parts as other trials: most of a grid's differ in a number or two, and take 6 kB each."""
        parts = {name: getattr(config, name) for name in ("model", "data", "optimizer", "schedule")}
        shared = {name: self._parts.setdefault(repr(part), part) for name, part in parts.items()}
        return config.model_copy(update=shared)

    def _on_started(self, record: dict[str, Any]) -> None:
        self._change(record, state=TrialState.RUNNING)

    def _on_interrupted(self, record: dict[str, Any]) -> None:
        trial = self.trials[record["id"]]
        if trial.state is not TrialState.RUNNING:
            return
        counts = {"interruptions": trial.interruptions + 1, "seconds": trial.seconds + record["seconds"]}
        self._change(record, state=TrialState.WAITING, reason=record["reason"], **counts)

    def _on_result(self, record: dict[str, Any]) -> None:
        trial = self.trials[record["id"]]
        metrics = _with_shared_names(record["metrics"])
        seen = [point.get("samples_seen") for point in trial.history]
        history = trial.history if metrics.get("samples_seen") in seen else (*trial.history, metrics)
        rungs = {int(rung): value for rung, value in record["rungs"].items()}
        further = {"metrics": trial.metrics | metrics, "history": history, "rungs": rungs | trial.rungs}
        self._change(record, **further, interruptions=0)

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
        metrics = trial.metrics | _with_shared_names(record["metrics"])
        end = {"state": TrialState(record["state"]), "reason": record["reason"], "metrics": metrics}
        self._change(record, **end, seconds=trial.seconds + record["seconds"])

    def _change(self, record: dict[str, Any], **changes: Any) -> None:
        """What has ended never changes again."""
        trial = self.trials[record["id"]]
        if not trial.state.ended:
            self._put(replace(trial, **changes))

    def _put(self, trial: Trial) -> None:
        """The only place where a trial comes or changes: its rank does so with it."""
        before = self.trials.get(trial.id)
        self.trials[trial.id] = trial
        self._numbers.setdefault(trial.id, len(self._numbers))
        place, rank = (trial.stage, trial.state), self._rank(trial)
        if before is not None:
            old_place, old_rank = (before.stage, before.state), self._rank(before)
            if (old_place, old_rank) == (place, rank):
                return
            old = self._ranked[old_place]
            del old[bisect_left(old, old_rank)]
        insort(self._ranked.setdefault(place, []), rank)

    def _rank(self, trial: Trial) -> tuple[int, int, str]:
        return -len(trial.promoted), self._numbers[trial.id], trial.id


def _with_shared_names(metrics: dict[str, float]) -> dict[str, float]:
    """Every line that is read brings its own copy of every metric's name."""
    return {sys.intern(name): value for name, value in metrics.items()}
