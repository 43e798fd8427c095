"""In which forms can an effective batch be run, and which should be the fastest? Predicted from the points that the
frontier measured.

A form is a micro-batch size, accumulation steps and a mode. Accumulating is predicted to change nothing in samples/s: a
step of the frontier accumulates already, so its rate holds a part of the optimizer's share of a step.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

from batchscout.orchestrator.config.mode import Mode
from batchscout.orchestrator.stages.estimates.timing import TIE
from batchscout.orchestrator.stages.frontier.findings import FrontierFindings
from batchscout.orchestrator.stages.probing import rate_at
from batchscout.trainers.config import Split

# A form that is predicted to be slower than the fastest by no more than this share is timed beside it.
WORTH_TIMING = 0.1
# A form that was timed once, and not in turns with others, may be off by this factor either way, as a 95 % interval.
# Paired timings on two shared cores lay between 0.86 and 1.05 of each other, and a point's accumulation is not the
# form's.
SINGLE_TIMING_FACTOR = 1.2

# Of the standard normal distribution, with 95 % between it and its negative.
NORMAL_QUANTILE = 1.96


@dataclass(frozen=True)
class Form:
    """One way to run an effective batch."""

    split: Split
    mode: Mode
    predicted: float
    """Samples/s."""
    is_measured: bool
    """True if the frontier has run this micro-batch size in this mode."""


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
    standard_error: float | None = None
    """Of its logarithm; None where one round was timed."""

    @property
    def deviation(self) -> float:
        """How well it is known, as the standard deviation of its logarithm."""
        wide = math.log(self.high / self.low) / (2 * NORMAL_QUANTILE)
        return wide if self.standard_error is None else self.standard_error


def rate_of(
    form: Form,
    rate: float,
    interval: tuple[float, float] | None = None,
    num_rounds: int = 1,
    standard_error: float | None = None,
) -> Rate:
    """Return the rate of a form. interval, standard_error: None where its rounds do not tell them."""
    low, high = interval or (rate / SINGLE_TIMING_FACTOR, rate * SINGLE_TIMING_FACTOR)
    split = form.split
    sizes = (split.micro_batch_size, split.gradient_accumulation_steps, split.effective_batch_size)
    return Rate(*sizes, form.mode, rate, low, high, num_rounds, standard_error)


def forms(frontier: FrontierFindings, effective_batch_size: int, world_size: int) -> list[Form]:
    """Return every form that fits of an effective batch, the fastest first; none if it is no multiple of world_size.

    What the frontier has run comes before what it has not, where they are about as fast: that is compiled already.
    """
    per_rank, rest = divmod(effective_batch_size, world_size)
    known = _rates_by_mode(frontier)
    largest = max((max(rates) for rates in known.values()), default=0)
    sizes = [] if rest else [size for size in range(1, min(per_rank, largest) + 1) if per_rank % size == 0]
    found = [_form(Split(size, per_rank // size, world_size), known) for size in sizes]
    return sorted(
        found, key=lambda form: (-form.predicted * (1 if form.is_measured else 1 - TIE), -form.split.micro_batch_size)
    )


def worth_timing(frontier: FrontierFindings, effective_batch_size: int, world_size: int) -> list[Form]:
    """Return the form that is predicted to be the fastest, and the next one that was measured if it is close to it."""
    ranked = forms(frontier, effective_batch_size, world_size)
    close = [one for one in ranked[1:] if one.is_measured and one.predicted >= (1 - WORTH_TIMING) * ranked[0].predicted]
    return ranked[:1] + close[:1]


def measured_sizes(frontier: FrontierFindings) -> Iterable[int]:
    """Return the micro-batch sizes whose rate is known, the smallest first."""
    return sorted({size for rates in _rates_by_mode(frontier).values() for size in rates})


def _form(split: Split, known: dict[Mode, dict[int, float]]) -> Form:
    """Return the form in the mode that should be the fastest, of those that hold the micro-batch."""
    size = split.micro_batch_size
    predicted = {mode: rate_at(rates, size) for mode, rates in known.items() if max(rates) >= size}
    mode = max(predicted, key=lambda mode: predicted[mode])
    return Form(split, mode, predicted[mode], size in known[mode])


def _rates_by_mode(frontier: FrontierFindings) -> dict[Mode, dict[int, float]]:
    """Return the samples/s of every micro-batch size, in every mode.

    What something else slowed down is at least as fast as the sizes beside it say. A variant that was faster is taken
    for all sizes, each as much faster as the one at which it was timed.
    """
    sound, slowed = _fastest_by_mode(frontier, disturbed=False), _fastest_by_mode(frontier, disturbed=True)
    known = {mode: dict(rates) for mode, rates in sound.items()}
    for mode, rates in slowed.items():
        for size, rate in rates.items():
            expected = rate_at(sound[mode], size) if mode in sound else 0.0
            known.setdefault(mode, {})[size] = max(rate, expected)
    return known


def _fastest_by_mode(frontier: FrontierFindings, *, disturbed: bool) -> dict[Mode, dict[int, float]]:
    known, taken = dict[Mode, dict[int, float]](), dict[str, Any](frontier.taken or {})
    for point in frontier.measured:
        if point.samples_per_second is None or point.disturbed != disturbed:
            continue
        mode = replace(point.mode, **taken)
        rate = point.samples_per_second * (1.0 if point.mode == mode else _gain(frontier))
        rates = known.setdefault(mode, {})
        rates[point.micro_batch_size] = max(rate, rates.get(point.micro_batch_size, 0.0))
    return known


def _gain(frontier: FrontierFindings) -> float:
    """Return how many times as fast the variant that was taken is as the same point without it; 1 where nobody said."""
    if not frontier.taken:
        return 1.0
    chosen, taken = frontier.chosen, frontier.taken
    others = [one for one in frontier.measured if one.point != chosen.point]
    with_it = ((one, replace(one.point, mode=replace(one.mode, **dict[str, Any](taken)))) for one in others)
    twin = next((one for one, point in with_it if point == chosen.point), None)
    rates = [one.samples_per_second if one else None for one in (chosen, twin)]
    return rates[0] / rates[1] if rates[0] and rates[1] else 1.0
