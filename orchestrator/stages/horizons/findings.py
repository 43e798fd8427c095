"""What the horizons stage hands on: which batch and learning rate the real run should have."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from batchscout.orchestrator.config.mode import Mode
from batchscout.orchestrator.stages.train import TimeGain


@dataclass(frozen=True)
class BatchAtLength:
    """What a batch would come to at the real run's length, at its best learning rate there."""

    effective_batch_size: int
    val_loss: float
    val_loss_low: float
    val_loss_high: float
    """With the ends of the 90 % interval."""
    p_best: float
    """The probability that it is the best: those of all batches add up to 1."""


@dataclass(frozen=True)
class HorizonsFindings:
    STAGE: ClassVar[str] = "horizons"

    samples: int
    """The samples of the real run: what the baseline would train on."""
    effective_batch_size: int
    """The batch to train with there."""
    learning_rate: float
    learning_rate_low: float
    learning_rate_high: float
    """The learning rate to train with there, and between what the batch's best one lies, with probability 0.9."""
    batches: tuple[BatchAtLength, ...]
    """The smallest first."""
    val_loss: float | None = None
    val_loss_low: float | None = None
    val_loss_high: float | None = None
    """What the setting ends at there, with the ends of the 90 % interval; None in earlier studies."""
    crossing_samples: float | None = None
    """From which length on, in samples of the baseline, this batch is likelier the best than the study's own answer; None where both are
    one."""
    regret_time: float | None = None
    """The share of the real run's training time that this wastes on average, against the best setting; None in earlier studies."""
    time: TimeGain | None = None
    """What it saves there against the user's own setting; None where it is that one, or that one diverged, and in earlier studies."""
    micro_batch_size: int | None = None
    gradient_accumulation_steps: int | None = None
    mode: Mode | None = None
    sample_budget: int | None = None
    """How the batch is split, in which mode it was timed, and the samples that it trains on in the real run's training time. None in
    earlier studies."""
    keeps_own: bool = False
    """True if it is the user's own setting: nothing else is shown to be better by a useful gain."""
