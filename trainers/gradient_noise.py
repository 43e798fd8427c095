"""How much of the gradient is signal: pairwise coherence, and the gradient noise scale with its interval.

With g_k the mean gradient of one micro-batch of b samples, A of them in a step, gbar their mean and B = bA samples:

    S     = (mean |g_k|^2 - |gbar|^2) / (1/b - 1/B)          trace of the per-sample gradient covariance
    |G|^2 = (B |gbar|^2 - b mean |g_k|^2) / (B - b)           squared norm of the true gradient
    B_simple = S / |G|^2      McCandlish et al. 2018, arXiv 1812.06162, appendix A.1

Both are unbiased; their ratio per step is not, so S and |G|^2 are averaged apart and divided once.
Where the numbers of targets differ, the mean of |g_k|^2 is weighted by them: only then are both still unbiased.
Only norms are needed: no gradient is stored. Everything stays on the device until an interval is read.
"""

from __future__ import annotations

import itertools
import math
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn

Z_95 = 1.96
# To measure a micro-gradient is a pass over it, which slows a small model's step. A long run has more steps than the
# estimate needs: after the first ones it measures one in so many.
FIRST_STEPS, THEN_ONE_IN = 100, 5
# The noise scale grows as the loss falls, so a long run estimates it from the last so many steps that it has measured.
RECENT_STEPS = 1000


class MicroGradientNorms:
    """Measures each micro-batch's own gradient: hooks on the leaves run before accumulation, and before ranks
    exchange it."""

    def __init__(self, parameters: list[nn.Parameter], world_size: int = 1) -> None:
        """parameters: as `trainers.parallel.leaves_of` finds them."""
        self._looks, self._follows_sum = True, False
        self._parameters, self._world_size = parameters, world_size
        self._norms: list[Tensor] = []
        self._weighted_squares: list[Tensor] = []
        self._lengths: list[Tensor] = []
        for parameter in parameters:
            parameter.register_hook(self._see)

    def begin_step(self, number: int, *, follow_sum: bool) -> None:
        """number: the step's, from 1. follow_sum: true to measure also the sum of the micro-gradients as it grows."""
        self._looks = number <= FIRST_STEPS or number % THEN_ONE_IN == 0
        self._follows_sum = follow_sum

    def _see(self, gradient: Tensor) -> None:
        if self._looks:
            self._norms.append(torch.linalg.vector_norm(gradient.detach(), dtype=torch.float32))

    def end_of_micro_batch(self, num_targets: Tensor, scale: Tensor, *, last: bool) -> None:
        """The micro-batch whose loss, summed over num_targets and multiplied by scale, has gone backward; last: of
        its step."""
        if not self._looks:
            return
        norm = torch.linalg.vector_norm(torch.stack(self._norms))
        # 0 / 0 for a micro-batch without targets: it has no gradient of its own, and the estimate leaves its step out.
        self._weighted_squares.append((norm / scale) ** 2 / num_targets)
        self._norms = []
        if self._follows_sum and not (last and self._world_size > 1):  # by then the sum is that of all ranks
            total = torch.nn.utils.get_total_norm([p.grad for p in self._parameters if p.grad is not None])
            self._lengths.append(torch.stack([norm, total]))

    def read_cosine(self) -> dict[str, float]:
        """Return {successive_cosine}: the mean cosine of each micro-gradient with the sum of those before it in its
        step.

        Near 0 for pure noise. The cosine of one sum with the next, which is sometimes quoted, is not: it is near 1.
        """
        lengths, self._lengths = self._lengths, []
        cosines = [_cosine_with_sum(*before, *now) for before, now in itertools.pairwise(lengths)]
        return {"successive_cosine": torch.stack(cosines).mean().item()} if cosines else {}

    def take(self) -> Tensor | None:
        """Return the sum of num_targets x |g_k|^2 over this rank's micro-batches of the step, a scalar on the device;
        None for a step that was not measured."""
        if not self._looks:
            return None
        total = torch.stack(self._weighted_squares).sum()
        self._weighted_squares = []
        return total


def _cosine_with_sum(_: Tensor, sum_before: Tensor, gradient: Tensor, sum_now: Tensor) -> Tensor:
    """Return cos(g_k, G_k-1) from the lengths alone, as G_k = G_k-1 + g_k."""
    return (sum_now**2 - sum_before**2 - gradient**2) / (2 * gradient * sum_before)


@dataclass(frozen=True)
class NoiseEstimate:
    """In samples. None where the run cannot tell: one micro-batch and one rank, or too few steps."""

    coherence: float | None
    coherence_floor: float | None
    noise_scale: float | None
    noise_scale_low: float | None
    noise_scale_high: float | None
    gradient_snr: float | None
    """Of the whole step's gradient: |G|^2 over the variance of its estimate, effective batch / noise scale."""


class NoiseLog:
    """(mean |g_k|^2, |gbar|^2) of the last RECENT_STEPS steps, and the estimate made from them."""

    def __init__(self, micro_batch_size: int, num_micro_batches: int) -> None:
        """num_micro_batches: per optimizer step, over all ranks."""
        self.micro_batch_size = micro_batch_size
        self.num_micro_batches = num_micro_batches
        self._pending: list[Tensor] = []
        self.steps: deque[tuple[float, float]] = deque(maxlen=RECENT_STEPS)

    def add(self, mean_square: Tensor, gradient_norm: Tensor) -> None:
        """mean_square: of this rank, such that its mean over the ranks is the step's."""
        self._pending.append(torch.stack([mean_square.double(), gradient_norm.double() ** 2]))

    def read(self) -> None:
        """Bring the pending steps to the host; all ranks call it together."""
        if not self._pending:
            return
        pending = torch.stack(self._pending)
        if dist.is_initialized():
            # |gbar|^2 is equal on all ranks, so the mean over ranks leaves it and averages mean |g_k|^2.
            dist.all_reduce(pending)
            pending = pending / dist.get_world_size()
        self._pending = []
        self.steps.extend((small, big) for small, big in pending.tolist())

    def estimate(self) -> NoiseEstimate:
        return estimate_noise(self.steps, self.micro_batch_size, self.num_micro_batches)


def estimate_noise(
    steps: Iterable[tuple[float, float]], micro_batch_size: int, num_micro_batches: int
) -> NoiseEstimate:
    """Estimate from (mean |g_k|^2, |gbar|^2) of each step. It needs two micro-batches a step, and for intervals two
    steps."""
    steps = [pair for pair in steps if math.isfinite(pair[0]) and math.isfinite(pair[1])]
    if num_micro_batches < 2 or not steps:
        return NoiseEstimate(None, None, None, None, None, None)
    coherences = [_coherence(small, big, num_micro_batches) for small, big in steps]
    small, big = _mean([s for s, _ in steps]), _mean([b for _, b in steps])
    scale, low, high = _noise_scale(steps, micro_batch_size, num_micro_batches)
    effective_batch_size = micro_batch_size * num_micro_batches
    return NoiseEstimate(
        coherence=_coherence(small, big, num_micro_batches),
        # Pairs of pure noise are uncorrelated on average: what they would still show is the error of the mean.
        coherence_floor=Z_95 * _standard_error(coherences) if len(coherences) > 1 else None,
        noise_scale=scale,
        noise_scale_low=low,
        noise_scale_high=high,
        gradient_snr=effective_batch_size / scale if scale else None,
    )


def _coherence(mean_square: float, square_of_mean: float, count: int) -> float:
    """Return how far pairs of micro-gradients agree on average, from norms alone (a U-statistic): 1 if equal, 0 for
    noise."""
    if mean_square == 0:
        return 0.0
    return (count * square_of_mean - mean_square) / ((count - 1) * mean_square)


def _noise_scale(
    steps: list[tuple[float, float]], micro_batch_size: int, count: int
) -> tuple[float | None, float | None, float | None]:
    """Return (B_simple, low, high) in samples. The interval is a jackknife over steps of the inverse |G|^2 / S, then
    inverted: on the ratio itself it covers far less where the noise is large. high is None where it is unbounded."""
    b, big_b = micro_batch_size, micro_batch_size * count
    noise = [(small - big) / (1 / b - 1 / big_b) for small, big in steps]
    signal = [(big_b * big - b * small) / (big_b - b) for small, big in steps]
    n, total_noise, total_signal = len(steps), sum(noise), sum(signal)
    if total_noise <= 0:
        return (0.0, None, None)
    inverse = total_signal / total_noise
    point = 1 / inverse if inverse > 0 else None
    if n < 2:
        return (point, None, None)
    left_out = [(total_signal - g) / (total_noise - s) for g, s in zip(signal, noise, strict=True) if total_noise > s]
    if len(left_out) < n:
        return (point, None, None)
    mean = _mean(left_out)
    error = math.sqrt((n - 1) / n * sum((value - mean) ** 2 for value in left_out))
    upper, lower = inverse + Z_95 * error, inverse - Z_95 * error
    return (point, 1 / upper if upper > 0 else None, 1 / lower if lower > 0 else None)


def _mean(values: list[float]) -> float:
    return sum(values) / len(values)


def _standard_error(values: list[float]) -> float:
    mean = _mean(values)
    return math.sqrt(sum((v - mean) ** 2 for v in values) / (len(values) - 1) / len(values))
