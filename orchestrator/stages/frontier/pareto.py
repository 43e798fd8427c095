"""Speed against memory: which points no other beats in both, and where more memory stops paying.

Pure: values in, values out.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Point:
    name: str
    tokens_per_second: float
    peak_memory_bytes: float


def pareto_front(points: Sequence[Point]) -> list[Point]:
    """Return the points that no other beats in speed or memory while it equals or beats them in the other; by
    memory."""
    front: list[Point] = []
    for point in sorted(points, key=lambda one: (one.peak_memory_bytes, -one.tokens_per_second)):
        if not front or point.tokens_per_second > front[-1].tokens_per_second:
            front.append(point)
    return front


def knee(front: Sequence[Point]) -> Point | None:
    """Return the point from which more memory stops paying; None for a front without a bend.

    It is the furthest above the line from the front's first point to its last (Satopaa et al. 2011, "Finding a
    'Kneedle' in a Haystack").
    """
    if len(front) < 3:
        return None
    first, last = front[0], front[-1]
    bytes_range = last.peak_memory_bytes - first.peak_memory_bytes
    rate_range = last.tokens_per_second - first.tokens_per_second

    def above(point: Point) -> float:
        gained = (point.tokens_per_second - first.tokens_per_second) / rate_range
        return gained - (point.peak_memory_bytes - first.peak_memory_bytes) / bytes_range

    bend = max(front, key=above)
    return bend if above(bend) > 0 else None
