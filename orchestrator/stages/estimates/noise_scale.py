"""The gradient noise scale of several trials together."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from batchscout.orchestrator.study.trial import Trial
from batchscout.trainers.noise.student_t import t_quantile


@dataclass(frozen=True)
class NoiseScale:
    """B_simple in samples with its 95 % interval; high is None where it is unbounded."""

    point: float | None
    low: float
    high: float | None

    def __str__(self) -> str:
        high = "unbounded" if self.high is None else f"{self.high:,.0f}"
        return f"{self.point:,.0f} [{self.low:,.0f}, {high}]" if self.point else f"> {self.low:,.0f}"


@dataclass(frozen=True)
class _Estimate:
    """What one trial says of the inverse noise scale, |G|^2 / S. By chance it may be negative."""

    inverse: float
    error: float
    num_steps: int
    effective_batch_size: int
    num_micro_batches: int

    def variance_at(self, inverse: float) -> float:
        """Return what its variance is in proportion to, if that is the truth: pairs of noise, and signal times noise.

        By this estimates are weighted, not by their own errors: of few steps those are uncertain, and smaller where the
        estimate happens to be small, so that the noise scale would come out too high.
        """
        batch, count = self.effective_batch_size, self.num_micro_batches
        return (count / (count - 1) / batch**2 + 2 * inverse / batch) / self.num_steps


def pooled_noise_scale(trials: Sequence[Trial]) -> NoiseScale | None:
    """Return the one noise scale that fits all trials, as far as it is one: it grows in the course of a run. None without
    an estimate, or where even its lower end is unknown.

    The narrowest of several intervals covers less than any of them: it is narrow by chance.
    """
    estimates = [found for trial in trials if (found := _estimate(trial))]
    if len(estimates) < 2:
        return next((_own(trial) for trial in trials if _estimate(trial)), None)
    inverse = _weighted(estimates, [1 / one.variance_at(0.0) for one in estimates])
    weights = [1 / one.variance_at(max(0.0, inverse)) for one in estimates]
    inverse = _weighted(estimates, weights)
    reach = _reach(estimates, weights)
    low, high = inverse + reach, inverse - reach
    if low <= 0:
        return None
    return NoiseScale(1 / inverse if inverse > 0 else None, 1 / low, 1 / high if high > 0 else None)


def _weighted(estimates: Sequence[_Estimate], weights: Sequence[float]) -> float:
    return sum(w * one.inverse for w, one in zip(weights, estimates, strict=True)) / sum(weights)


def _reach(estimates: Sequence[_Estimate], weights: Sequence[float]) -> float:
    """Return half of the 95 % interval of the weighted mean, with Welch's and Satterthwaite's degrees of freedom."""
    parts = [(w * one.error) ** 2 for w, one in zip(weights, estimates, strict=True)]
    fractions = [part**2 / (one.num_steps - 1) for part, one in zip(parts, estimates, strict=True)]
    degrees = math.floor(sum(parts) ** 2 / sum(fractions)) if sum(fractions) else 1
    return t_quantile(max(1, degrees)) * math.sqrt(sum(parts)) / sum(weights)


def _own(trial: Trial) -> NoiseScale | None:
    low = trial.metric("noise_scale_low")
    return NoiseScale(trial.metric("noise_scale"), low, trial.metric("noise_scale_high")) if low else None


def _estimate(trial: Trial) -> _Estimate | None:
    inverse, error, steps = (trial.metric(f"inverse_noise_scale{part}") for part in ("", "_error", "_steps"))
    split = trial.config.split
    if inverse is None or error is None or steps is None:
        return None
    return _Estimate(inverse, error, int(steps), split.effective_batch_size, split.num_micro_batches)
