"""One surface over batch and learning rate: what every batch would end at, at its own best rate, and how sure that is.

With x = log2(batch) and u = log2(rate / the rule's rate for that batch), the loss at equal cost is taken to be

    loss(x, u) = level(x) + curvature * (u - offset - slope * x)^2 + noise

Near its minimum the loss is convex in the log of the rate, and the best rate follows a power law of the batch: 'offset'
and 'slope' say how the rule errs (arXiv 2503.04715 finds both for language models). 'level' is a parabola in x with
deviations that grow with the distance between batches, as every batch's best loss resembles its neighbours'.
For a given curvature and noise the model is linear, so its posterior is exact; the two are averaged over a grid, weighted
by the evidence. Everything is a share of the late gain, what the loss of a run falls by over the second half of its samples:
on that scale what seeds and learning rates do to a loss is alike for models, lengths and optimizers, as a share of the loss it is not.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]

NUM_DRAWS = 2000


@dataclass(frozen=True)
class Prior:
    """What is known before the first run, as shares of the late gain; spreads are of the logarithm."""

    seed_deviation: float
    """How far a run's loss deviates from seed to seed."""
    seed_deviation_spread: float
    curvature: float
    """What a rate that is off by a factor of 2 costs."""
    curvature_spread: float


PRIOR = Prior(0.15, 0.6, 0.25, 0.4)
"""Where the recorded worlds lie, from a language model to a regression, over a factor of 32 in length
(benchmarks/late_gain.py). As shares of the loss both differ by factors of 50 and more between them."""
OFFSET_SPREAD, SLOPE_SPREAD = 1.0, 0.25
"""How far, in factors of 2, the rule may be off at the reference batch; and how far its exponent may be off."""
LEVEL_SPREADS = (10.0, 1.0, 0.2)
"""How far the parabola's three coefficients may be off."""
DEVIATION = 0.05
"""How far the levels of two batches a factor of 2 apart deviate from the parabola."""
FAR = 0.3
"""The parabola in u holds near the minimum only: what a run lies above its batch's best is taken to be off by this share of
itself."""
BELOW_DIVERGED = 0.5
"""Rates within so many factors of 2 below one that diverged are not counted on."""

# These decide what is best, and what is run next.
USEFUL = 0.004
"""A gain of a smaller share of the loss is not worth choosing another batch for, however small the seeds' deviation."""
REACH = 1.0
"""How many factors of 2 beyond the rates that were tried the next one may lie."""
APART = 0.3
"""A rate within so many factors of 2 of one that was tried at the same batch would say little new."""
U_STEP = 0.25
DECISIVE = 1.28
"""The standard normal quantile of 0.9."""


@dataclass(frozen=True)
class Observation:
    """What a batch came to at a learning rate, at equal cost."""

    effective_batch_size: int
    learning_rate: float
    loss: float | None
    """The mean over its seeds; None if it diverged."""
    num_seeds: int = 1
    extra_deviation: float = 0.0
    """What the loss is uncertain by beside the seeds, in its own unit: that of a run that was cut is extrapolated."""


@dataclass(frozen=True)
class Setting:
    """Where a run could be made."""

    effective_batch_size: int
    learning_rate: float


@dataclass(frozen=True)
class Coordinates:
    """The batches that are candidates, and the learning rate that the scaling rule gives each."""

    rule: dict[int, float]

    @cached_property
    def batches(self) -> list[int]:
        return sorted(self.rule)

    def x(self, batch: int) -> float:
        """Return log2 of the batch, from the middle of the candidates."""
        middle = (math.log2(self.batches[0]) + math.log2(self.batches[-1])) / 2
        return math.log2(batch) - middle

    def u(self, batch: int, learning_rate: float) -> float:
        """Return by how many factors of 2 a rate lies above the rule's."""
        return math.log2(learning_rate / self.rule[batch])

    def rate(self, batch: int, u: float) -> float:
        return self.rule[batch] * 2**u


@dataclass(frozen=True)
class Scale:
    """What a difference of two losses is held against, in the unit of what is observed: seconds, for a target loss."""

    late_gain: float
    """By how much the loss of a run falls over the second half of its samples."""
    useful: float
    """The smallest difference that anyone would change the batch for."""


@dataclass(frozen=True)
class Speed:
    """A batch's sample budget was made of a measured speed. This is what an error of that speed changes in its loss."""

    deviation: float = 0.0
    """The standard deviation of the loss that comes from not knowing the speed, in units of the loss."""
    loss_higher_by: float = 0.0
    """How much higher the loss would be, had the budget been made of the speed that the runs turned out to have."""


@dataclass(frozen=True)
class Surface:
    """Draws of the surface that agree with what was observed: each is equally likely."""

    coordinates: Coordinates
    scale: Scale
    levels: Array
    """[draw, batch]: what the surface has instead of 'level' once it is written as a linear model."""
    linear: Array
    """[draw, (offset term, slope term)]."""
    curvature: Array
    """[draw]"""
    noise: Array
    """[draw]: the deviation from seed to seed."""
    highest: dict[int, float] = field(default_factory=dict)
    """For each batch at which a rate diverged, the highest u that is counted on."""
    of_speed: dict[int, Array] = field(default_factory=dict)
    """For each batch, how much higher its loss is at equal cost than what its runs ended at: [draw], in units of the loss."""

    def best_u(self, batch: int) -> Array:
        """Return where the batch's best rate lies, in factors of 2 above the rule's: [draw]."""
        u = -self._tilt(batch) / (2 * self.curvature)
        return np.minimum(u, self.highest.get(batch, math.inf))

    def best_loss(self, batch: int) -> Array:
        """Return what the batch ends at with its best rate: [draw], in units of the loss."""
        return self.loss(batch, self.best_u(batch))

    def at_equal_cost(self, batch: int) -> Array:
        """Return what the batch would end at with its best rate, had its budget been made of its true speed: [draw], in units of
        the loss."""
        return self.best_loss(batch) + self.of_speed.get(batch, 0.0)

    def loss(self, batch: int, u: Array | float) -> Array:
        """Return what the batch ends at with a rate u factors of 2 above the rule's: [draw]."""
        level = self.levels[:, self.coordinates.batches.index(batch)]
        return self.scale.late_gain * (level + self._tilt(batch) * u + self.curvature * u**2)

    def _tilt(self, batch: int) -> Array:
        return self.linear[:, 0] + self.linear[:, 1] * self.coordinates.x(batch)

    @cached_property
    def seed_deviation(self) -> float:
        """The deviation of one run's loss from seed to seed, in units of the loss."""
        return self.scale.late_gain * float(np.median(self.noise))

    @cached_property
    def useful_gain(self) -> float:
        """The smallest difference worth choosing another batch for, which no seed makes."""
        return max(self.seed_deviation, self.scale.useful)

    @cached_property
    def p_best(self) -> dict[int, float]:
        """For each batch, the probability that none ends lower by more than a useful gain."""
        losses = np.stack([self.at_equal_cost(batch) for batch in self.coordinates.batches], axis=1)
        good = losses <= losses.min(axis=1, keepdims=True) + self.useful_gain
        return {batch: float(share) for batch, share in zip(self.coordinates.batches, good.mean(axis=0), strict=True)}

    def gain(self, batch: int, other: int) -> Array:
        """Return by how much lower the batch ends than another one, each at its best rate and at equal cost: [draw]."""
        return self.at_equal_cost(other) - self.at_equal_cost(batch)

    def gain_of_another(self, batch: int) -> Array:
        """Return by how much lower than the batch the best of the others ends: [draw], below 0 where the batch is the best."""
        others = [self.at_equal_cost(other) for other in self.coordinates.batches if other != batch]
        return self.at_equal_cost(batch) - np.min(others, axis=0) if others else np.zeros_like(self.curvature)

    def expected_regret(self, batch: int) -> float:
        """Return what choosing this batch costs on average, against the one that ends lowest: 0 in the draws in which it is
        that one."""
        lowest = np.min([self.at_equal_cost(each) for each in self.coordinates.batches], axis=0)
        return float((self.at_equal_cost(batch) - lowest).mean())


def fit(
    coordinates: Coordinates,
    observations: Sequence[Observation],
    scale: Scale,
    speeds: Mapping[int, Speed] | None = None,
    seed: int = 0,
) -> Surface:
    """Return the surface given what was observed, of which at least one must be finite.

    speeds: what is known of the batches' speeds; one that is not here has just the speed that its budget was made of.
    seed: of the draws. The same observations in the same order give the same surface.
    """
    finite = [one for one in observations if one.loss is not None]
    assert finite, "a surface takes at least one finite loss"
    losses, unit = np.array([one.loss for one in finite], dtype=float), scale.late_gain
    typical = float(np.median(losses)) / unit
    posterior = _posterior(coordinates, finite, losses / unit - typical, unit)
    weights = np.exp(posterior.log_evidence - posterior.log_evidence.max())
    random = np.random.default_rng(seed)
    chosen = np.sort(random.choice(weights.size, size=NUM_DRAWS, p=weights / weights.sum()))
    draws = posterior.draws(chosen, random)
    basis = np.array([_level_row(coordinates, batch) for batch in coordinates.batches])
    return Surface(
        coordinates,
        scale,
        levels=typical + draws[:, :-2] @ basis.T,
        linear=draws[:, -2:],
        curvature=posterior.curvature[chosen],
        noise=posterior.noise[chosen],
        highest=_highest(coordinates, observations),
        of_speed={
            batch: speed.loss_higher_by + speed.deviation * random.standard_normal(NUM_DRAWS)
            for batch, speed in sorted((speeds or {}).items())
        },
    )


@dataclass(frozen=True)
class _Posterior:
    """What is known of the linear model that is left once curvature and noise are given: exact, for every cell of a grid of the
    two."""

    curvature: Array
    """[cell]"""
    noise: Array
    """[cell]"""
    mean: Array
    """[cell, coefficient]"""
    covariance: Array
    """[cell, coefficient, coefficient]"""
    log_evidence: Array
    """[cell]"""

    def draws(self, cells: NDArray[np.int64], random: np.random.Generator) -> Array:
        """Return coefficients drawn from these cells, one row for each."""
        used, place = np.unique(cells, return_inverse=True)
        variances, directions = np.linalg.eigh(self.covariance[used])
        factors = directions * np.sqrt(np.abs(variances))[:, None, :]
        normal = random.standard_normal((cells.size, self.mean.shape[1]))
        return self.mean[cells] + np.einsum("dij,dj->di", factors[place], normal)


def _cells() -> tuple[Array, Array, Array]:
    """Return (curvature, noise, log prior) of every cell of a grid of both."""
    steps = np.linspace(-2, 2, 9)
    i, j = (axis.ravel() for axis in np.meshgrid(steps, steps, indexing="ij"))
    curvature = PRIOR.curvature * np.exp(PRIOR.curvature_spread * i)
    noise = PRIOR.seed_deviation * np.exp(PRIOR.seed_deviation_spread * j)
    return curvature, noise, -(i**2 + j**2) / 2


def _posterior(coordinates: Coordinates, runs: Sequence[Observation], losses: Array, unit: float) -> _Posterior:
    """losses: of the runs, in the unit, from the typical loss."""
    curvature, noise, log_prior = _cells()
    u = np.array([coordinates.u(run.effective_batch_size, run.learning_rate) for run in runs])
    rows = np.array([_row(coordinates, run.effective_batch_size, v) for run, v in zip(runs, u, strict=True)])
    prior = np.array([_prior_variances(coordinates, one) for one in curvature])
    target = losses - curvature[:, None] * u**2
    weighted = rows * prior[:, None, :]
    of_data = weighted @ rows.T + _diagonal(_variances(runs, losses, unit, noise))
    gain = np.linalg.solve(of_data, weighted).swapaxes(1, 2)
    covariance = _diagonal(prior) - gain @ weighted
    explained = np.linalg.solve(of_data, target[:, :, None])[:, :, 0]
    log_evidence = log_prior - (np.linalg.slogdet(of_data).logabsdet + (target * explained).sum(axis=1)) / 2
    mean = (gain @ target[:, :, None])[:, :, 0]
    return _Posterior(curvature, noise, mean, (covariance + covariance.swapaxes(1, 2)) / 2, log_evidence)


def _diagonal(rows: Array) -> Array:
    """Return for every row the matrix that has it on its diagonal."""
    return rows[:, :, None] * np.eye(rows.shape[1])


def _variances(runs: Sequence[Observation], losses: Array, unit: float, noise: Array) -> Array:
    """Return how uncertain every run's loss is: [noise, run]."""
    lowest: dict[int, float] = {}
    for run, loss in zip(runs, losses, strict=True):
        lowest[run.effective_batch_size] = min(loss, lowest.get(run.effective_batch_size, math.inf))
    excess = np.array([loss - lowest[run.effective_batch_size] for run, loss in zip(runs, losses, strict=True)])
    seeds = np.array([run.num_seeds for run in runs])
    extra = np.array([run.extra_deviation for run in runs]) / unit
    return noise[:, None] ** 2 / seeds + (FAR * excess) ** 2 + extra**2


def _row(coordinates: Coordinates, batch: int, u: float) -> list[float]:
    return [*_level_row(coordinates, batch), u, u * coordinates.x(batch)]


def _level_row(coordinates: Coordinates, batch: int) -> list[float]:
    """Return what a batch's level is made of: the parabola, and its own deviation."""
    x = coordinates.x(batch)
    return [1.0, x, x * x, *(float(batch == other) for other in coordinates.batches)]


def _prior_variances(coordinates: Coordinates, curvature: float) -> Array:
    deviations = [DEVIATION**2] * len(coordinates.batches)
    tilt = [(2 * curvature * OFFSET_SPREAD) ** 2, (2 * curvature * SLOPE_SPREAD) ** 2]
    return np.array([*(spread**2 for spread in LEVEL_SPREADS), *deviations, *tilt])


def _highest(coordinates: Coordinates, observations: Sequence[Observation]) -> dict[int, float]:
    """Return, for each batch at which a rate diverged, the highest u that is counted on."""
    highest: dict[int, float] = {}
    for one in observations:
        if one.loss is None:
            batch = one.effective_batch_size
            below = coordinates.u(batch, one.learning_rate) - BELOW_DIVERGED
            highest[batch] = min(below, highest.get(batch, math.inf))
    return highest


def next_setting(
    surface: Surface,
    tried: Sequence[Setting],
    choice: int,
    unheard: Sequence[Setting] = (),
    diverged: Sequence[Setting] = (),
    given_up: Collection[int] = (),
) -> Setting | None:
    """Return the run that is expected to tell most about whether another batch is better than `choice`.

    That is the run which lowers most the variance of the difference between the choice and its strongest rival, both
    at their best rates (as in optimal computing-budget allocation). None where no run would say anything new.

    tried: the runs that were asked for. unheard: those of them that have yet to end; what they will tell anyway does not
    count for another. diverged: those that diverged; no rate beyond them is tried. given_up: the batches that are not to be run any more.
    """
    rival = _rival(surface, choice)
    if rival is None:
        return None
    difference = surface.best_loss(rival) - surface.best_loss(choice)  # what runs tell nothing of is left out
    heard = _results(surface, unheard)
    batches = [batch for batch in surface.coordinates.batches if batch not in given_up]
    options = [setting for batch in batches for setting in _options(surface, batch, tried, diverged)]
    return max(options, key=lambda setting: _told(surface, setting, difference, heard), default=None)


def _rival(surface: Surface, choice: int) -> int | None:
    """Return the batch that is likeliest to be better than the choice."""
    ours = surface.at_equal_cost(choice)
    others = [batch for batch in surface.coordinates.batches if batch != choice]
    return max(others, key=lambda batch: float((surface.at_equal_cost(batch) < ours).mean()), default=None)


def runs_to_decide(surface: Surface, batch: int, num_runs: int) -> float | None:
    """Return about how many more runs would tell whether the batch or its strongest rival is better, after so many.

    The variance of their difference falls about as the number of runs grows, but for what their speeds leave open; it is told
    where the difference is as large as DECISIVE deviations, or both are known to lie within a useful gain of each other.
    None where the speeds leave more open than the runs do: more runs would hardly help.
    """
    rival = _rival(surface, batch)
    if rival is None:
        return 0.0
    by_runs, at_equal_cost = (end(rival) - end(batch) for end in (surface.best_loss, surface.at_equal_cost))
    of_runs, of_speeds = float(by_runs.var()), float((at_equal_cost - by_runs).var())
    left = (max(abs(float(at_equal_cost.mean())), surface.useful_gain) / DECISIVE) ** 2 - of_speeds
    return max(0.0, num_runs * (of_runs / left - 1)) if left > 0 and of_runs >= of_speeds else None


def _options(surface: Surface, batch: int, tried: Sequence[Setting], diverged: Sequence[Setting]) -> list[Setting]:
    """Return the rates at which the batch could be run next: in the range of those that did not diverge, and a little beyond."""
    coordinates = surface.coordinates
    trained = [one for one in tried if one not in diverged]
    everywhere = [coordinates.u(one.effective_batch_size, one.learning_rate) for one in trained or tried] or [0.0]
    here = [coordinates.u(batch, one.learning_rate) for one in tried if one.effective_batch_size == batch]
    low, high = min(everywhere) - REACH, min(max(everywhere) + REACH, surface.highest.get(batch, math.inf))
    steps = np.arange(math.ceil(low / U_STEP), math.floor(high / U_STEP) + 1) * U_STEP
    return [
        Setting(batch, coordinates.rate(batch, u)) for u in steps if all(abs(u - before) >= APART for before in here)
    ]


def _told(surface: Surface, setting: Setting, difference: Array, heard: Array) -> float:
    """Return by how much a run at the setting is expected to lower the variance of the difference, once others are
    heard."""
    loss, noise = _loss_at(surface, setting)
    left, of_difference = _left(loss, heard), _left(difference, heard)
    return float(np.mean(left * of_difference)) ** 2 / (float(left.var()) + noise**2)


def _loss_at(surface: Surface, setting: Setting) -> tuple[Array, float]:
    """Return what a run at the setting ends at, [draw], and the deviation of its loss from that."""
    u = surface.coordinates.u(setting.effective_batch_size, setting.learning_rate)
    loss = surface.loss(setting.effective_batch_size, u)
    excess = float((loss - surface.best_loss(setting.effective_batch_size)).mean())
    return loss, math.hypot(surface.seed_deviation, FAR * excess)


def _results(surface: Surface, settings: Sequence[Setting]) -> Array:
    """Return an orthonormal basis of what runs at these settings may be heard to end at: [draw, run]."""
    random = np.random.default_rng(0)
    results = []
    for setting in settings:
        loss, noise = _loss_at(surface, setting)
        result = loss + noise * random.standard_normal(loss.size)
        results.append(result - result.mean())
    return np.linalg.qr(np.array(results).reshape(len(results), surface.curvature.size).T)[0]


def _left(draws: Array, heard: Array) -> Array:
    """Return what remains unknown of the draws, from their mean, once the results are heard."""
    centred = draws - draws.mean()
    return centred - heard @ (heard.T @ centred)
