"""In which forms can an effective batch be run, and which should be the fastest? Predicted from the points that the
frontier measured.

A form is a micro-batch size, accumulation steps and a mode. Accumulating is predicted to change nothing in samples/s: a
step of the frontier accumulates already, so its rate holds the optimizer's share of a step.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from orchestrator.stages.frontier.findings import FrontierFindings
from orchestrator.stages.mode import Mode
from trainers.config import Split


@dataclass(frozen=True)
class Form:
    """One way to run an effective batch."""

    split: Split
    mode: Mode
    samples_per_second: float
    """As predicted."""


@dataclass(frozen=True)
class Rate:
    """How fast an effective batch trains, in its fastest form."""

    micro_batch_size: int
    gradient_accumulation_steps: int
    effective_batch_size: int
    """Over all ranks."""
    mode: Mode
    samples_per_second: float
    """Over all ranks."""
    low: float
    high: float
    """The ends of its 95 % interval. What moves all forms of a round alike is left out: rates are only compared."""
    num_rounds: int
    """How often it was timed."""


def forms(frontier: FrontierFindings, effective_batch_size: int, world_size: int) -> list[Form]:
    """Return the forms of an effective batch whose micro-batch the frontier measured, the fastest first."""
    found = []
    for size, (mode, rate) in _fastest_modes(frontier).items():
        accumulation, rest = divmod(effective_batch_size, size * world_size)
        if accumulation and not rest:
            found.append(Form(Split(size, accumulation, world_size), mode, rate))
    return sorted(found, key=lambda form: (-form.samples_per_second, form.split.gradient_accumulation_steps))


def measured_sizes(frontier: FrontierFindings) -> Iterable[int]:
    """Return the micro-batch sizes whose rate is known, the smallest first."""
    return sorted(_fastest_modes(frontier))


def _fastest_modes(frontier: FrontierFindings) -> dict[int, tuple[Mode, float]]:
    """Return the fastest mode of each micro-batch size, with its samples/s."""
    fastest: dict[int, tuple[Mode, float]] = {}
    for point in frontier.measured:
        rate = point.samples_per_second
        if rate is not None and rate > fastest.get(point.micro_batch_size, (None, 0.0))[1]:
            fastest[point.micro_batch_size] = (point.mode, rate)
    return fastest
