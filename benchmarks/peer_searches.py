"""What else searches batches and learning rates, at a given cost: a Gaussian process with expected improvement; each batch once by
the scaling rule; Ray's ASHA on random draws, Optuna's TPE with successive halving, as their documentation says to use them."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from random import Random
from statistics import NormalDist
from typing import Any

import numpy as np
from numpy.typing import NDArray

QUARTERS = 4
"""Ray's and Optuna's judge a run after a quarter and after half of its budget, and at its end, as the study's own pruner does."""
BESIDE = 2**0.5, 2**-0.5
"""Times the rule's rate, where each batch is tried once by the rule."""

Loss = Callable[[int, float, float], float]
"""(effective batch, learning rate, share of the run trained) -> validation loss; infinite where it has diverged."""
Array = NDArray[np.float64]


@dataclass(frozen=True)
class Space:
    """What they may choose from, and what the user brings."""

    rates: dict[int, tuple[float, ...]]
    """The learning rates of every effective batch, the lowest first."""
    rule: dict[int, float]
    """The learning rate that the scaling rule makes of the user's own."""
    reference: int
    """The user's effective batch."""
    loss: Loss
    cost: float
    """In full runs: a search begins no run once it has spent so much."""

    def by_rule(self, batch: int, factor: float = 1.0) -> tuple[int, float]:
        """Return the batch with so many times the rule's rate, or the nearest that it may have."""
        low, high = self.rates[batch][0], self.rates[batch][-1]
        return batch, min(max(factor * self.rule[batch], low), high)


Chosen = tuple[int, float] | None
"""An effective batch and its learning rate; None where no run was trained to its end."""


@dataclass(frozen=True)
class Searched:
    """What a search came to."""

    chosen: Chosen
    runs: int
    """Those that began."""
    cost: float
    """In full runs."""


def gaussian_process(space: Space, chance: Random) -> Searched:
    """Return the setting with the lowest posterior mean among those tried: first the user's, the smallest and the largest batch
    by the rule, then wherever the expected improvement is largest. `chance` is not used."""
    points = [(batch, rate) for batch, rates in space.rates.items() for rate in rates]
    first = dict.fromkeys(map(space.by_rule, (space.reference, min(space.rates), max(space.rates))))
    tried: dict[tuple[int, float], float] = {}
    while len(tried) < space.cost:
        untried = [point for point in points if point not in tried]
        point = next((one for one in first if one not in tried), None)
        if point is None and untried:
            mean, deviation = _posterior(space, tried, untried)
            lowest = float(_posterior(space, tried, list(tried))[0].min())
            point = untried[int(np.argmax(_expected_improvement(lowest, mean, deviation)))]
        if point is None:
            break
        tried[point] = space.loss(*point, 1.0)
    finite = [point for point, loss in tried.items() if math.isfinite(loss)]
    best = finite[int(np.argmin(_posterior(space, tried, finite)[0]))] if finite else None
    return Searched(best, len(tried), float(len(tried)))


def _posterior(
    space: Space, tried: dict[tuple[int, float], float], points: list[tuple[int, float]]
) -> tuple[Array, Array]:
    """Return the mean and the deviation of the loss at these points, by the likeliest of some length scales (in factors of 2) and
    noises. A run that diverged counts as the worst finite loss and their spread on top.

    Batch and rate are log2 of the batch and of the rate's ratio to the rule's: with the bare rate it wastes a tenth more.
    """

    def places(settings: Iterable[tuple[int, float]]) -> Array:
        return np.array([(math.log2(batch), math.log2(rate / space.rule[batch])) for batch, rate in settings])

    known = [loss for loss in tried.values() if math.isfinite(loss)] or [0.0]
    spread = float(np.std(known)) or abs(known[0]) * 0.01 or 1.0
    losses = np.array([loss if math.isfinite(loss) else max(known) + spread for loss in tried.values()])
    middle, unit = losses.mean(), losses.std() or spread
    here, there = places(tried), places(points)

    def fitted(batch_scale: float, rate_scale: float, noise: float) -> tuple[float, Array, Array]:
        def alike(a: Array, b: Array) -> Array:
            return np.exp(-((((a[:, None] - b[None]) / (batch_scale, rate_scale)) ** 2).sum(axis=2)) / 2)

        factor = np.linalg.cholesky(alike(here, here) + noise**2 * np.eye(len(here)))
        scaled, across = np.linalg.solve(factor, (losses - middle) / unit), np.linalg.solve(factor, alike(here, there))
        likelihood = -float(scaled @ scaled) / 2 - float(np.log(np.diag(factor)).sum())
        return likelihood, across.T @ scaled, np.sqrt(np.maximum(1 - (across**2).sum(axis=0), 1e-9))

    grid = itertools.product((2.0, 4.0, 8.0), (2.0, 4.0, 8.0), (0.05, 0.15, 0.4))
    _, mean, deviation = max((fitted(*one) for one in grid), key=lambda fit: fit[0])
    return middle + unit * mean, unit * deviation


def _expected_improvement(lowest: float, mean: Array, deviation: Array) -> Array:
    z = (lowest - mean) / deviation
    normal = NormalDist()
    return deviation * np.array([one * normal.cdf(one) + normal.pdf(one) for one in z.tolist()])


def by_the_rule(space: Space, chance: Random) -> Searched:
    """Return the best of each batch once at the rule's rate, and of two rates beside it at the best of these. It spends what it
    spends. `chance` is not used."""
    losses = {point: space.loss(*point, 1.0) for point in map(space.by_rule, space.rates)}
    batch, _ = min(losses, key=lambda point: losses[point])
    beside = {space.by_rule(batch, factor) for factor in BESIDE} - losses.keys()
    losses |= {point: space.loss(*point, 1.0) for point in sorted(beside)}
    return Searched(_lowest(losses), len(losses), float(len(losses)))


def _lowest(losses: dict[tuple[int, float], float]) -> Chosen:
    finite = {point: loss for point, loss in losses.items() if math.isfinite(loss)}
    return min(finite, key=lambda point: finite[point], default=None)


def ray_asha(space: Space, chance: Random) -> Searched:
    """Return the best of random draws that Ray's ASHA let through."""
    from ray.tune.schedulers import ASHAScheduler, TrialScheduler

    scheduler: Any = ASHAScheduler(
        time_attr="quarters", metric="val_loss", mode="min", max_t=QUARTERS, grace_period=1, reduction_factor=2
    )
    points = [(batch, rate) for batch, rates in space.rates.items() for rate in rates]
    chance.shuffle(points)
    trained: dict[tuple[int, float], float] = {}
    runs, spent = 0, 0.0
    for number, point in enumerate(points):
        if spent >= space.cost:
            break
        runs += 1
        trial = _Numbered(str(number))
        scheduler.on_trial_add(None, trial)
        for quarter in range(1, QUARTERS + 1):
            spent += 1 / QUARTERS
            loss = space.loss(*point, quarter / QUARTERS)
            result = {"quarters": quarter, "val_loss": loss if math.isfinite(loss) else 1e9}
            if quarter == QUARTERS:
                trained[point] = loss
            elif scheduler.on_trial_result(None, trial, result) == TrialScheduler.STOP:
                break
    return Searched(_lowest(trained), runs, spent)


@dataclass
class _Numbered:
    """What Ray's scheduler wants to know of a trial."""

    trial_id: str


def optuna_tpe(space: Space, chance: Random) -> Searched:
    """Return the best that Optuna's TPE came to with its successive halving."""
    import optuna  # pyright: ignore[reportMissingImports]  (an extra)

    optuna.logging.set_verbosity(optuna.logging.ERROR)
    study = optuna.create_study(
        sampler=optuna.samplers.TPESampler(seed=chance.randrange(2**31), multivariate=False),
        pruner=optuna.pruners.SuccessiveHalvingPruner(min_resource=1, reduction_factor=2),
    )
    trained: dict[tuple[int, float], float] = {}
    spent = 0.0
    while spent < space.cost:
        trial = study.ask()
        point = _suggested(space, trial)
        for quarter in range(1, QUARTERS + 1):
            spent += 1 / QUARTERS
            loss = space.loss(*point, quarter / QUARTERS)
            trial.report(loss if math.isfinite(loss) else 1e9, quarter)
            if quarter == QUARTERS:
                trained[point] = loss
                study.tell(trial, loss if math.isfinite(loss) else 1e9)
            elif trial.should_prune():
                study.tell(trial, state=optuna.trial.TrialState.PRUNED)
                break
    return Searched(_lowest(trained), len(study.trials), spent)


def _suggested(space: Space, trial: Any) -> tuple[int, float]:
    """Return a batch and a rate: the rate as a place between the lowest and highest of that batch, on the log scale."""
    batch = trial.suggest_categorical("batch", list(space.rates))
    low, high = space.rates[batch][0], space.rates[batch][-1]
    return batch, low * (high / low) ** trial.suggest_float("rate", 0.0, 1.0)
