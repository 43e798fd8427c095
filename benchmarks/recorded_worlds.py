"""The recorded worlds as cases: tables of real training runs, crossed with hardware and with the length of a study.

A world is a table (world_table.py says how it is written, record_worlds.py records those in worlds/). Tokens/s go as
B / (B + h), so h = 0 gains nothing from a larger batch. A study is as long as was recorded, or a fourth or a sixteenth of that.

Between what was recorded the loss is interpolated so that a run in between is as noisy as a recorded one: the mean over the
seeds by a parabola in the log of the rate, and on top of it how far the run's own seed deviated at the nearest recorded rate.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from statistics import fmean
from typing import TypeVar

from world_table import SAME, World

from batchscout.orchestrator.config.stages import FEWEST_STEPS

WORLDS = Path(__file__).parent / "worlds"
HARDWARE = (0, 16, 128)
LENGTHS = (1, 4, 16)
"""A study is this many times shorter than the recorded runs allow."""
MARGIN = 1.15
"""A batch takes part with so many times the fewest steps, lest the timing's noise leave it out."""
RATE_OFF = 1.0
"""The user's own learning rate is off by up to so many factors of 2: it is what a user brings, not the best."""
TIMING_NOISE = 0.05
EXPONENT = 0.4
"""Beyond the recorded lengths a loss goes on as floor + gain * samples^-0.4, the usual exponent of the recorded ones."""
DOUBLING = 0.75
"""What twice the samples are worth, in late gains (late_gain.py), where a table does not tell it: recorded at one length only, or
where the longer run did not end lower."""

Number = TypeVar("Number", int, float)
Losses = tuple[float | None, ...]
"""Of every seed; None where it has diverged."""


@dataclass(frozen=True)
class Recorded:
    """A world on some hardware, within what was recorded."""

    world: World
    hardware: int
    length: int
    reference: int
    """The effective batch of the baseline."""
    budgets: dict[int, int]
    """The samples of each candidate batch at equal time, by the true speed."""
    timing_noise: float = TIMING_NOISE
    _looked_up: dict[tuple[int, int, float, float], Losses] = field(default_factory=dict, repr=False, compare=False)

    @property
    def name(self) -> str:
        return name_of(self.world, self.hardware, self.length)

    @property
    def kind(self) -> str:
        return self.world.name

    def user_rate(self, seed: int) -> float:
        """Return the best rate of the reference batch, off by chance, but within what was recorded."""
        low, high = self.range_of(self.reference)
        off = Random(f"{self.name} {seed}").uniform(-RATE_OFF, RATE_OFF)
        return min(max(self.best_rate(self.reference) * 2**off, low), high)

    def range_of(self, batch: int) -> tuple[float, float]:
        rates = self.grid(batch)
        return rates[0], rates[-1]

    def grid(self, batch: int) -> tuple[float, ...]:
        """Return the rates that were recorded at all budgets that the batch's own lies between."""
        around = _around(self.world.budgets(batch), self.budgets[batch])
        return tuple(sorted(set.intersection(*(set(self._rates(batch, budget)) for budget in around))))

    def best_rate(self, batch: int) -> float:
        """Return the best of the recorded rates."""
        return min(self.grid(batch), key=lambda rate: self.mean_loss(batch, rate))

    def best(self) -> tuple[int, float]:
        settings = [(batch, self.best_rate(batch)) for batch in self.budgets]
        return min(settings, key=lambda setting: self.mean_loss(*setting))

    def best_rate_at(self, batch: int, time_share: float) -> float:
        """Return the best of the rates that were recorded at the budgets around this length, between them by a parabola."""
        around = _around(self.world.budgets(batch), time_share * self.budgets[batch])
        rates = sorted(set.intersection(*(set(self._rates(batch, budget)) for budget in around)))
        fine = [low * (high / low) ** (step / 8) for low, high in itertools.pairwise(rates) for step in range(9)]
        return min(fine, key=lambda rate: self.mean_loss(batch, rate, time_share))

    def loss(self, batch: int, rate: float, seed: int, share_of_run: float, time_share: float = 1.0) -> float | None:
        low, high = self.range_of(batch)
        if not low * (1 - SAME) <= rate <= high * (1 + SAME):
            raise ValueError(f"{self.name}: learning rate {rate:g} of batch {batch} lies beyond {low:g} to {high:g}")
        seeds = self.world.seeds()
        place, budgets = seed % len(seeds), self.world.budgets(batch)
        asked = time_share * self.budgets[batch]
        budget = min(max(asked, budgets[0]), budgets[-1])
        if abs(math.log(asked / budget)) > math.log(MARGIN):
            raise ValueError(
                f"{self.name}: batch {batch} was recorded with {budgets[0]} to {budgets[-1]} samples, not {asked:.0f}"
            )
        around = _around(budgets, budget)
        nearest = _nearest(around, budget)
        of_seed = self._losses(batch, nearest, _nearest(self._rates(batch, nearest), rate), share_of_run)
        mean = _at(budget, {one: self._mean(batch, one, rate, share_of_run) for one in around})
        own = of_seed[place]
        if own is None or not math.isfinite(mean):
            return own
        return mean + own - fmean(loss for loss in of_seed if loss is not None)

    def mean_loss(self, batch: int, rate: float, time_share: float = 1.0) -> float:
        budgets, budget = self.world.budgets(batch), time_share * self.budgets[batch]
        ends = {one: self._mean(batch, one, rate, 1.0) for one in budgets}
        if budgets[0] <= budget <= budgets[-1]:
            return _at(budget, {one: ends[one] for one in _around(budgets, budget)})
        edge, *others = sorted(budgets, reverse=budget > budgets[-1])
        # the next one inwards, unless a longer run did not end lower: then what a doubling is usually worth
        inner = (others[0], ends[others[0]]) if others else (edge, ends[edge])
        if (inner[1] - ends[edge]) * (inner[0] - edge) >= 0:
            late_gain = self._mean(batch, edge, rate, 0.5) - ends[edge]
            inner = edge // 2, ends[edge] + DOUBLING * late_gain
        return _by_power_law(budget, (edge, ends[edge]), inner)

    def _rates(self, batch: int, budget: int) -> list[float]:
        return sorted(self.world.final_losses(batch, budget))

    def _losses(self, batch: int, budget: int, rate: float, share_of_run: float) -> Losses:
        """Return what the seeds of a recorded run measured after a share of its samples."""
        place = batch, budget, rate, share_of_run
        if place not in self._looked_up:
            seen = share_of_run * budget
            found = tuple(self.world.loss(batch, rate, seed, budget, seen) for seed in self.world.seeds())
            self._looked_up[place] = found
        return self._looked_up[place]

    def _mean(self, batch: int, budget: int, rate: float, share_of_run: float) -> float:
        """Return the mean over the seeds at a recorded budget; infinite where one has diverged. Where a recorded rate beside this
        one has diverged, the nearer one decides."""
        recorded = self._rates(batch, budget)
        rate = min(max(rate, recorded[0]), recorded[-1])
        means = {one: _mean_of(self._losses(batch, budget, one, share_of_run)) for one in recorded}
        around = _around(recorded, rate)
        if len(around) == 1 or any(math.isinf(means[one]) for one in around):
            return means[_nearest(around, rate)]
        finite = [one for one in recorded if math.isfinite(means[one])]
        three = sorted(finite, key=lambda one: abs(math.log2(one / rate)))[:3]
        return _through([math.log2(one / rate) for one in three], [means[one] for one in three])


def _mean_of(losses: Sequence[float | None]) -> float:
    return fmean(math.inf if loss is None else loss for loss in losses)


def _around(recorded: Sequence[Number], value: float) -> list[Number]:
    """Return the two between which a value lies, or the one that it is; the first or the last where it lies beyond them."""
    same = [one for one in recorded if abs(one / value - 1) <= SAME]
    below, above = [one for one in recorded if one < value][-1:], [one for one in recorded if one > value][:1]
    return same or [*below, *above]


def _nearest(recorded: Sequence[Number], value: float) -> Number:
    """Return the nearest on the log scale."""
    return min(recorded, key=lambda one: abs(math.log(one / value)))


def _at(budget: float, ends: Mapping[int, float]) -> float:
    """Return the loss linearly in the log of the budget between two; the nearer one's where one is infinite."""
    if len(ends) == 1 or any(map(math.isinf, ends.values())):
        return ends[_nearest(list(ends), budget)]
    (low, loss_low), (high, loss_high) = sorted(ends.items())
    return loss_low + (loss_high - loss_low) * math.log(budget / low) / math.log(high / low)


def _by_power_law(budget: float, edge: tuple[int, float], inner: tuple[int, float]) -> float:
    """Return the loss beyond the edge: of the curve through the two outermost budgets, or the edge's where it does not fall."""
    if math.isinf(edge[1]) or math.isinf(inner[1]):
        return edge[1]
    powers = [samples**-EXPONENT for samples in (budget, edge[0], inner[0])]
    slope = max(0.0, (edge[1] - inner[1]) / (powers[1] - powers[2]))
    return edge[1] + slope * (powers[0] - powers[1])


def _through(places: Sequence[float], losses: Sequence[float]) -> float:
    """Return the value at 0 of the polynomial through these points (Lagrange's)."""
    return sum(
        loss * math.prod(other / (other - place) for other in places if other != place)
        for place, loss in zip(places, losses, strict=True)
    )


def name_of(world: World, hardware: int, length: int) -> str:
    return f"{world.name}, h={hardware}, 1/{length}"


def case_of(world: World, hardware: int, length: int = 1) -> Recorded:
    """Return the world on this hardware: the fastest batch trains on the most samples that were recorded, or a `length`th
    of them, and a batch whose samples in that time were not recorded takes no part. Raises ValueError where fewer than two
    are left."""
    batches = world.batches()
    most = min(world.budgets(batch)[-1] * (1 + hardware / batch) for batch in batches) / length
    # `most` is the time, in which batch B trains on most / (1 + h / B) samples, that none outgrows its recorded budgets
    budgets = {batch: round(most / (1 + hardware / batch) / batch) * batch for batch in batches}
    within = {b: n for b, n in budgets.items() if world.budgets(b)[0] <= n <= world.budgets(b)[-1]}
    kept = {b: n for b, n in within.items() if n >= MARGIN * FEWEST_STEPS * b}
    if len(kept) < 2:
        raise ValueError(
            f"world {name_of(world, hardware, length)}: of the batches {batches} only {list(kept)} have their samples at equal time "
            "within what was recorded; record more budgets"
        )
    ordered = sorted(kept)
    return Recorded(world, hardware, length, ordered[(len(ordered) - 1) // 2], kept)


def cases_of(worlds: Sequence[World]) -> tuple[list[Recorded], list[str]]:
    """Return the cases, and the names of those that cannot be made."""
    cases, refused = [], []
    for world, hardware, length in itertools.product(worlds, HARDWARE, LENGTHS):
        try:
            cases.append(case_of(world, hardware, length))
        except ValueError:
            refused.append(name_of(world, hardware, length))
    return cases, refused
