"""What the horizons stage hands on: which batch and learning rate the real run should have."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar


@dataclass(frozen=True)
class BatchAtLength:
    """What a batch would come to at the real run's length."""

    effective_batch_size: int
    val_loss: float
    val_loss_low: float
    val_loss_high: float
    """With the ends of the 90 % interval."""
    p_best: float
    """The probability that the other batch ends no lower."""


@dataclass(frozen=True)
class HorizonsFindings:
    STAGE: ClassVar[str] = "horizons"

    samples: int
    """The samples of the real run: what the baseline would train on."""
    effective_batch_size: int
    """The batch that is likelier to end lower there."""
    learning_rate: float
    learning_rate_low: float
    learning_rate_high: float
    """The best rate of the study's batch there, with the ends of the 90 % interval. Another batch has the scaling rule's
    share of it."""
    batches: tuple[BatchAtLength, ...]
    """The smallest first."""
    crossing_samples: float | None = None
    """Where the curves of the two batches cross, in samples of the baseline; None if they do not within the real run."""
