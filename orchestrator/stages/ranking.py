"""What measurements mean: noise scale, goodput, and ranking under an objective."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from orchestrator.study.trial import Trial, TrialState

# Mean losses within this share of each other are a tie: a smaller difference may come from one seed's order of samples.
LOSS_TIE = 0.003


@dataclass(frozen=True)
class NoiseScale:
    """B_simple in samples with its 95 % interval; high is None where it is unbounded."""

    point: float | None
    low: float
    high: float | None
    trial: str

    def __str__(self) -> str:
        high = "unbounded" if self.high is None else f"{self.high:,.0f}"
        return f"{self.point:,.0f} [{self.low:,.0f}, {high}]" if self.point else f"> {self.low:,.0f}"


def token_efficiency(effective_batch_size: int, noise_scale: float) -> float:
    """Return the progress per token, 1 / (1 + B / B_noise), which nears 1 for a small batch (McCandlish et al. 2018,
    arXiv 1812.06162)."""
    return 1 / (1 + effective_batch_size / noise_scale)


def goodput(tokens_per_second: float, effective_batch_size: int, noise_scale: float) -> float:
    """Return tokens/s times progress per token (Pollux, Qiao et al. 2021, arXiv 2008.12260)."""
    return tokens_per_second * token_efficiency(effective_batch_size, noise_scale)


def best_noise_scale(trials: Sequence[Trial]) -> NoiseScale | None:
    """Return the estimate whose inverse, the scale on which estimates compare, has the narrowest interval; None without
    any."""
    scales = [_noise_scale(trial) for trial in trials]
    return min((scale for scale in scales if scale), key=_inverse_width, default=None)


def _noise_scale(trial: Trial) -> NoiseScale | None:
    low = trial.metric("noise_scale_low")
    if low is None:
        return None
    return NoiseScale(trial.metric("noise_scale"), low, trial.metric("noise_scale_high"), trial.id)


def _inverse_width(scale: NoiseScale) -> float:
    return 1 / scale.low - (1 / scale.high if scale.high else 0)


@dataclass(frozen=True)
class Standing:
    """A candidate at the end of its runs, over its seeds; the smaller its score the better."""

    name: str
    trials: tuple[Trial, ...]
    score: float
    val_loss: float


def standings(trials: Sequence[Trial], objective: str, target_loss: float | None) -> list[Standing]:
    """Return the candidates all of whose seeds completed, the best first."""
    by_name: dict[str, list[Trial]] = {}
    for trial in trials:
        by_name.setdefault(trial.candidate, []).append(trial)
    finished = [
        Standing(name, tuple(seeds), _score(seeds, objective, target_loss), _mean_loss(seeds))
        for name, seeds in by_name.items()
        if all(t.state is TrialState.COMPLETE and t.metric("val_loss") is not None for t in seeds)
    ]
    return sorted(finished, key=lambda standing: standing.score)


def settle(ranking: Sequence[Standing]) -> Standing:
    """Return, of those tied with the best, the baseline, or else the smallest effective batch: it needs the least
    memory."""
    best = ranking[0]
    equals = [one for one in ranking if tied(one.score, best.score)]
    return min(equals, key=lambda one: (not one.trials[0].protected, one.trials[0].config.effective_batch_size))


def _score(seeds: Sequence[Trial], objective: str, target_loss: float | None) -> float:
    if objective == "val_loss" or target_loss is None:
        return _mean_loss(seeds)
    seconds = seconds_to(seeds, target_loss)
    return seconds * (seeds[0].config.world_size / 3600 if objective == "gpu_hours" else 1)


def seconds_to(seeds: Sequence[Trial], target_loss: float) -> float:
    """Return the training seconds, without compiling, evaluating and waiting, until the seeds' mean loss reaches the
    target.

    Infinity if it never does.
    """
    # The seeds of one candidate evaluate at the same samples.
    for points in zip(*map(_evaluations, seeds), strict=False):
        if statistics.fmean(loss for loss, _ in points) <= target_loss:
            return statistics.fmean(seconds for _, seconds in points)
    return math.inf


def _evaluations(trial: Trial) -> list[tuple[float, float]]:
    """Return (validation loss, training seconds) of every evaluation that has both."""
    points = [(point.get("val_loss"), point.get("train_seconds")) for point in trial.history]
    return [(loss, seconds) for loss, seconds in points if loss is not None and seconds is not None]


def tied(a: float, b: float) -> bool:
    """True if two scores differ by no more than a seed's order of samples may cause."""
    return a == b or (math.isfinite(a) and math.isfinite(b) and abs(a - b) <= LOSS_TIE * max(abs(a), abs(b)))


def _mean_loss(seeds: Sequence[Trial]) -> float:
    return statistics.fmean(trial.measured("val_loss") for trial in seeds)
