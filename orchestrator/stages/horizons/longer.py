"""A study's surface at another length of the run. Pure.

With m the length in times of the study's own, k = log2(m), x = log2(batch) and u the rate in factors of 2 above the rule's,

    loss_m(x, u) = bottom - fall_m + m^-exponent * (loss_1(x - batch_drift * k, u - rate_drift * k) - bottom)

where bottom is what the study's best setting ends at. A longer run is what it was at a smaller batch: the critical batch grows as the
0.4th to 0.5th power of the length (arXiv 2505.13738, 2410.21676). The best rate falls (arXiv 2409.19913), by how much differs. What is
left to gain falls as a power of the length (arXiv 2203.15556), and with it what a worse setting costs. How much of each is told by runs
of other lengths: of the surface's draws and of these laws, those that explain them count. Lengths are shares of the study's own.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from batchscout.orchestrator.stages.estimates.surface import (
    EXPONENT,
    NUM_DRAWS,
    U_STEP,
    Array,
    PowerLaw,
    Room,
    Setting,
    Surface,
)

RATE_DRIFT, RATE_DRIFT_SPREAD = -0.3, 0.3
BATCH_DRIFT, BATCH_DRIFT_SPREAD = 0.45, 0.4
"""By how many factors of 2 best rates and best batches change for each factor of 2 of the length: in the recorded worlds
by -0.35 +- 0.37 and 0.46 +- 0.39 (benchmarks/horizons.py)."""
EXPONENT_SPREAD = 0.3
"""How far the exponent of time may be off over several lengths: farther than beside one (surface.py)."""
LEAST_EXPONENT = 0.05
MISFIT = 0.35
"""For each factor of 2 of the length the losses are off the law by this share of what the last doubling lowered them by."""
DEGREES = 4.0
"""Of the Student t distribution of what a run is off by: one that the law cannot explain tells little."""
LAWS_A_DRAW = 5
"""Each draw of the surface is held against the runs of other lengths under so many laws."""
LIKELY_DRIFTS = 2.0
"""The surface is drawn as far as laws of so many standard deviations lead."""


@dataclass(frozen=True)
class Ended:
    """What a run of another length ended at."""

    setting: Setting
    octaves: float
    """log2 of its length."""
    loss: float
    num_seeds: int = 1


@dataclass(frozen=True)
class Carried:
    """The surface at the study's own length, and how it changes with the length: [draw] each, equally likely."""

    surface: Surface
    law: PowerLaw
    rate_drift: Array
    batch_drift: Array
    misfit: Array
    """How far the losses are off the law for each factor of 2 of the length, in times of what the last doubling lowered them by."""

    def at(self, octaves: float) -> Surface:
        """Return the surface of runs that are 2^octaves times as long."""
        surface, law = self.surface, self.law
        left = 2 ** (-law.exponent * octaves)
        every = [
            Setting(b, surface.coordinates.rate(b, float(u))) for b in surface.coordinates.batches for u in surface.u
        ]
        off = abs(octaves) * self.misfit * law.doubling
        losses = np.stack([self.losses(octaves, setting) + off for setting in every], axis=1)
        curvature = left * surface.curvature
        of_rate = losses.reshape(surface.of_rate.shape) / surface.late_gain - curvature[:, None, None] * surface.u**2
        slower = {batch: left * higher for batch, higher in surface.of_speed.items()}
        law = PowerLaw(law.doubling * left, law.exponent)
        return replace(
            surface, of_rate=of_rate, curvature=curvature, law=law, around=None, around_x=None, of_speed=slower
        )

    def losses(self, octaves: float, setting: Setting) -> Array:
        """Return what a run that is 2^octaves times as long ends at by the law alone: [draw]."""
        surface, law = self.surface, self.law
        left, bottom = 2 ** (-law.exponent * octaves), surface.lowest
        fall = law.doubling * (1 - left) / (2**law.exponent - 1)
        x = surface.coordinates.x(setting.effective_batch_size) - octaves * self.batch_drift
        alike = _loss_between(surface, x, surface.coordinates.u_of(setting) - octaves * self.rate_drift)
        return bottom - fall + left * (alike - bottom)

    def taken(self, draws: NDArray[np.intp]) -> Carried:
        """Return these draws, each as often as it is named."""
        surface, law = self.surface, self.law
        taken = replace(
            surface,
            of_rate=surface.of_rate[draws],
            curvature=surface.curvature[draws],
            noise=surface.noise[draws],
            noise_tilt=surface.noise_tilt[draws],
            cliffs=surface.cliffs[draws],
            around=None if surface.around is None else surface.around[draws],
            of_speed={batch: higher[draws] for batch, higher in surface.of_speed.items()},
        )
        law = PowerLaw(law.doubling[draws], law.exponent[draws])
        return Carried(taken, law, self.rate_drift[draws], self.batch_drift[draws], self.misfit[draws])


def room_for(octaves: float, shortest: float) -> Room:
    """Return how far the surface must reach for runs of these lengths, told as log2: a longer run is what a smaller batch is."""
    most = max(BATCH_DRIFT + LIKELY_DRIFTS * BATCH_DRIFT_SPREAD, 0.0)
    rates = (abs(RATE_DRIFT) + LIKELY_DRIFTS * RATE_DRIFT_SPREAD) * max(octaves, -shortest)
    return Room(math.ceil(octaves * most), math.ceil(-shortest * most), rates)


def carried(surface: Surface, runs: Sequence[Ended]) -> Carried:
    """Return the surface with laws that agree with what runs of other lengths ended at."""
    random = np.random.default_rng(0)
    number = NUM_DRAWS * LAWS_A_DRAW
    any_law = _any_law(replace(surface, lower={}), random, number)  # what single runs came to holds at their own length
    log_chance = np.zeros(number)
    for run in runs:
        x = surface.coordinates.x(run.setting.effective_batch_size)
        noise = any_law.surface.late_gain * any_law.surface.noise * 2 ** (any_law.surface.noise_tilt * x)
        misfit = MISFIT * run.octaves * any_law.law.doubling
        variance = noise**2 / run.num_seeds + misfit**2
        off = (any_law.losses(run.octaves, run.setting) - run.loss) ** 2 / variance
        log_chance -= (DEGREES + 1) / 2 * np.log1p(off / DEGREES) + np.log(variance) / 2
    chances = np.exp(log_chance - log_chance.max())
    return any_law.taken(random.choice(number, size=NUM_DRAWS, p=chances / chances.sum()))


def _any_law(surface: Surface, random: np.random.Generator, number: int) -> Carried:
    """Return so many draws of the surface and of the laws, before a run of another length has said anything."""
    assert surface.law, "seconds to a target say nothing of other lengths"
    still = np.zeros(NUM_DRAWS)
    drawn = Carried(surface, surface.law, still, still, still).taken(np.arange(number) % NUM_DRAWS)
    rate, batch, exponent, misfit = random.standard_normal((4, number))
    return Carried(
        drawn.surface,
        PowerLaw(drawn.law.doubling, np.maximum(EXPONENT + EXPONENT_SPREAD * exponent, LEAST_EXPONENT)),
        RATE_DRIFT + RATE_DRIFT_SPREAD * rate,
        BATCH_DRIFT + BATCH_DRIFT_SPREAD * batch,
        MISFIT * misfit,
    )


def _loss_between(surface: Surface, x: Array, u: Array) -> Array:
    """Return what a run between the batches and rates of the draws ends at: [draw]; the nearest one where it lies beyond them."""
    assert surface.around is not None, "it was drawn with room around"
    assert surface.around_x is not None, "as this was"
    draws, places = np.arange(len(x)), np.arange(len(surface.around_x))
    at = np.interp(x, surface.around_x, places)
    left = np.minimum(at.astype(int), max(0, len(places) - 2))
    right, share = np.minimum(left + 1, len(places) - 1), at - left
    rate = np.clip(u, surface.u[0], surface.u[-1])
    place = (rate - surface.u[0]) / U_STEP
    below = np.minimum(place.astype(int), len(surface.u) - 2)
    rest = place - below
    ends = [
        (1 - rest) * surface.around[draws, one, below] + rest * surface.around[draws, one, below + 1]
        for one in (left, right)
    ]
    return surface.late_gain * ((1 - share) * ends[0] + share * ends[1] + surface.curvature * rate**2)
