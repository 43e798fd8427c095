"""Finds the largest micro-batch that fits, in a handful of probes: a line through the measured peaks says where to
look.

Pure: the probes so far go in; the next size comes out, or the answer with its evidence. Peak memory is nearly linear in
the micro-batch size (a constant for weights, gradients and optimizer state, and activations for every sample), so two
or three peaks put the limit within a few per cent. The line only tells where to look. The answer rests on probes: its
size fits, and the next larger one does not, or one within 2 % does not.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

from batchscout.trainers.before.peak_memory import Line

# An answer may be below the true limit by this share of it.
TOLERANCE = 0.02
# A limit that is predicted, or that lies further out than FAR times what fits, is approached from this far below: a
# size that runs gives a peak, a size that fails gives only a bound.
BELOW = 0.1
FAR = 4
# A probe looks no further than this factor past the largest size that fits.
FURTHEST = 16
# If the predicted size fails, the next one is this share of it; if that fails too, half.
AFTER_FAILED_PREDICTION = 0.75
# If a size fails that the line allows, the line is too low: the next size is this share of the way back to what fits.
BACK = 0.25
# Peaks of sizes within this share of the largest say little about the slope.
CLOSE = 0.1
# After so many probes of which all fitted, or all failed, the line is of no use.
PATIENCE = 8


@dataclass(frozen=True)
class Probe:
    """A size that was tried. One that ran, but into the headroom, does not fit and still has its peak."""

    micro_batch_size: int
    fits: bool
    peak_memory_bytes: float | None


@dataclass(frozen=True)
class Next:
    """The size to probe next, and why."""

    micro_batch_size: int
    reason: str


class EndedBy(Enum):
    MEMORY = "memory"
    LARGEST = "the largest size that was to be tried"
    BUDGET = "what the probes may take"


@dataclass(frozen=True)
class SearchEnd:
    """The search is over. micro_batch_size: the largest that fits; None where not even the smallest does."""

    micro_batch_size: int | None
    evidence: str
    ended_by: EndedBy = EndedBy.MEMORY


def next_probe(
    probes: Sequence[Probe],
    capacity_bytes: float | None,
    prediction: Line | None = None,
    *,
    smallest: int = 1,
    largest: int = 1024,
) -> Next | SearchEnd:
    """Return what to do after these probes, which are in the order they were made.

    capacity_bytes: the limit less its headroom; None if it is not known. prediction: the peak, predicted before any
    run.
    """
    fits, fails = _bounds(probes)
    if fails is not None and fails <= smallest:
        return SearchEnd(None, f"not even {smallest} fits")
    if fits is not None and fits >= largest:
        return SearchEnd(fits, f"{fits} fits", EndedBy.LARGEST)
    if fits is not None and fails is not None and fails - fits <= step_from(fits):
        return SearchEnd(fits, f"{fits} fits, {fails} {_how_it_fails(fails, probes, capacity_bytes)}")
    wanted = _wanted(probes, fits, fails, capacity_bytes, prediction)
    lowest = smallest if fits is None else fits + 1
    highest = largest if fails is None else fails - 1
    return Next(max(lowest, min(wanted.micro_batch_size, highest)), wanted.reason)


def _how_it_fails(size: int, probes: Sequence[Probe], capacity_bytes: float | None) -> str:
    peaks = [probe.peak_memory_bytes for probe in probes if probe.micro_batch_size == size]
    in_headroom = capacity_bytes is not None and any(peak is not None and peak > capacity_bytes for peak in peaks)
    return "leaves less than the headroom free" if in_headroom else "does not"


def _bounds(probes: Sequence[Probe]) -> tuple[int | None, int | None]:
    """Return (the largest size that fits below every failure, the smallest that does not)."""
    fails = min((p.micro_batch_size for p in probes if not p.fits), default=None)
    fitting = [p.micro_batch_size for p in probes if p.fits and (fails is None or p.micro_batch_size < fails)]
    return max(fitting, default=None), fails


def step_from(fits: int) -> int:
    """Return how close a failed size must be to prove that `fits` is the largest: the next size, or within 2 %."""
    return max(1, math.floor(TOLERANCE * fits))


def _wanted(
    probes: Sequence[Probe], fits: int | None, fails: int | None, capacity_bytes: float | None, prediction: Line | None
) -> Next:
    """Return the size to look at, before it is kept within the bounds."""
    if not probes:
        return _first(capacity_bytes, prediction)
    limit = None if capacity_bytes is None else limit_by_peaks(probes, capacity_bytes, prediction)
    if limit is None or _stalls(probes):
        return _without_a_line(fits, fails, guided=prediction is not None and len(probes) == 1)
    return _by_the_line(limit, probes, fits, fails)


def _first(capacity_bytes: float | None, prediction: Line | None) -> Next:
    if capacity_bytes is None or prediction is None or prediction.bytes_per_sample <= 0:
        return Next(2, "the smallest size whose peak grows with the batch")  # at 1 the optimizer's step may be the peak
    limit = prediction.reaches(capacity_bytes)
    return Next(math.floor((1 - BELOW) * limit), f"the predicted limit is {limit:.1f}; {BELOW:.0%} below it")


def _stalls(probes: Sequence[Probe]) -> bool:
    """True if the line leads nowhere: the last two probes have not halved the interval (after Brent 1973, chapter
    4)."""
    fitted, failed = _bounds(probes[:-2])
    fits, fails = _bounds(probes)
    if fits is None or fails is None:
        return len(probes) >= PATIENCE
    return fitted is not None and failed is not None and fails - fits > (failed - fitted) / 2


def _without_a_line(fits: int | None, fails: int | None, *, guided: bool) -> Next:
    """Return a size without the help of a line. guided: the size that failed was predicted."""
    if fails is None:
        assert fits is not None
        return Next(2 * fits, f"twice {fits}, which fits")
    if fits is None:
        share = AFTER_FAILED_PREDICTION if guided else 0.5
        return Next(math.floor(share * fails), f"{share:.0%} of {fails}, which does not fit")
    return Next((fits + fails) // 2, f"between {fits}, which fits, and {fails}, which does not")


def _by_the_line(limit: float, probes: Sequence[Probe], fits: int | None, fails: int | None) -> Next:
    measured = ", ".join(str(size) for size, _ in sorted(_measured(probes)))
    says = f"the line through {measured} puts the limit at {limit:.1f}"
    if fails is not None and limit >= fails:
        back = max(step_from(fails), BACK * (fails - (fits or 0)))
        return Next(math.floor(fails - back), f"{says}, but {fails} does not fit")
    if fits is None:
        return Next(math.floor(limit), says)
    if limit > FAR * fits:
        return Next(min(math.floor((1 - BELOW) * limit), FURTHEST * fits), f"{says}, far out: below it")
    if limit < fits + step_from(fits):
        return Next(fits + step_from(fits), f"{says}: whether {fits} is the largest")
    # Half a step below the limit: the size one step on, which must fail to prove this one, is then half a step above
    # it.
    return Next(math.floor(limit - (step_from(math.floor(limit)) - 1) / 2), says)


def limit_by_peaks(probes: Sequence[Probe], capacity_bytes: float, prediction: Line | None) -> float | None:
    """Return the size, with its fraction, at which the last measured peaks reach the capacity; None if they do not
    grow.

    Several peaks give the slope by least squares, and the line goes through the one nearest to the capacity. A single
    peak scales the prediction's slope. Without a prediction all of its memory is taken to grow with the batch: that is
    too steep if anything, and is capped so that, if the size fits, at least twice that size is tried next.
    """
    points = _measured(probes)
    if not points:
        return None
    size, peak = min(points, key=lambda point: abs(capacity_bytes - point[1]))
    if len(points) > 1:
        slope = _slope(points)
    elif prediction is not None and prediction.bytes_per_sample > 0:
        slope = prediction.bytes_per_sample * peak / (prediction.base_bytes + prediction.bytes_per_sample * size)
    else:
        slope = min(peak, capacity_bytes - peak) / size if peak < capacity_bytes else peak / size
    return size + (capacity_bytes - peak) / slope if slope > 0 else None


def _measured(probes: Sequence[Probe]) -> list[tuple[int, float]]:
    """Return (size, peak) of the last three probes that ran, and of more if those three are close to each other.

    Size 1 counts only if there are not two others: at size 1 the peak may be the optimizer's step.
    """
    points = [(p.micro_batch_size, p.peak_memory_bytes) for p in probes if p.peak_memory_bytes is not None]
    from_two = [point for point in points if point[0] >= 2]
    points = from_two if len(from_two) >= 2 else points
    count = min(3, len(points))
    while count < len(points) and min(points[-count:])[0] > (1 - CLOSE) * max(points[-count:])[0]:
        count += 1
    return points[-count:]


def _slope(points: list[tuple[int, float]]) -> float:
    mean_size = sum(size for size, _ in points) / len(points)
    mean_peak = sum(peak for _, peak in points) / len(points)
    spread = sum((size - mean_size) ** 2 for size, _ in points)
    return sum((size - mean_size) * (peak - mean_peak) for size, peak in points) / spread
