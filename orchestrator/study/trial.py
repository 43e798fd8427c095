"""A trial: what was proposed, and what has become of it. Values; nothing here acts."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum

from batchscout.orchestrator.study.causes import Cause
from batchscout.orchestrator.study.messages import HeldLane
from batchscout.trainers.config import TrialConfig
from batchscout.trainers.files import quoted
from batchscout.trainers.metrics import metric_of

Metrics = dict[str, float | None]
"""Figures by their names. None stands for one that is not finite, which JSON cannot express otherwise."""


PLANNED_RATE = "planned_samples_per_second"
"""The metric that says how fast a trial is expected to train: its sample budget was made for that."""


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
        return self is TrialState.COMPLETE or self.ruled_out

    @property
    def ruled_out(self) -> bool:
        """True if the trial ended before its run did."""
        return self in (TrialState.PRUNED, TrialState.FAILED, TrialState.OUT_OF_MEMORY)


@dataclass(frozen=True)
class Reuse:
    """Where and when another study measured what this one did not measure again."""

    day: str
    """Year-month-day."""
    run_dir: str


@dataclass(frozen=True, slots=True)
class Hold:
    """A stretch of time for which a trial held a lane, in seconds since 1970."""

    began: float
    ended: float | None = None
    """None while it runs."""
    lost: bool = False
    """True if it ended because the lane or the driver did; a driver that is killed leaves no time, so that is the last one known."""
    lane: HeldLane | None = None
    """The lane that it spoke from last; None before it has spoken, and in journals that do not tell."""


@dataclass(frozen=True)
class Proposal:
    """A trial that a stage wants. Ids are deterministic, so proposing one twice is harmless."""

    id: str
    stage: str
    config: TrialConfig
    candidate: str
    """What it is a run of: the trials that share it differ in their seeds alone, and are judged together."""
    role: str = ""
    """Why it is here, for people: `baseline`, `best tokens/s`, ..."""
    protected: bool = False
    """True if it is never cut for being slower or worse than others."""
    fresh_process: bool = False
    """True if it must run in processes that have run nothing before."""
    round: int | None = None
    """The round that it is timed in, where several are timed in turns: such a timing is compared only within its
    round."""
    control: bool = False
    """True if it calibrates what the others are held against, and is not compared itself."""
    expected: dict[str, float] = field(default_factory=dict)
    """Metrics that are known before it runs, such as predicted_memory_bytes."""


@dataclass(frozen=True, repr=False)
class Trial:
    """A proposal, and what has become of it."""

    proposal: Proposal
    state: TrialState = TrialState.WAITING
    cause: Cause | None = None
    """What put it into its state; None before anything has, and for one that completed."""
    reason: str = ""
    """The cause in words, with its numbers, for people."""
    reused: Reuse | None = None
    """The study that measured it, where this one did not."""
    metrics: Metrics = field(default_factory=dict)
    rungs: dict[int, float | None] = field(default_factory=dict)
    """The objective's value at each rung reached."""
    paused_at: frozenset[int] = frozenset()
    """The rungs it has waited at."""
    promoted: frozenset[int] = frozenset()
    """The rungs it was let past."""
    history: tuple[Metrics, ...] = ()
    """The metrics of every evaluation."""
    earlier_tries: tuple[str, ...] = ()
    """How it ended before it was tried again, each time, for people."""
    interruptions: int = 0
    """How often its machine was taken away since its last evaluation."""
    seconds: float = 0.0
    """How long it has held a lane, by the wall clock."""
    holds: tuple[Hold, ...] = ()
    """When that was."""

    def __repr__(self) -> str:
        return f"<trial {self.id}: {self.state}>"

    @property
    def id(self) -> str:
        return self.proposal.id

    @property
    def stage(self) -> str:
        return self.proposal.stage

    @property
    def config(self) -> TrialConfig:
        return self.proposal.config

    @property
    def candidate(self) -> str:
        return self.proposal.candidate

    @property
    def role(self) -> str:
        return self.proposal.role

    @property
    def protected(self) -> bool:
        return self.proposal.protected

    @property
    def is_full_run(self) -> bool:
        """True if it trains from its own beginning and is evaluated on the way: such a run may be recommended."""
        return bool(self.config.evaluations) and self.config.branch_from is None

    def was_evaluated_at(self, samples_seen: float | None) -> bool:
        return any(point.get("samples_seen") == samples_seen for point in self.history)

    def curve(self, over: str) -> list[tuple[float, float]]:
        """Return (that figure, validation loss) of every evaluation that has both, in their order."""
        points = [(point.get(over), point.get("val_loss")) for point in self.history]
        return [(x, loss) for x, loss in points if x is not None and loss is not None]

    def metric(self, name: str) -> float | None:
        """Return the figure; None where it was not measured, or is not finite. Raises KeyError where there is no such metric."""
        metric_of(name)
        return self.metrics.get(name)

    def measured(self, name: str) -> float:
        """Return a figure that every trial of this kind and state has. Raises KeyError where there is no such metric."""
        value = self.metric(name)
        assert value is not None, f"{self.id} has no finite {name}"
        return value

    @property
    def explanation(self) -> str:
        """One line of the cause's code, the reason, the study that measured it, and how the try before this one ended; empty if
        there is nothing to say."""
        return self._explained(self._reason)

    @property
    def explanation_beside_state(self) -> str:
        """The explanation, to be read beside the state: without the cause's code where that is the state's own word."""
        return self._explained(self.reason if self._is_its_own_cause else self._reason)

    def _explained(self, reason: str) -> str:
        again = f"tried again; before it {self.earlier_tries[-1]}" if self.earlier_tries else ""
        reused = f"reused: measured on {self.reused.day} in {quoted(self.reused.run_dir)}" if self.reused else ""
        return "; ".join(filter(None, [reason, reused, again]))

    @property
    def how_it_ended(self) -> str:
        """Its state, and why, in a line."""
        if self._is_its_own_cause:
            return self._reason
        return f"{self.state}{self._reason and f' ({self._reason})'}"

    @property
    def how_it_ended_at(self) -> str:
        """How it ended, with its own last loss and the samples that it had seen, as far as these are known."""
        loss, samples = self.metric("val_loss"), self.metric("samples_seen")
        at = [
            f"after {samples:,.0f} samples" if samples else "",
            f"at val loss {metric_of('val_loss').number(loss)}" if loss is not None else "",
        ]
        return " ".join(filter(None, [self.how_it_ended, *at]))

    @property
    def _is_its_own_cause(self) -> bool:
        """As of what ran out of memory."""
        return self.cause is not None and self.cause.code == self.state

    @property
    def _reason(self) -> str:
        return f"{self.cause.code}: {self.reason}" if self.cause else self.reason
