"""What the throughput stage hands on: the rate of every effective batch, and the noise scale."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

from batchscout.orchestrator.stages.forms import Rate
from batchscout.orchestrator.stages.input_bound import InputBound


@dataclass(frozen=True)
class ThroughputFindings:
    STAGE: ClassVar[str] = "throughput"

    critical_batch_size: float | None
    """The noise scale in samples; None if it is undetermined."""
    critical_batch_size_low: float | None
    critical_batch_size_high: float | None
    """The ends of its 95 % interval; the upper end is None if it is unbounded."""
    goodput: dict[int, float]
    """Goodput by effective batch, relative to the best."""
    rates: tuple[Rate, ...] = ()
    """How fast every effective batch trains in its fastest form, the smallest first."""
    goodput_ends: dict[int, tuple[float, float]] = field(default_factory=dict)
    """The least and the most that a goodput can be within the intervals of noise scale and rate."""
    busy: bool = False
    """True if something else had the machine while the batches were timed."""
    input_bound: InputBound | None = None
    """How the steps of the fastest batch waited for data; None where they hardly did."""
