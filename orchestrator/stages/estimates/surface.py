"""One surface over batch and learning rate: what every setting would end at, at equal cost, and how sure that is.

With x = log2(batch) and u = log2(rate / the rule's rate for that batch), the loss at equal cost is taken to be

    loss(x, u) = level(x) + curvature * (u - offset - slope * x)^2 + deviation(x, u) + noise

Near its minimum the loss is convex in the log of the rate, and the best rate follows a power law of the batch: 'offset'
and 'slope' say how the rule errs (arXiv 2503.04715 finds both for language models). 'level' is a parabola in x. What the two
parabolas do not explain is a Gaussian process: settings that resemble each other deviate alike. The noise may differ by batch,
and a run may be an outlier (a Student t distribution, by weights). What the seeds of a setting differ by is noise alone.

Given the curvature, the noise, how it grows with the batch and how far the rule may be off, the model is linear and its posterior
exact; these four are averaged over a grid, weighted by the evidence. Everything is a share of the late gain, what the loss of a run
falls by over the second half of its samples: on that scale what seeds and learning rates do to a loss is alike for models, lengths
and optimizers, as a share of the loss it is not. Rates above a cliff diverge: where it lies is told by the runs of all batches.

A difference of two losses is told as training time: a loss falls with time as a power law, so a lower loss is the same loss sooner.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from statistics import NormalDist

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
    doubling: float
    """What twice the time, at the same learning rate with a schedule of its own, lowers a loss by."""
    doubling_spread: float


PRIOR = Prior(0.15, 0.6, 0.25, 0.4, 0.75, 0.4)
"""Where the recorded worlds lie, from a language model to a regression, over a factor of 32 in length
(benchmarks/late_gain.py). As shares of the loss seeds and rates differ by factors of 50 and more between them."""
OFFSET_SPREADS, SLOPE_SPREAD = (1.0, 3.0), 0.25
"""How far, in factors of 2, the rule may be off at the middle batch, as a rule and where the user's rate is far off; and how far
its exponent may be off."""
P_FAR_OFF = 0.4
LEVEL_SPREADS = (10.0, 1.0, 0.2)
"""How far the parabola's three coefficients may be off."""
DEVIATION, DEVIATION_LENGTH = 0.25, 2.5
"""How far a loss deviates from the two parabolas, and over how many factors of 2 of batch or rate such a deviation is alike."""
OF_ITS_OWN = 0.05
"""How far each batch's loss deviates by itself."""
NOISE_TILTS = {-0.5: 0.2, 0.0: 0.6, 0.5: 0.2}
"""How many times 2 the noise grows for each factor of 2 of the batch, and how likely that is."""
NOISES, MEASURED_NOISES = np.linspace(-2, 2, 7), np.linspace(-5, 5, 21)
"""Where the noise is looked for, in spreads of the prior around the usual one: with one seed, and where several measure it."""
FAR = 0.2
"""Far from the minimum the parabola in u holds less: what a run lies above its batch's best is off by this share of itself."""
DEGREES, DEGREES_OF_SEEDS, ROUNDS = 2.0, 8.0, 4
"""The degrees of freedom of the noise's Student t distribution, those of what seeds differ by, as a setting that is about to diverge has
seeds that differ more than others', and how often the runs' weights are found anew."""
CLIFF, CLIFF_SPREAD, CLIFF_WIDTH = 2.5, 2.5, 0.4
"""How many factors of 2 above the rule's rate runs begin to diverge, how far that may be off, and how much it differs by batch."""
SAFE = 0.5
"""A rate that trains with less probability is not counted on."""

EXPONENT, EXPONENT_SPREAD = 0.4, 0.25
"""A loss falls as time^-exponent towards what it cannot fall below (arXiv 2001.08361; what the recorded worlds say)."""
LEAST_TIME, MOST_TIME = 0.001, 8.0
"""Shares of the training time that are smaller, or larger, are not told apart."""

U_STEP = 0.5
BEYOND = 3.0
"""The draws reach so many factors of 2 beyond the rates that were tried."""


@dataclass(frozen=True)
class Observation:
    """What a batch came to at a learning rate, at equal cost."""

    effective_batch_size: int
    learning_rate: float
    loss: float | None
    """The mean over its seeds; None if it diverged."""
    num_seeds: int = 1
    squares: float | None = None
    """What its seeds are off that mean by, squared and added up; None where that is not known, as of a run that was cut."""
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

    def u_of(self, setting: Setting) -> float:
        return self.u(setting.effective_batch_size, setting.learning_rate)

    def rate(self, batch: int, u: float) -> float:
        return self.rule[batch] * 2**u


@dataclass(frozen=True)
class Room:
    """How far the surface is drawn beyond the candidates and the rates that were tried, in factors of 2."""

    smaller: int = 0
    larger: int = 0
    rates: float = 0.0


@dataclass(frozen=True)
class Speed:
    """A batch's sample budget was made of a measured speed. This is what an error of that speed changes in its loss."""

    deviation: float = 0.0
    """The standard deviation of the loss that comes from not knowing the speed, in units of the loss."""
    loss_higher_by: float = 0.0
    """How much higher the loss would be, had the budget been made of the speed that the runs turned out to have."""


@dataclass(frozen=True)
class PowerLaw:
    """How the loss of a run with a schedule of its own falls with its training time: [draw] each."""

    doubling: Array
    """What twice the time lowers it by, in units of the loss."""
    exponent: Array

    def time_to_match(self, lower_by: Array) -> Array:
        """Return the share of the time in which a run that ends lower by so much, after all of it, comes to the other's loss: 1
        where it does not end lower, above 1 where it ends higher, at most MOST_TIME."""
        base = 1 + lower_by / self.doubling * (2**self.exponent - 1)
        least = MOST_TIME**-self.exponent
        return np.maximum(base, least) ** (-1 / self.exponent)


@dataclass(frozen=True)
class Surface:
    """Draws of the surface that agree with what was observed: each is equally likely."""

    coordinates: Coordinates
    late_gain: float
    """By how much the loss of a run falls over the second half of its samples, in units of what is observed."""
    u: Array
    """[rate]: the rates of the draws, in factors of 2 above the rule's; U_STEP apart."""
    of_rate: Array
    """[draw, batch, rate]: the loss in late gains, less curvature * u^2."""
    curvature: Array
    """[draw]"""
    noise: Array
    """[draw]: the deviation from seed to seed, of a run of the middle batch, in late gains."""
    noise_tilt: Array
    """[draw]"""
    cliffs: Array
    """[draw, batch]: the u from which on a batch diverges."""
    law: PowerLaw | None = None
    """None where what is observed is itself a training time: the seconds to a target loss."""
    around: Array | None = None
    """[draw, place, rate]: the same as of_rate at every place in `around_x`; None where that is the candidates alone."""
    around_x: Array | None = None
    """[place]: log2 of a batch from the middle of the candidates, rising: the candidates, and those beyond them one factor of 2 apart."""
    of_speed: dict[int, Array] = field(default_factory=dict)
    """For each batch, how much higher its loss is at equal cost than what its runs ended at: [draw], in units of the loss."""
    lower: Mapping[Setting, Array] = field(default_factory=dict)
    """Of runs that ended lower than the draws have them, by more than chance: what they came to, in units of the loss: [draw]. A run may end
    high by accident, and hardly ever so far below what its setting comes to: the surface does not hold there."""

    def loss(self, batch: int, u: float) -> Array:
        """Return what the batch ends at with a rate u factors of 2 above the rule's, should it train: [draw]."""
        place = min(max((u - self.u[0]) / U_STEP, 0.0), len(self.u) - 1.0)
        below = min(int(place), len(self.u) - 2)
        share, drawn = place - below, self.of_rate[:, self._number(batch), :]
        rest = (1 - share) * drawn[:, below] + share * drawn[:, below + 1]
        return self.late_gain * (rest + self.curvature * u**2)

    def at(self, setting: Setting) -> Array:
        """Return what a setting would end at, had its budget been made of its batch's true speed: [draw]."""
        batch = setting.effective_batch_size
        loss = self.lower.get(setting)
        return (self.loss(batch, self.coordinates.u_of(setting)) if loss is None else loss) + self.of_speed.get(
            batch, 0.0
        )

    def best_u(self, batch: int) -> Array:
        """Return where the batch's best rate lies, in factors of 2 above the rule's: [draw]."""
        return self._lowest(batch)[0]

    def best_loss(self, batch: int) -> Array:
        """Return what the batch would end at with its best rate, had its budget been made of its true speed: [draw]."""
        return self._lowest(batch)[1] + self.of_speed.get(batch, 0.0)

    def _lowest(self, batch: int) -> tuple[Array, Array]:
        """Return (u, loss) of the lowest point below the cliff: by the parabola through the lowest rate drawn and both beside it."""
        return self._lowest_of_all[self._number(batch)]

    @cached_property
    def _lowest_of_all(self) -> list[tuple[Array, Array]]:
        points = dict(enumerate(map(self._lowest_point, range(len(self.coordinates.batches)))))
        for setting, loss in self.lower.items():
            u, lowest = points[number := self._number(setting.effective_batch_size)]
            points[number] = np.where(loss < lowest, self.coordinates.u_of(setting), u), np.minimum(loss, lowest)
        return list(points.values())

    def _lowest_point(self, number: int) -> tuple[Array, Array]:
        losses = self.of_rate[:, number, :] + self.curvature[:, None] * self.u**2
        cliff = np.maximum(self.cliffs[:, number], self.u[0] + U_STEP)
        reached = np.where(self.u[None, :] <= cliff[:, None], losses, np.inf)
        draws, lowest = np.arange(len(losses)), reached.argmin(axis=1)
        middle = np.clip(lowest, 1, len(self.u) - 2)
        left, here, right = (losses[draws, middle + step] for step in (-1, 0, 1))
        bend = left - 2 * here + right
        shift = np.where(bend > 1e-9, (left - right) / (2 * np.maximum(bend, 1e-9)), (lowest - middle).astype(float))
        u = np.clip(self.u[middle] + U_STEP * np.clip(shift, -1, 1), self.u[0], np.minimum(cliff, self.u[-1]))
        away = (u - self.u[middle]) / U_STEP
        return u, self.late_gain * (here + away * (right - left) / 2 + away**2 * bend / 2)

    def _number(self, batch: int) -> int:
        return self.coordinates.batches.index(batch)

    def p_trains(self, setting: Setting) -> float:
        """Return the probability that the setting does not diverge."""
        number = self._number(setting.effective_batch_size)
        return float((self.coordinates.u_of(setting) < self.cliffs[:, number]).mean())

    @cached_property
    def seed_deviation(self) -> float:
        """The deviation of one run's loss from seed to seed at the middle batch, in units of the loss."""
        return self.late_gain * float(np.median(self.noise))

    def noise_at(self, batch: int) -> float:
        """Return the deviation of one run's loss from seed to seed at a batch, in units of the loss."""
        return self.late_gain * float(np.median(self.noise * 2 ** (self.noise_tilt * self.coordinates.x(batch))))

    @cached_property
    def lowest(self) -> Array:
        """What the best setting of all ends at: [draw]."""
        return np.min([self.best_loss(batch) for batch in self.coordinates.batches], axis=0)

    @cached_property
    def p_best(self) -> dict[int, float]:
        """For each batch, the probability that it ends lowest, each at its best rate: they add up to 1."""
        losses = np.stack([self.best_loss(batch) for batch in self.coordinates.batches], axis=1)
        won = np.bincount(losses.argmin(axis=1), minlength=losses.shape[1]) / len(losses)
        return {batch: float(share) for batch, share in zip(self.coordinates.batches, won, strict=True)}

    def time_share(self, ours: Array, theirs: Array) -> Array:
        """Return the share of the training time in which what ends at `ours` comes to `theirs`: [draw]."""
        if self.law is not None:
            return self.law.time_to_match(theirs - ours)
        return np.clip(np.maximum(ours, 0.0) / np.maximum(theirs, 1e-12), LEAST_TIME, MOST_TIME)

    def wasted(self, setting: Setting) -> Array:
        """Return the share of the training time that the setting wastes against the best one: [draw], 0 where it is that one."""
        return 1 - np.minimum(self.time_share(self.lowest, np.maximum(self.at(setting), self.lowest)), 1.0)

    def regret(self, setting: Setting) -> float:
        """Return the share of the training time that the setting wastes on average, should it train."""
        return float(self.wasted(setting).mean())

    def best_setting(self, safe: float = SAFE) -> Setting:
        """Return the setting that wastes least on average, of those that train with this probability."""
        options = [one for one in self.settings(U_STEP / 2) if self.p_trains(one) >= safe]
        return min(options or self.settings(U_STEP / 2), key=self.regret)

    def settings(self, step: float) -> list[Setting]:
        """Return every batch at every rate drawn, so many factors of 2 apart."""
        rates = np.arange(self.u[0], self.u[-1] + step / 2, step)
        return [Setting(b, self.coordinates.rate(b, float(u))) for b in self.coordinates.batches for u in rates]


def fit(
    coordinates: Coordinates,
    observations: Sequence[Observation],
    late_gain: float,
    speeds: Mapping[int, Speed] | None = None,
    *,
    in_seconds: bool = False,
    room: Room | None = None,
    seed: int = 0,
) -> Surface:
    """Return the surface given what was observed, of which at least one must be finite.

    late_gain: what the loss of a run falls by over the second half of its samples, in the unit of the losses.
    speeds: what is known of the batches' speeds; one that is not here has just the speed that its budget was made of.
    in_seconds: what is observed is the training time to a target loss. room: how far it is also drawn beyond the candidates.
    seed: of the draws. The same observations in the same order give the same surface.
    """
    finite = [one for one in observations if one.loss is not None]
    assert finite, "a surface takes at least one finite loss"
    random = np.random.default_rng(seed)
    losses = np.array([one.loss for one in finite], dtype=float) / late_gain
    typical = float(np.median(losses))
    runs = _Runs(coordinates, tuple(finite), losses - typical, late_gain)
    beyond = room or Room()
    places = _places(coordinates, beyond)
    drawn = _drawn(runs, places, _grid(coordinates, observations, beyond.rates), random)
    cliffs = _cliffs(coordinates, observations, random)
    law = None if in_seconds else _law(late_gain, random)
    of_speed = {
        batch: speed.loss_higher_by + speed.deviation * random.standard_normal(NUM_DRAWS)
        for batch, speed in sorted((speeds or {}).items())
    }
    surface = Surface(
        coordinates,
        late_gain,
        u=drawn.u,
        of_rate=drawn.of_rate[:, beyond.smaller : beyond.smaller + len(coordinates.batches)] + typical,
        curvature=drawn.curvature,
        noise=drawn.noise,
        noise_tilt=drawn.noise_tilt,
        cliffs=cliffs,
        law=law,
        around=drawn.of_rate + typical if room else None,
        around_x=places if room else None,
        of_speed=of_speed,
    )
    return replace(surface, lower=_lower(surface, finite, random))


BY_CHANCE = 5.0
"""A run that ends by more deviations of its noise below the surface is no accident: what the noise is is not well known, either."""


def _lower(surface: Surface, finite: Sequence[Observation], random: np.random.Generator) -> dict[Setting, Array]:
    """Return what the runs came to that ended lower than the surface has them, by more than chance; those that were cut say nothing of it."""
    found = dict[Setting, Array]()
    for one in finite:
        batch = one.effective_batch_size
        deviation = surface.noise_at(batch) / math.sqrt(one.num_seeds)
        drawn = float(np.median(surface.loss(batch, surface.coordinates.u(batch, one.learning_rate))))
        assert one.loss is not None, "it is finite"
        if not one.extra_deviation and one.loss + BY_CHANCE * deviation < drawn:
            found[Setting(batch, one.learning_rate)] = one.loss + deviation * random.standard_normal(NUM_DRAWS)
    return found


def _places(coordinates: Coordinates, room: Room) -> Array:
    """Return where the surface is drawn, as log2 of a batch from the middle of the candidates."""
    candidates = np.array([coordinates.x(batch) for batch in coordinates.batches])
    smaller = candidates[0] - np.arange(room.smaller, 0, -1)
    return np.concatenate([smaller, candidates, candidates[-1] + np.arange(1, room.larger + 1)])


def _law(late_gain: float, random: np.random.Generator) -> PowerLaw:
    doubling = PRIOR.doubling * np.exp(PRIOR.doubling_spread * random.standard_normal(NUM_DRAWS))
    exponent = EXPONENT + EXPONENT_SPREAD * random.standard_normal(NUM_DRAWS)
    return PowerLaw(late_gain * doubling, np.maximum(exponent, 0.1))


def _grid(coordinates: Coordinates, observations: Sequence[Observation], beyond: float) -> Array:
    """Return the u at which the surface is drawn: around those that were tried, on multiples of U_STEP."""
    tried = [coordinates.u(one.effective_batch_size, one.learning_rate) for one in observations]
    low, high = math.floor((min(tried) - BEYOND - beyond) / U_STEP), math.ceil((max(tried) + BEYOND + beyond) / U_STEP)
    return np.arange(low, high + 1, dtype=np.float64) * U_STEP


@dataclass(frozen=True)
class _Runs:
    """What came to an end, in late gains from the typical loss."""

    coordinates: Coordinates
    observed: tuple[Observation, ...]
    losses: Array
    """[run]"""
    late_gain: float

    @cached_property
    def x(self) -> Array:
        return np.array([self.coordinates.x(one.effective_batch_size) for one in self.observed])

    @cached_property
    def u(self) -> Array:
        return np.array([self.coordinates.u(one.effective_batch_size, one.learning_rate) for one in self.observed])

    @cached_property
    def not_noise(self) -> Array:
        """The variance of each that is none of its seeds: [run]."""
        lowest: dict[int, float] = {}
        batches = [one.effective_batch_size for one in self.observed]
        for batch, loss in zip(batches, self.losses, strict=True):
            lowest[batch] = min(loss, lowest.get(batch, math.inf))
        excess = self.losses - np.array([lowest[batch] for batch in batches])
        extra = np.array([one.extra_deviation for one in self.observed]) / self.late_gain
        return (FAR * excess) ** 2 + extra**2

    @cached_property
    def num_seeds(self) -> Array:
        return np.array([one.num_seeds for one in self.observed], dtype=float)

    @cached_property
    def squares(self) -> Array:
        """What the seeds of each are off their mean by, squared and added up: [run]."""
        return np.array([one.squares or 0.0 for one in self.observed]) / self.late_gain**2

    @cached_property
    def degrees(self) -> Array:
        """How many of these squares are free: [run], none of a single seed."""
        return np.array([0.0 if one.squares is None else one.num_seeds - 1.0 for one in self.observed])

    def seed_variances(self, cells: _Cells) -> Array:
        """Return the variance of one seed's loss: [cell, run]."""
        noise = cells.noise[:, None] * 2 ** (cells.noise_tilt[:, None] * self.x)
        return noise**2

    def variances(self, cells: _Cells) -> Array:
        """Return how uncertain every loss is: [cell, run]."""
        return self.seed_variances(cells) / self.num_seeds + self.not_noise


@dataclass(frozen=True)
class _Cells:
    """A grid of what makes the rest of the model linear: [cell] each."""

    curvature: Array
    noise: Array
    noise_tilt: Array
    offset_spread: Array
    log_prior: Array


def _cells(runs: _Runs) -> _Cells:
    far = {OFFSET_SPREADS[0]: 1 - P_FAR_OFF, OFFSET_SPREADS[1]: P_FAR_OFF}
    noises = MEASURED_NOISES if runs.degrees.any() else NOISES
    every = list(itertools.product(NOISES[::2], noises, NOISE_TILTS.items(), far.items()))
    return _Cells(
        curvature=PRIOR.curvature * np.exp(PRIOR.curvature_spread * np.array([i for i, *_ in every])),
        noise=PRIOR.seed_deviation * np.exp(PRIOR.seed_deviation_spread * np.array([j for _, j, *_ in every])),
        noise_tilt=np.array([tilt for _, _, (tilt, _), _ in every]),
        offset_spread=np.array([spread for *_, (spread, _) in every]),
        log_prior=np.array([-(i**2 + j**2) / 2 + math.log(p) + math.log(q) for i, j, (_, p), (_, q) in every]),
    )


@dataclass(frozen=True)
class _Drawn:
    u: Array
    of_rate: Array
    curvature: Array
    noise: Array
    noise_tilt: Array


def _drawn(runs: _Runs, places: Array, u: Array, random: np.random.Generator) -> _Drawn:
    """Return draws of the surface at every place (log2 of a batch) and rate, given the runs.

    Draws of the prior are moved by what the runs say against them (Matheron's rule; Wilson et al. 2021, arXiv 2011.04026).
    """
    cells = _cells(runs)
    fitted = _fitted(runs, cells)
    chances = np.exp(fitted.log_evidence - fitted.log_evidence.max())
    chosen = np.sort(random.choice(chances.size, size=NUM_DRAWS, p=chances / chances.sum()))
    x = np.concatenate([runs.x, np.repeat(places, len(u))])
    v = np.concatenate([runs.u, np.tile(u, len(places))])
    rows, alike = _rows(x, v), _alike(x, v)
    root = np.linalg.cholesky(alike + 1e-8 * np.eye(len(x)))
    deviations = random.standard_normal((NUM_DRAWS, len(x))) @ root.T
    coefficients = random.standard_normal((NUM_DRAWS, rows.shape[1])) * np.sqrt(fitted.prior[chosen])
    prior = coefficients @ rows.T + deviations
    n = len(runs.losses)
    heard = np.sqrt(fitted.variances[chosen]) * random.standard_normal((NUM_DRAWS, n)) + prior[:, :n]
    surprise = runs.losses - cells.curvature[chosen, None] * runs.u**2 - heard
    drawn = prior[:, n:]
    for cell in np.unique(chosen):
        of_cell = chosen == cell
        across = (rows[n:] * fitted.prior[cell]) @ rows[:n].T + alike[n:, :n]
        drawn[of_cell] += surprise[of_cell] @ fitted.precision[cell] @ across.T
    of_rate = drawn.reshape(NUM_DRAWS, len(places), len(u))
    return _Drawn(u, of_rate, cells.curvature[chosen], cells.noise[chosen], cells.noise_tilt[chosen])


@dataclass(frozen=True)
class _Fitted:
    """What the runs say of every cell."""

    prior: Array
    """[cell, coefficient]: the variance of each coefficient before any run."""
    variances: Array
    """[cell, run]: of each run's noise, that of outliers larger."""
    precision: Array
    """[cell, run, run]: the inverse of the covariance of the losses."""
    log_evidence: Array
    """[cell]"""


def _fitted(runs: _Runs, cells: _Cells) -> _Fitted:
    """Weigh each run by how well the others explain it, as noise with a Student t distribution has it."""
    rows = _rows(runs.x, runs.u)
    prior = np.array([_prior_variances(c, s) for c, s in zip(cells.curvature, cells.offset_spread, strict=True)])
    explained = (rows * prior[:, None, :]) @ rows.T + _alike(runs.x, runs.u)
    target = runs.losses - cells.curvature[:, None] * runs.u**2
    noise, weights, of_seeds = runs.variances(cells), np.ones(len(runs.losses)), np.ones(len(runs.losses))
    seed_variances = runs.seed_variances(cells)
    within, log_noises = runs.squares / seed_variances, np.log(seed_variances) @ runs.degrees

    def given() -> _Fitted:
        log_chance = cells.log_prior - (log_noises + within @ of_seeds) / 2  # by what seeds are off their means
        return _given(log_chance, prior, explained, target, noise / weights)

    for _ in range(ROUNDS):
        weights, of_seeds = _weights(runs, given(), target, noise, within)
    return given()


def _given(log_chance: Array, prior: Array, explained: Array, target: Array, variances: Array) -> _Fitted:
    """log_chance: [cell], before the losses are known. explained: [cell, run, run], the covariance of what is no noise. target: [cell, run],
    the losses less what the curvature makes."""
    covariance = explained + variances[:, :, None] * np.eye(variances.shape[1])
    precision = np.asarray(np.linalg.inv(covariance), dtype=np.float64)
    told = np.einsum("cij,cj->ci", precision, target)
    log_evidence = log_chance - (np.linalg.slogdet(covariance).logabsdet + (target * told).sum(axis=1)) / 2
    return _Fitted(prior, variances, precision, log_evidence)


def _weights(runs: _Runs, fitted: _Fitted, target: Array, noise: Array, within: Array) -> tuple[Array, Array]:
    """Return the weight of every run, and that of what its seeds differ by: the less, the larger what remains of its loss and what they
    differ by are, in variances of the noise; [run] each. within: [cell, run], the squares of what seeds are off their mean by."""
    told = np.einsum("cij,cj->ci", fitted.precision, target)
    remains = fitted.variances**2 * (told**2 - np.einsum("cii->ci", fitted.precision)) + fitted.variances
    chances = np.exp(fitted.log_evidence - fitted.log_evidence.max())
    all_off, off = (chances @ squares / chances.sum() for squares in (remains / noise + within, within))
    weights = np.minimum((DEGREES + 1 + runs.degrees) / (DEGREES + all_off), 1.0)
    return weights, np.minimum((DEGREES_OF_SEEDS + runs.degrees) / (DEGREES_OF_SEEDS + off), 1.0)


def _rows(x: Array, u: Array) -> Array:
    """Return what the parabola of the levels and the linear part of that in u are made of: [setting, coefficient]."""
    return np.stack([np.ones_like(x), x, x * x, u, u * x], axis=1)


def _prior_variances(curvature: float, offset_spread: float) -> Array:
    tilt = [(2 * curvature * offset_spread) ** 2, (2 * curvature * SLOPE_SPREAD) ** 2]
    return np.array([*(spread**2 for spread in LEVEL_SPREADS), *tilt])


def _alike(x: Array, u: Array) -> Array:
    """Return how the deviations of settings go together: a Matern kernel of smoothness 3/2, and each batch's own."""
    apart = np.hypot(x[:, None] - x, u[:, None] - u) * math.sqrt(3) / DEVIATION_LENGTH
    return DEVIATION**2 * (1 + apart) * np.exp(-apart) + OF_ITS_OWN**2 * (np.abs(x[:, None] - x) < 1e-9)


def _cliffs(coordinates: Coordinates, observations: Sequence[Observation], random: np.random.Generator) -> Array:
    """Return from which u on each batch diverges: [draw, batch], by what trained and what diverged, of whatever batch.

    The cliff is the same u for all batches but for CLIFF_WIDTH; a batch's own runs say the rest.
    """
    places, normal = np.linspace(-16.0, 16.0, 641), NormalDist()
    log_chance = -(((places - CLIFF) / CLIFF_SPREAD) ** 2) / 2
    for one in observations:
        u = coordinates.u(one.effective_batch_size, one.learning_rate)
        below = np.array([max(normal.cdf((place - u) / CLIFF_WIDTH), 1e-9) for place in places])
        log_chance += np.log(below if one.loss is not None else np.maximum(1 - below, 1e-9))
    chances = np.exp(log_chance - log_chance.max())
    shared = random.choice(places, size=NUM_DRAWS, p=chances / chances.sum())
    ends = [_ends_of(coordinates, observations, batch) for batch in coordinates.batches]
    columns = [
        _between(shared + CLIFF_WIDTH * random.standard_normal(NUM_DRAWS), trained, diverged, random)
        for trained, diverged in ends
    ]
    return np.stack(columns, axis=1)


def _between(cliff: Array, trained: float, diverged: float, random: np.random.Generator) -> Array:
    """Return the cliff where it lies between what trained and what diverged at its batch, and elsewhere a place between the two."""
    low = trained if math.isfinite(trained) else diverged - CLIFF_SPREAD
    high = diverged if math.isfinite(diverged) else trained + CLIFF_WIDTH
    if not math.isfinite(high):
        return cliff  # nothing was run at this batch
    agrees = (cliff > trained) & (cliff <= diverged)
    return np.where(agrees, cliff, low + (high - low) * (1 - random.uniform(size=NUM_DRAWS)))


def _ends_of(coordinates: Coordinates, observations: Sequence[Observation], batch: int) -> tuple[float, float]:
    """Return the highest u at which the batch trained, and the lowest at which it diverged; infinite where there is none."""
    mine = [one for one in observations if one.effective_batch_size == batch]
    diverged = min((coordinates.u(batch, one.learning_rate) for one in mine if one.loss is None), default=math.inf)
    below = [coordinates.u(batch, one.learning_rate) for one in mine if one.loss is not None]
    return max((u for u in below if u < diverged), default=-math.inf), diverged
