"""The largest micro-batch that fits, in a handful of probes: a line through the measured peaks says where to look next.

Pure: from the probes so far to the next size, or to the answer with its evidence. Memory is nearly a line in the
micro-batch size (weights, gradients and optimizer state, and activations for every sample), so two or three peaks put
the limit within a few per cent; what the line says is only ever where to look. The answer rests on probes: its size
fits, and the next one (or one within 2 %) does not.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

# An answer may be below the true limit by this share of it.
TOLERANCE = 0.02
# The first probe stays below the predicted limit by this share: a size that runs measures, one that fails only bounds.
BELOW_PREDICTION = 0.1
# Looking further than this factor past the largest size that fits, stay below what the line says by BELOW_EXTRAPOLATION.
FAR = 4
BELOW_EXTRAPOLATION = 0.1
# From this many probes on the line has not converged, and the interval is halved.
PROBES_BY_THE_LINE = 6


@dataclass(frozen=True)
class Probe:
    """A size that was tried. One that ran, but into the headroom, does not fit and still has its peak."""

    micro_batch_size: int
    fits: bool
    peak_memory_bytes: float | None


@dataclass(frozen=True)
class Line:
    """Peak memory of a micro-batch: base_bytes + bytes_per_sample * size."""

    base_bytes: float
    bytes_per_sample: float

    def limit_at(self, capacity_bytes: float) -> float:
        """The size, with its fraction, at which the line reaches the capacity."""
        return (capacity_bytes - self.base_bytes) / self.bytes_per_sample


@dataclass(frozen=True)
class Next:
    """The size to probe next, and why."""

    micro_batch_size: int
    reason: str


@dataclass(frozen=True)
class Found:
    """The search is over. micro_batch_size: the largest that fits; None where not even the smallest does."""

    micro_batch_size: int | None
    evidence: str


def next_probe(
    probes: Sequence[Probe],
    capacity_bytes: float | None,
    prediction: Line | None = None,
    *,
    smallest: int = 1,
    largest: int = 1024,
) -> Next | Found:
    """What to do after these probes, in the order they were made.

    capacity_bytes: the limit less its headroom, None where it is not known. prediction: of the peak before anything ran.
    """
    fails = min((p.micro_batch_size for p in probes if not p.fits), default=None)
    fits = max(
        (p.micro_batch_size for p in probes if p.fits and (fails is None or p.micro_batch_size < fails)), default=None
    )
    if fails is not None and fails <= smallest:
        return Found(None, f"not even {smallest} fits")
    if fits is not None and fits >= largest:
        return Found(fits, f"{fits} is the largest asked for, and fits")
    if fits is not None and fails is not None and fails - fits <= step_from(fits):
        return Found(fits, f"{fits} fits, {fails} does not")
    wanted = _wanted(probes, fits, fails, capacity_bytes, prediction)
    lowest = smallest if fits is None else fits + 1
    highest = largest if fails is None else fails - 1
    return Next(max(lowest, min(wanted.micro_batch_size, highest)), wanted.reason)


def step_from(fits: int) -> int:
    """The distance to a failed size that certifies `fits`: the next size, or 2 %."""
    return max(1, math.floor(TOLERANCE * fits))


def _wanted(
    probes: Sequence[Probe], fits: int | None, fails: int | None, capacity_bytes: float | None, prediction: Line | None
) -> Next:
    """The size to look at, before the bounds are put on it."""
    line = None if capacity_bytes is None else line_through(probes, prediction)
    if not probes:
        return _first(capacity_bytes, prediction)
    if len(probes) >= PROBES_BY_THE_LINE or line is None or capacity_bytes is None:
        return _without_a_line(fits, fails)
    return _by_the_line(line, line.limit_at(capacity_bytes), probes, fits, fails)


def _first(capacity_bytes: float | None, prediction: Line | None) -> Next:
    if capacity_bytes is None or prediction is None or prediction.bytes_per_sample <= 0:
        return Next(2, "the smallest size whose peak grows with the batch")  # at 1 the optimizer's step may be the peak
    limit = prediction.limit_at(capacity_bytes)
    return Next(math.floor((1 - BELOW_PREDICTION) * limit), f"predicted limit {limit:.1f}, less {BELOW_PREDICTION:.0%}")


def _without_a_line(fits: int | None, fails: int | None) -> Next:
    if fails is None:
        assert fits is not None
        return Next(2 * fits, f"twice {fits}, which fits")
    if fits is None:
        return Next(fails // 2, f"half of {fails}, which does not fit")
    return Next((fits + fails) // 2, f"between {fits}, which fits, and {fails}, which does not")


def _by_the_line(line: Line, limit: float, probes: Sequence[Probe], fits: int | None, fails: int | None) -> Next:
    says = f"the line through {_sizes_text(probes)} puts the limit at {limit:.1f}"
    if fails is not None and limit >= fails:
        # The allocator refused less than the line says: 1, 2, 4 ... steps back from what failed.
        refused = sum(not p.fits and p.peak_memory_bytes is None and p.micro_batch_size <= limit for p in probes)
        back = step_from(fails) * 2 ** max(0, refused - 1)
        lowest = (fits + fails) // 2 if fits is not None else fails // 2
        return Next(max(lowest, fails - back), f"{says}, but {fails} does not fit")
    if fits is None:
        return Next(math.floor(limit), says)
    if limit > FAR * fits:
        return Next(math.floor((1 - BELOW_EXTRAPOLATION) * limit), f"{says}, less {BELOW_EXTRAPOLATION:.0%} so far out")
    if limit < fits + step_from(fits):
        return Next(fits + step_from(fits), f"{says}: whether {fits} is the largest")
    # Half a step short of it, so that the size one step on, which certifies this one, is as far on the other side.
    return Next(math.floor(limit - (step_from(math.floor(limit)) - 1) / 2), says)


def line_through(probes: Sequence[Probe], prediction: Line | None) -> Line | None:
    """The least-squares slope of the last three measured peaks, through the largest; None where they show no growth.

    One peak alone takes the prediction's slope in proportion, or else all of its memory as growing with the batch,
    which is at most too steep. Size 1 counts only where there is nothing better: the optimizer's step may be its peak.
    """
    points = _measured(probes)
    if not points:
        return None
    size, peak = max(points)
    if len(points) > 1:
        slope = _slope(points)
    elif prediction is not None and prediction.bytes_per_sample > 0:
        slope = prediction.bytes_per_sample * peak / (prediction.base_bytes + prediction.bytes_per_sample * size)
    else:
        slope = peak / size
    return Line(peak - slope * size, slope) if slope > 0 else None


def _measured(probes: Sequence[Probe]) -> list[tuple[int, float]]:
    """(size, peak) of the last three that ran."""
    points = [(p.micro_batch_size, p.peak_memory_bytes) for p in probes if p.peak_memory_bytes is not None]
    from_two = [point for point in points if point[0] >= 2]
    return (from_two if len(from_two) >= 2 else points)[-3:]


def _slope(points: list[tuple[int, float]]) -> float:
    mean_size = sum(size for size, _ in points) / len(points)
    mean_peak = sum(peak for _, peak in points) / len(points)
    spread = sum((size - mean_size) ** 2 for size, _ in points)
    return sum((size - mean_size) * (peak - mean_peak) for size, peak in points) / spread


def _sizes_text(probes: Sequence[Probe]) -> str:
    return " and ".join(str(size) for size, _ in sorted(_measured(probes)))
