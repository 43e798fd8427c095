"""What the frontier hands on: the choice, the sizes around it, and the front of speed against memory."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from batchscout.orchestrator.config.mode import Mode
from batchscout.orchestrator.stages.estimates.timing import Order, Ratio
from batchscout.orchestrator.stages.frontier.pareto import Point
from batchscout.orchestrator.stages.input_bound import InputBound
from batchscout.orchestrator.stages.probing import fastest_by_size
from batchscout.orchestrator.units import exact_text


@dataclass(frozen=True)
class OperatingPoint:
    """A micro-batch size in a mode: what is probed, timed, verified and chosen."""

    mode: Mode
    micro_batch_size: int

    def __str__(self) -> str:
        return f"{self.mode}-m{self.micro_batch_size}"


@dataclass(frozen=True)
class MeasuredPoint:
    """An operating point with its rate, and the most memory that any of its trials took."""

    mode: Mode
    micro_batch_size: int
    tokens_per_second: float
    peak_memory_bytes: float
    samples_per_second: float | None = None
    """Over all ranks; None in the findings of earlier versions."""
    disturbed: bool = False
    """True if something else was at work whenever it was timed: it is faster than that, nobody knows by how much."""
    input_bound: InputBound | None = None
    """How its steps waited for data; None where they hardly did."""

    @property
    def point(self) -> OperatingPoint:
        return OperatingPoint(self.mode, self.micro_batch_size)


@dataclass(frozen=True)
class LengthFindings:
    """What samples of another length cost."""

    seq_len: int
    fastest: MeasuredPoint
    largest_micro_batch_size: int
    """The largest that fits, in whatever mode."""


@dataclass(frozen=True)
class Rival:
    """A point that was timed in turns with the chosen one."""

    point: OperatingPoint
    ratio: Ratio
    """How many times as fast it is as the chosen one."""
    order: Order


@dataclass(frozen=True)
class Quality:
    """What a knob that changes the loss did to it, over the same samples as without."""

    loss: float | None
    """At the end of the run with the knob; None where it had none, since it diverged or failed."""
    without: float
    """Of the same run without it."""
    tolerance: float
    """How much higher it may be."""

    @property
    def passed(self) -> bool:
        return self.loss is not None and self.loss <= self.without + self.tolerance

    def __str__(self) -> str:
        end = "no loss" if self.loss is None else f"{exact_text(self.loss)}"
        return f"val loss {end} against {exact_text(self.without)}, and at most {exact_text(self.tolerance)} more is within what seeds vary"


@dataclass(frozen=True)
class KnobFindings:
    """A memory knob, or a pair of them, against accumulation in the same memory."""

    memory_knobs: tuple[str, ...]
    fastest: OperatingPoint
    """The fastest point with them."""
    tokens_per_second: float
    peak_memory_bytes: float
    accumulated: OperatingPoint | None
    """The fastest point without them; None where nothing fits without."""
    accumulation_steps: int
    """In so many of its micro-batches are at least as many samples as in one with the knobs."""
    accumulated_tokens_per_second: float | None
    quality: Quality | None = None
    """None of knobs that change no loss, and of those that do but were not checked."""

    @property
    def is_faster(self) -> bool:
        """True if it beats accumulation."""
        return self.tokens_per_second > (self.accumulated_tokens_per_second or 0.0)


@dataclass(frozen=True)
class FrontierFindings:
    STAGE: ClassVar[str] = "frontier"

    chosen: MeasuredPoint
    """The fastest inside the limit and its headroom."""
    winner: str
    """The trial that verified it in a fresh process."""
    limit_bytes: int | None
    """None if no limit is known."""
    baseline: OperatingPoint
    """The smallest that fits."""
    largest: MeasuredPoint
    fitting: tuple[int, ...]
    """The micro-batch sizes that fit in the chosen mode."""
    front: tuple[Point, ...]
    """The points that no other beats in both speed and memory, by memory."""
    knee: str | None
    """The point of the front from which more memory stops paying."""
    other_lengths: tuple[LengthFindings, ...] = ()
    measured: tuple[MeasuredPoint, ...] = ()
    """Every point that fits, with samples as long as the data says."""
    rivals: tuple[Rival, ...] = ()
    """The fastest first; empty if nothing was timed in turns."""
    taken: dict[str, str] | None = None
    """The field of a mode, and its value, that was timed at the chosen size alone and is taken for all sizes; empty where
    each mode was probed as it is. None in the findings of earlier versions."""
    knobs: tuple[KnobFindings, ...] = ()
    """The memory knobs that fitted, in the order in which they were tried."""
    disturbed: tuple[str, ...] = ()
    """The trials that something else on the machine slowed down: their figures are not kept for later studies."""

    @property
    def rates(self) -> dict[int, float]:
        """The most samples/s, over all ranks, that each micro-batch size that fits reached in any mode."""
        return fastest_by_size((one.micro_batch_size, one.samples_per_second) for one in self.measured)
