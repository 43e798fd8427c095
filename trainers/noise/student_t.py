"""Student's t: how many standard errors an interval must reach where the error itself comes from a few values."""

from __future__ import annotations

import functools
import math


@functools.cache
def t_quantile(degrees_of_freedom: int, probability: float = 0.975) -> float:
    """Return what Student's t stays below with this probability (0.5 or more); of 0.975 it is half a 95 % interval.

    With 4 degrees of freedom it is 2.78, where a normal value's is 1.96. Raises ValueError without a degree of freedom.
    """
    if degrees_of_freedom < 1:
        raise ValueError(f"Student's t needs 1 degree of freedom, and has {degrees_of_freedom}; measure more steps")
    low, high = 0.0, 1.0
    while _probability_below(high, degrees_of_freedom) < probability:
        low, high = high, 2 * high
    while high - low > 1e-12 * high:
        middle = (low + high) / 2
        below = _probability_below(middle, degrees_of_freedom) < probability
        low, high = (middle, high) if below else (low, middle)
    return high


def _probability_below(t: float, degrees: int) -> float:
    """Return P(T < t) for t >= 0, by the finite series for whole degrees of freedom (Abramowitz and Stegun, Handbook of
    Mathematical Functions, 26.7.3 and 26.7.4)."""
    angle = math.atan(t / math.sqrt(degrees))
    cosine_square, odd = math.cos(angle) ** 2, degrees % 2
    term = math.cos(angle) if odd else 1.0
    total = term if degrees > 1 else 0.0
    for k in range(2 + odd, degrees - 1, 2):
        term *= cosine_square * (k - 1) / k
        total += term
    within = math.sin(angle) * total
    return 0.5 + (angle + within) / math.pi if odd else 0.5 + within / 2
