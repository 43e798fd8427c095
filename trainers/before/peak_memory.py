"""Peak memory as a function of the micro-batch size: what it says of a limit.

What is alive at one moment of a training step grows by so many bytes per sample: a line. The peak is the highest of
these lines: the optimizer's moment where micro-batches are small, one of the backward's where they are large.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Line:
    base_bytes: float
    bytes_per_sample: float

    def bytes_at(self, micro_batch_size: int) -> float:
        return self.base_bytes + self.bytes_per_sample * micro_batch_size

    def reaches(self, limit_bytes: float) -> float:
        """Return the micro-batch size, with its fraction, at which the line comes to the limit."""
        return (limit_bytes - self.base_bytes) / self.bytes_per_sample

    def overtakes(self, flatter: Line) -> float:
        """Return the micro-batch size from which this steeper line is the higher one."""
        return (flatter.base_bytes - self.base_bytes) / (self.bytes_per_sample - flatter.bytes_per_sample)


@dataclass(frozen=True)
class PeakMemory:
    """Bytes above the idle process, as `peak_memory_bytes` of a run is measured."""

    lines: tuple[Line, ...]

    def bytes_at(self, micro_batch_size: int) -> float:
        return max(line.bytes_at(micro_batch_size) for line in self.lines)

    def largest_micro_batch_size(self, limit_bytes: float, largest: int) -> int:
        """Return the largest size up to `largest` that stays within the limit; 0 where one sample does not."""
        return bisect_right(range(1, largest + 1), limit_bytes, key=self.bytes_at)

    def raised_by(self, num_bytes: float) -> PeakMemory:
        """Return a peak that is higher by so many bytes at every micro-batch size."""
        return PeakMemory(tuple(Line(line.base_bytes + num_bytes, line.bytes_per_sample) for line in self.lines))


def peak_of(timelines: Mapping[int, Sequence[float]]) -> PeakMemory:
    """Return the peak from what was alive moment by moment of the same step: {size: bytes after each operation}, for
    two sizes.

    Exact at every size where both took the same operations. Where they did not, a line through the two peaks, and
    below it never less than the smaller one.
    """
    (small, before), (large, after) = sorted(timelines.items())
    if len(before) != len(after):
        lower, higher = max(before), max(after)
        return PeakMemory((Line(lower, 0.0), _through((small, lower), (large, higher))))
    pairs = set(zip(before, after, strict=True))
    return PeakMemory(highest(_through((small, a), (large, b)) for a, b in pairs))


def highest(lines: Iterable[Line]) -> tuple[Line, ...]:
    """Return the lines that are above all others at some micro-batch size, in the order of these sizes."""
    lines = list(lines)
    found = [max(lines, key=lambda line: (line.bytes_at(1), line.bytes_per_sample))]
    while steeper := [line for line in lines if line.bytes_per_sample > found[-1].bytes_per_sample]:
        now = found[-1]
        found.append(min(steeper, key=lambda line: (line.overtakes(now), -line.bytes_per_sample)))
    return tuple(found)


def _through(a: tuple[int, float], b: tuple[int, float]) -> Line:
    slope = max(0.0, (b[1] - a[1]) / (b[0] - a[0]))
    return Line(b[1] - slope * b[0], slope)
