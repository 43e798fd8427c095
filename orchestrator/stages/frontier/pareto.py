"""Speed against memory: which points no other beats in both, where more memory stops paying, and what is a tie.

Pure: values in, values out.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

# Rates whose median ratio is within this share are a tie, however often they were timed.
TIE = 0.02

Name = TypeVar("Name")


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


def fastest(rounds: Mapping[Name, Sequence[float]]) -> list[Name]:
    """Return the names that tie for the most tokens/s, the best first. rounds: the rates of each name in round 1, 2,
    ...

    Ratios are taken within a round, in which the machine's other load is much the same. Two names tie if their median
    ratio is within TIE, or if more than a quarter of the rounds put them in the other order.
    """
    best = max(rounds, key=lambda name: statistics.median(rounds[name]))
    ratios = {name: [a / b for a, b in zip(rates, rounds[best], strict=True)] for name, rates in rounds.items()}
    tied = [name for name, found in ratios.items() if statistics.median(found) >= 1 - TIE or _share_won(found) > 1 / 4]
    return sorted(tied, key=lambda name: -statistics.median(ratios[name]))


def _share_won(ratios: Sequence[float]) -> float:
    return sum(ratio >= 1 for ratio in ratios) / len(ratios)
