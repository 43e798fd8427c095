"""What the branch stage hands on: the critical batch at every point, whether it grew, and which ramp won."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

from batchscout.orchestrator.config.stages import RampKind

Growth = Literal["grew", "stayed", "shrank", "undetermined"]


@dataclass(frozen=True)
class BranchLoss:
    """What the branches with one batch ended at, their seeds together."""

    effective_batch_size: int
    learning_rate: float
    val_loss: float | None
    """The mean of the seeds; None where one diverged."""
    excess: float | None
    """The mean over the seeds of its loss less that of the branch at 1 x, which took the same samples."""
    excess_error: float
    """The standard error of that."""
    comes_back: bool | None
    """True where the excess is within the seeds' spread, false where it is above, each with a probability of 0.9; None where
    the seeds cannot tell."""


@dataclass(frozen=True)
class PointFindings:
    """What the branches from one point of the chosen run say of the critical batch there."""

    samples_seen: int
    """Where they begin."""
    losses: tuple[BranchLoss, ...]
    """The smallest batch first, which is the chosen one."""
    low: int
    """The largest batch whose loss comes back, below every one whose loss does not."""
    high: int | None
    """The smallest batch whose loss does not, above every one whose loss does; None where there is none."""
    critical_batch_size: int | None
    """The critical batch, as far as the batches that were tried can say; None where it is undetermined."""


@dataclass(frozen=True)
class RampRun:
    """A ramp that was trained to its end."""

    kind: RampKind
    trial: str
    """Its first seed."""
    largest_batch: int
    """The effective batch of its last phase."""
    sample_budget: int
    val_loss: float
    score: float
    """Under the study's objective, the smaller the better."""


@dataclass(frozen=True)
class BranchFindings:
    STAGE: ClassVar[str] = "branch"

    source: str
    """The trial that was chosen before: branches begin from its weights, and ramps are compared with it."""
    points: tuple[PointFindings, ...]
    """The earliest first; none where the run is too short to branch from."""
    growth: Growth
    """Whether the critical batch grew from the first point to the last."""
    spread: float
    """The deviation of the difference of two runs' losses that differ in their seeds alone, by which a loss that comes back
    may be higher."""
    ramps: tuple[RampRun, ...] = ()
    """The best first."""
    winner: str | None = None
    """A trial: the first seed of the best ramp, where it beats the chosen run by more than the seeds' spread."""
