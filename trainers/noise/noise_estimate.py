"""From the norms of micro-gradients to the gradient noise scale and its interval. Loads no torch.

With g_k the mean gradient of one micro-batch of b samples, A of them in a step, gbar their mean and B = bA samples:

    S     = (mean |g_k|^2 - |gbar|^2) / (1/b - 1/B)          trace of the per-sample gradient covariance
    |G|^2 = (B |gbar|^2 - b mean |g_k|^2) / (B - b)           squared norm of the true gradient
    B_simple = S / |G|^2      McCandlish et al. 2018, arXiv 1812.06162, appendix A.1

Both are unbiased; their ratio per step is not, so S and |G|^2 are added up apart and divided once. Where the numbers of
targets differ, every mean is weighted by them, over the micro-batches and over the steps: S of a step is that of one
target, so S times the step's targets is what adds up.

The interval is Fieller's, of the inverse |G|^2 / S (Fieller 1954; von Luxburg and Franz 2009, arXiv 0710.2024): all
ratios r for which the steps' |G|^2 - r S have a mean that Student's t cannot tell from 0. It never divides by S, which of
few steps of two micro-batches is a noisy number too. From 20 steps on a jackknife of the inverse is as good; with 5 it
covers 92 % where Fieller's covers 96 %, and with a normal value in place of Student's t 85 %.

What norms cannot tell. Samples of a micro-batch that resemble each other (duplicates, neighbours in one document) raise
S: the noise scale found is that of batches drawn in this way, twice the truth where every sample comes twice. What all
micro-batches of one step have in common and others do not (the same shard, the same topic) looks like signal: the noise
scale comes out too low, ten times where that is a quarter of the variance. No norm within a step shows it; only samples
drawn in a shuffled order, as `batchscout.trainers.data.order` draws them, keep it away.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from batchscout.trainers.noise.student_t import t_quantile


class SquaredNorms(NamedTuple):
    """The squared norms of one step's gradients."""

    mean_square: float
    """The mean of |g_k|^2 over the micro-batches, weighted by their targets."""
    square_of_mean: float
    """|gbar|^2."""
    num_targets: float = 1.0
    """The targets of the whole step. Only their ratio between steps matters."""


@dataclass(frozen=True)
class NoiseEstimate:
    """In samples. None where the run cannot tell: one micro-batch and one rank, or too few steps."""

    coherence: float | None = None
    coherence_floor: float | None = None
    """What the coherence of pure noise stays below in absolute value, in 95 % of all cases: Student's t times the error
    of the coherence's mean over the steps. It is not what one sees of noise on average, which is 0 for every number of
    micro-batches. For k of them it falls as 1 / sqrt(k (k - 1)), and as one over the root of the number of steps. Beside
    a strong signal, whose own part of that error it holds too, it is higher than pure noise would have it."""
    noise_scale: float | None = None
    noise_scale_low: float | None = None
    noise_scale_high: float | None = None
    gradient_snr: float | None = None
    """The signal to noise of the whole step's gradient: |G|^2 over the variance of its estimate, effective batch / noise scale."""
    inverse_noise_scale: float | None = None
    """|G|^2 / S, negative by chance where there is much noise. Estimates of several runs are averaged on this scale."""
    inverse_noise_scale_error: float | None = None
    """Its standard error."""
    inverse_noise_scale_steps: int | None = None
    """The steps that it comes from."""


def estimate_noise(steps: Iterable[SquaredNorms], micro_batch_size: int, num_micro_batches: int) -> NoiseEstimate:
    """Estimate from several steps of so many micro-batches. It needs two micro-batches a step, and for intervals two
    steps."""
    steps = [step for step in steps if math.isfinite(step.mean_square) and math.isfinite(step.square_of_mean)]
    if num_micro_batches < 2 or not steps:
        return NoiseEstimate()
    signal, noise = signal_and_noise(steps, micro_batch_size, num_micro_batches)
    scale, low, high = _noise_scale(signal, noise)
    inverse, error = _inverse(signal, noise)
    coherence, floor = _coherence(steps, num_micro_batches)
    effective_batch_size = micro_batch_size * num_micro_batches
    return NoiseEstimate(
        coherence=coherence,
        coherence_floor=floor,
        noise_scale=scale,
        noise_scale_low=low,
        noise_scale_high=high,
        gradient_snr=effective_batch_size / scale if scale else None,
        inverse_noise_scale=inverse,
        inverse_noise_scale_error=error,
        inverse_noise_scale_steps=len(steps),
    )


def _coherence(steps: Sequence[SquaredNorms], count: int) -> tuple[float, float | None]:
    """Return (how far pairs of micro-gradients agree, from norms alone: 1 if equal, 0 on average for noise; the error
    of that mean). It is a U-statistic over all pairs of a step."""
    whole = _agreement(mean_of([s.mean_square for s in steps]), mean_of([s.square_of_mean for s in steps]), count)
    each = [_agreement(step.mean_square, step.square_of_mean, count) for step in steps]
    if len(each) < 2:
        return whole, None
    return whole, t_quantile(len(each) - 1) * math.sqrt(_covariance(each, each) / len(each))


def _agreement(mean_square: float, square_of_mean: float, count: int) -> float:
    if mean_square == 0:
        return 0.0
    return (count * square_of_mean - mean_square) / ((count - 1) * mean_square)


def _noise_scale(signal: Sequence[float], noise: Sequence[float]) -> tuple[float | None, float | None, float | None]:
    """Return (B_simple, low, high) in samples. high is None where it is unbounded, low where nothing is known."""
    total_signal, total_noise = sum(signal), sum(noise)
    if total_noise <= 0:
        return (0.0, None, None)
    point = total_noise / total_signal if total_signal > 0 else None
    lower, upper = interval_of_ratio(signal, noise)
    return (point, 1 / upper if 0 < upper < math.inf else None, 1 / lower if lower > 0 else None)


def _inverse(signal: Sequence[float], noise: Sequence[float]) -> tuple[float | None, float | None]:
    """Return (|G|^2 / S, its standard error) of as many steps."""
    if sum(noise) <= 0:
        return None, None
    inverse = sum(signal) / sum(noise)
    if len(noise) < 2:
        return inverse, None
    rest = [g - inverse * s for g, s in zip(signal, noise, strict=True)]
    return inverse, math.sqrt(_covariance(rest, rest) / len(rest)) / mean_of(noise)


def signal_and_noise(
    steps: Iterable[SquaredNorms], micro_batch_size: int, count: int
) -> tuple[list[float], list[float]]:
    """Return (|G|^2 of each step, S of each), both times its number of targets. Each alone may be negative."""
    b, big_b = micro_batch_size, micro_batch_size * count
    signal = [n * (big_b * big - b * small) / (big_b - b) for small, big, n in steps]
    noise = [n * (small - big) / (1 / b - 1 / big_b) for small, big, n in steps]
    return signal, noise


def interval_of_ratio(numerators: Sequence[float], denominators: Sequence[float]) -> tuple[float, float]:
    """Return Fieller's 95 % interval of the ratio of their means; the pairs are independent of each other.

    It is (-inf, inf) for fewer than two pairs, and where even the sign of the denominators' mean is uncertain.
    """
    n = len(numerators)
    if n < 2:
        return -math.inf, math.inf
    above, below, g = mean_of(numerators), mean_of(denominators), t_quantile(n - 1) ** 2 / n
    a = below**2 - g * _covariance(denominators, denominators)
    b = above * below - g * _covariance(numerators, denominators)
    c = above**2 - g * _covariance(numerators, numerators)
    if a <= 0:
        return -math.inf, math.inf
    half = math.sqrt(max(0.0, b * b - a * c))
    return (b - half) / a, (b + half) / a


def mean_of(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def _covariance(first: Sequence[float], second: Sequence[float]) -> float:
    mean_1, mean_2 = mean_of(first), mean_of(second)
    return sum((x - mean_1) * (y - mean_2) for x, y in zip(first, second, strict=True)) / (len(first) - 1)
