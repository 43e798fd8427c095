"""What runs of several lengths say of a longer one. Pure.

The loss that a batch ends at, over the length n of its whole run, is taken to be L(n) = floor + scale * n^-exponent
(Hoffmann et al. 2022, arXiv 2203.15556, with the model's size left as it is). All batches share the floor: what the model
cannot learn from any number of samples. Lengths are shares of the study's own.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from batchscout.orchestrator.stages.estimates.surface import Array

NUM_DRAWS = 2000
# Hoffmann et al. 2022 (arXiv 2203.15556) fit 0.28 for the exponent of a language model's loss over its tokens.
EXPONENT, EXPONENT_SPREAD = 0.3, 0.15
# The best learning rate of one batch follows a power of the length, whose exponent lies this near zero: what the Step Law
# (arXiv 2503.04715) says of rate and batch over the tokens leaves n^0.02 for a fixed batch under the square-root rule.
RATE_EXPONENT_SPREAD = 0.15


@dataclass(frozen=True)
class Ended:
    """What a run of some length ended at."""

    length: float
    """The run's length, as a share of the study's own."""
    loss: float
    deviation: float
    """How far the loss deviates from seed to seed."""


def losses_at(length: float, batches: Sequence[Sequence[Ended]], seed: int = 0) -> Array:
    """Return what each batch would end at after a run of this length: [draw, batch]. All losses must be positive.

    For a given floor and exponent the scale is the exact posterior of a linear model; the two are averaged over a grid,
    weighted by the evidence, and the floor is the same for all batches.
    """
    lowest = min(run.loss for runs in batches for run in runs)
    assert lowest > 0, "a floor lies between zero and the lowest loss"
    floors = lowest * np.linspace(0.0, 0.98, 50)
    exponents = np.linspace(0.04, 0.8, 39)
    log_prior = -(((exponents - EXPONENT) / EXPONENT_SPREAD) ** 2) / 2
    fits = [_fit(runs, floors, exponents) for runs in batches]
    log_evidence = [fit.log_evidence + log_prior for fit in fits]  # [floor, exponent]
    of_floor = sum(np.logaddexp.reduce(one, axis=1) for one in log_evidence)
    random = np.random.default_rng(seed)
    floor = random.choice(floors.size, size=NUM_DRAWS, p=_normalised(np.asarray(of_floor)))
    columns = []
    for fit, evidence in zip(fits, log_evidence, strict=True):
        exponent = np.array([random.choice(exponents.size, p=_normalised(evidence[one])) for one in floor])
        scale = fit.scale[floor, exponent] + fit.deviation[floor, exponent] * random.standard_normal(NUM_DRAWS)
        columns.append(floors[floor] + np.maximum(scale, 0.0) * length ** -exponents[exponent])
    return np.stack(columns, axis=1)


@dataclass(frozen=True)
class _Fit:
    """The scale for every floor and exponent: [floor, exponent]."""

    scale: Array
    deviation: Array
    log_evidence: Array


def _fit(runs: Sequence[Ended], floors: Array, exponents: Array) -> _Fit:
    lengths, losses, deviations = (
        np.array([getattr(run, name) for run in runs]) for name in ("length", "loss", "deviation")
    )
    basis = lengths[None, None, :] ** -exponents[None, :, None] / deviations
    target = (losses[None, None, :] - floors[:, None, None]) / deviations
    precision = np.broadcast_to((basis**2).sum(axis=-1), (floors.size, exponents.size))
    scale = (basis * target).sum(axis=-1) / precision
    misfit = ((target - scale[:, :, None] * basis) ** 2).sum(axis=-1)
    return _Fit(scale, 1 / np.sqrt(precision), -(misfit + np.log(precision)) / 2)


def _normalised(log_weights: Array) -> Array:
    weights = np.exp(log_weights - log_weights.max())
    return weights / weights.sum()


@dataclass(frozen=True)
class BestRate:
    """The log2 of the best learning rate of a run of some length, and its standard deviation."""

    length: float
    log2_rate: float
    deviation: float


def rate_at(length: float, known: BestRate, short: BestRate | None) -> BestRate:
    """Return the best rate of a run of this length, from that of the study's length and that of a shorter one."""
    drift, variance = 0.0, RATE_EXPONENT_SPREAD**2
    if short is not None:
        step = math.log2(known.length / short.length)
        measured = (known.log2_rate - short.log2_rate) / step
        of_measured = (known.deviation**2 + short.deviation**2) / step**2
        variance = 1 / (1 / variance + 1 / of_measured)
        drift = variance * measured / of_measured
    further = math.log2(length / known.length)
    deviation = math.sqrt(known.deviation**2 + further**2 * variance)
    return BestRate(length, known.log2_rate + further * drift, deviation)


def best_of_three(
    rate: float, factor: float, losses: tuple[float, float, float], deviation: float
) -> tuple[float, float]:
    """Return (log2 of the rate at the minimum of a parabola, its standard deviation).

    losses: at rate / factor, rate and rate * factor. Where they do not curve upwards the minimum is held to the side on
    which the loss is lower, one factor away, and known no better than that.
    """
    low, middle, high = losses
    step = math.log2(factor)
    curvature = (low + high - 2 * middle) / 2
    if curvature <= deviation:
        side = 0.0 if low == high else math.copysign(1.0, low - high)
        return math.log2(rate) + side * step, step
    offset = max(-2.0, min(2.0, (low - high) / (4 * curvature)))
    return math.log2(rate) + offset * step, step * deviation * math.sqrt(2) / (4 * curvature)
