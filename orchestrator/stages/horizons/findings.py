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
    val_loss: float
    val_loss_low: float
    val_loss_high: float
    """What the setting ends at there, with the ends of the 90 % interval."""
    micro_batch_size: int
    gradient_accumulation_steps: int
    mode: Mode | None
    sample_budget: int
    """How the batch is split, in which mode it was timed (None: in the study file's), and the samples that it trains on in the real run's training time."""
    regret_time: float
    """The share of the real run's training time that this wastes on average, against the best setting."""
    time: TimeGain | None
    """What it saves there against the user's own setting; None where it is that one, or that one diverged."""
    crossing_samples: float | None
    """From which length on, in samples of the baseline, this batch is likelier the best than the study's own answer; None where both are
    one."""
    keeps_own: bool
    """True if it is the user's own setting: nothing else is shown to be better by a useful gain."""
