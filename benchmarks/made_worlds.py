"""Made worlds: fifteen kinds of laws by which a loss depends on batch, learning rate and length, each with noise of its own.

A world is drawn at random from its kind and a number; the same two give the same world. Everything is in late gains (what a run's
loss falls by over the second half of its samples), which are 2 to 15 % of the loss. With x = log2(batch), u = log2(rate / what the
square-root rule makes of the user's rate) and s the share of the training time that a whole run takes,

    loss(x, u, s) = level(x) + curvature * (u - best_u(x))^2 + doubling * (s^-q - 1) / (2^q - 1) + noise

so that half the time costs `doubling`. `plain` is this law with the spreads that the recorded worlds have (late_gain.py), but for `doubling`: that
is what twice the time is worth where each length has its own best rate, less than at the same rate. Each other kind changes one thing of it, most
of them something that the study's own surface does not know of.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from random import Random

NUM_BATCHES = 8
LARGEST_STEPS = 200
"""Optimizer steps of the largest batch's run: enough for it to take part, however it was timed."""
TIMING_NOISE = 0.05
GRID = tuple(2 ** (half / 2) for half in range(-8, 9))
"""The rates that the peers choose from, in units of the rule's."""
CURVE = 0.5
"""A run lies (s^-CURVE - 1) / (2^CURVE - 1) late gains above its end after a share s of its samples: 1 after half."""
SPIKE = 1.5
"""In late gains: what a spike lifts the rest of a run by."""
DROP_BEGINS = 0.7
"""The share of its samples up to which a run on a plateau stays there."""


@dataclass(frozen=True)
class Made:
    """One made world. Mappings go by effective batch."""

    kind: str
    number: int
    budgets: Mapping[int, int]
    """The samples of every batch at equal time."""
    reference: int
    """The user's own effective batch."""
    hardware: float
    """Tokens/s go as B / (B + hardware)."""
    own_rate: float
    """The user's learning rate at the reference batch."""
    lowest: float
    """The loss at which a best run of level 0 ends."""
    late_gain: float
    """In the unit of the loss."""
    level: Mapping[int, float]
    best_u: Mapping[int, float]
    curvature: float
    noise: Mapping[int, float]
    """The deviation of a run's loss from seed to seed."""
    doubling: float
    """What a run of half the time ends higher by."""
    exponent: Mapping[int, float]
    """q: it differs a little from batch to batch."""
    cliff: float = math.inf
    """How many factors of 2 above the best rate runs begin to diverge, at every batch."""
    diverges_at: float = 0.0
    """The share of its samples at which such a run has diverged."""
    p_spike: float = 0.0
    """The share of the runs that end with a spike."""
    behind: Mapping[int, float] | None = None
    """How many late gains a batch lies above its end after half of its samples; None: 1."""
    has_plateau: bool = False
    """True if what is seen before DROP_BEGINS says nothing of the end."""
    timing_noise: float = TIMING_NOISE
    rate_drift: float = 0.0
    """By how many factors of 2 every batch's best rate rises for each factor of 2 of the run's length."""
    batch_drift: float = 0.0
    """By how many factors of 2 the best batch grows for each factor of 2 of the run's length."""

    flattens: bool = False
    """True if what a setting lies above the best one shrinks with what is left to gain, as the length grows."""

    @property
    def name(self) -> str:
        return f"{self.kind} {self.number}"

    def user_rate(self, seed: int) -> float:
        """Return the user's rate: it is the world's own, whatever the seed."""
        return self.own_rate

    def rule(self, batch: int) -> float:
        """Return what the square-root rule makes of the user's rate."""
        return self.own_rate * (batch / self.reference) ** 0.5

    def range_of(self, batch: int) -> None:
        """Any rate can be asked for."""

    def grid(self, batch: int) -> tuple[float, ...]:
        return tuple(self.rule(batch) * factor for factor in GRID)

    def best_rate(self, batch: int) -> float:
        return self.rule(batch) * 2 ** self.best_u[batch]

    def best(self) -> tuple[int, float]:
        batch = min(self.level, key=lambda batch: self.level[batch])
        return batch, self.best_rate(batch)

    def best_rate_at(self, batch: int, time_share: float) -> float:
        return self.best_rate(batch) * time_share**self.rate_drift

    def mean_loss(self, batch: int, rate: float, time_share: float = 1.0) -> float:
        off = math.log2(rate / self.best_rate_at(batch, time_share))
        if off > self.cliff:
            return math.inf
        q = self.exponent[batch]
        shorter = self.doubling * (time_share**-q - 1) / (2**q - 1)
        level = self._level_at(batch, self.batch_drift * math.log2(time_share))
        left = time_share**-q if self.flattens else 1.0
        return self.lowest + self.late_gain * (left * (level + self.curvature * off**2) + shorter)

    def _level_at(self, batch: int, drift: float) -> float:
        """Return the level of a batch once all levels have moved so many factors of 2 up; beyond the ends they go on in a line."""
        batches = sorted(self.level)
        place = batches.index(batch) - drift
        below = min(max(math.floor(place), 0), len(batches) - 2)
        low, high = self.level[batches[below]], self.level[batches[below + 1]]
        return low + (high - low) * (place - below)

    def loss(self, batch: int, rate: float, seed: int, share_of_run: float, time_share: float = 1.0) -> float | None:
        end = self.mean_loss(batch, rate, time_share)
        if math.isinf(end):
            if share_of_run >= self.diverges_at:
                return None
            # up to where it diverges it looks like the best that still trains
            end = self.mean_loss(batch, self.best_rate_at(batch, time_share) * 2 ** (0.99 * self.cliff), time_share)
        noise = self._noise(batch, rate, seed, share_of_run)
        return self._on_the_way(batch, end, share_of_run) + self.late_gain * noise

    def _on_the_way(self, batch: int, end: float, share: float) -> float:
        """Return the loss, without noise, after a share of the samples of a run that ends at `end`."""
        if self.has_plateau:
            left = min(1.0, (1 - share) / (1 - DROP_BEGINS))
            return end + left * (self.lowest + self.late_gain - end)
        behind = self.behind[batch] if self.behind else 1.0
        return end + self.late_gain * behind * (share**-CURVE - 1) / (2**CURVE - 1)

    def _noise(self, batch: int, rate: float, seed: int, share: float) -> float:
        """Return how far a run is off, in late gains: new for every (batch, rate, seed). The nearer to its end, the more it is off
        by what it is off at the end."""
        run = f"{self.name} {batch} {rate:.6g} {seed}"
        chance = Random(run)
        at_end, spike_at = chance.gauss(0, 1), chance.random()
        spike = SPIKE if chance.random() < self.p_spike and share >= spike_at else 0.0
        on_the_way = Random(f"{run} {share:.4f}").gauss(0, 1)
        return self.noise[batch] * (share * at_end + math.sqrt(1 - share**2) * on_the_way) + spike


def made_world(kind: str, number: int) -> Made:
    """Return the world of this kind and number."""
    chance = Random(f"{kind} {number}")
    return KINDS[kind](_plain(kind, number, chance), chance)


RATE_DRIFT, RATE_DRIFT_SPREAD = -0.26, 0.29
"""What the recorded worlds' best rates do for each factor of 2 of the length (horizons.py)."""
BATCH_DRIFT, BATCH_DRIFT_SPREAD = 0.45, 0.1
"""Critical batches grow as the 0.4th to 0.5th power of the length (arXiv 2505.13738, 2410.21676)."""


def drifting(world: Made) -> Made:
    """Return the world with a best rate and a best batch that change with the length of the run."""
    chance = Random(f"{world.name} drifts")
    return replace(
        world,
        rate_drift=chance.gauss(RATE_DRIFT, RATE_DRIFT_SPREAD),
        batch_drift=chance.gauss(BATCH_DRIFT, BATCH_DRIFT_SPREAD),
        flattens=True,
    )


def _plain(kind: str, number: int, chance: Random) -> Made:
    smallest = 2 ** chance.randrange(5)
    batches = [smallest * 2**i for i in range(NUM_BATCHES)]
    hardware = batches[-1] * chance.choice((0.0, 0.02, 0.2))
    steps_time = LARGEST_STEPS * (batches[-1] + hardware)  # proportional to the training time
    budgets = {batch: round(steps_time / (batch + hardware)) * batch for batch in batches}
    reference = chance.choice(batches[1:-1])
    lowest = math.exp(chance.uniform(0, 1.5))
    curvature, noise = 0.25 * math.exp(chance.gauss(0, 0.4)), 0.15 * math.exp(chance.gauss(0, 0.6))
    exponent = 0.4 * math.exp(chance.gauss(0, 0.1))
    offset, slope = chance.gauss(0, 1), chance.gauss(0, 0.25)
    return Made(
        kind,
        number,
        budgets,
        reference,
        hardware,
        own_rate=0.001 * 2 ** chance.uniform(-3, 3),
        lowest=lowest,
        late_gain=lowest * math.exp(chance.uniform(math.log(0.02), math.log(0.15))),
        level=_levels(batches, chance, best_at=chance.uniform(0.5, NUM_BATCHES - 1.5)),
        best_u=_best_u(batches, reference, offset, slope, chance),
        curvature=curvature,
        noise=dict.fromkeys(batches, noise),
        doubling=0.6 * math.exp(chance.gauss(0, 0.25)),
        exponent={batch: exponent + 0.01 * i for i, batch in enumerate(batches)},
    )


def _levels(batches: list[int], chance: Random, best_at: float, width: float = 0.08) -> dict[int, float]:
    """Return a parabola in the place of the batch, with its minimum at that place, and small deviations from it.

    width: what the next batch, twice as large or half as large, costs in most worlds.
    """
    drawn = width * math.exp(chance.gauss(0, 0.6))
    return {batch: drawn * (i - best_at) ** 2 + chance.gauss(0, 0.03) for i, batch in enumerate(batches)}


def _best_u(batches: list[int], reference: int, offset: float, slope: float, chance: Random) -> dict[int, float]:
    """Return how the rule errs: offset at the reference batch, slope for each factor of 2 of the batch, and a little by chance."""
    return {
        batch: offset + slope * math.log2(batch / reference) + (batch != reference) * chance.gauss(0, 0.1)
        for batch in batches
    }


def _shifted(world: Made, offset: float) -> Made:
    """Return the world with the user's rate so many factors of 2 below the best."""
    by = offset - world.best_u[world.reference]
    return replace(world, best_u={batch: u + by for batch, u in world.best_u.items()})


def _plain_kind(world: Made, chance: Random) -> Made:
    return world


def _cliff(world: Made, chance: Random) -> Made:
    return replace(world, cliff=math.log2(chance.uniform(1.1, 1.5)))


def _late_cliff(world: Made, chance: Random) -> Made:
    return replace(_cliff(world, chance), diverges_at=0.6)


def _rate_too_low(world: Made, chance: Random) -> Made:
    return _shifted(world, chance.uniform(1, 4))


def _rate_too_high(world: Made, chance: Random) -> Made:
    return replace(_shifted(world, -chance.uniform(1, 4)), cliff=math.log2(4) + chance.uniform(-0.5, 0.5))


def _other_exponent(world: Made, chance: Random) -> Made:
    """The best rate goes with the batch, or not at all with it; the rule has the square root."""
    slope, batches = chance.choice((-0.5, 0.5)), list(world.budgets)
    offset = world.best_u[world.reference]
    return replace(world, best_u=_best_u(batches, world.reference, offset, slope, chance))


def _noise_by_batch(world: Made, chance: Random) -> Made:
    """From half the noise to twice the noise, rising or falling with the batch."""
    direction, last = chance.choice((-1, 1)), NUM_BATCHES - 1
    factors = [2 ** (direction * (2 * i / last - 1)) for i in range(NUM_BATCHES)]
    return replace(world, noise={batch: f * world.noise[batch] for f, batch in zip(factors, world.noise, strict=True)})


def _spikes(world: Made, chance: Random) -> Made:
    return replace(world, p_spike=0.12)


def _flat(world: Made, chance: Random) -> Made:
    return replace(world, level=dict.fromkeys(world.level, 0.0))


def _plateau(world: Made, chance: Random) -> Made:
    return replace(world, has_plateau=True)


def _quiet_seeds(world: Made, chance: Random) -> Made:
    return replace(world, noise=dict.fromkeys(world.noise, 0.02))


def _late_crossing(world: Made, chance: Random) -> Made:
    """The best batch is one of the larger ones. What ends ahead of the smallest batch is behind it at half, by half as much."""
    batches = list(world.budgets)
    level = _levels(batches, chance, best_at=chance.uniform(4.5, 6.5), width=0.03)
    ahead = {batch: max(0.0, level[batches[0]] - level[batch]) for batch in batches}
    return replace(world, level=level, behind={batch: 1 + 1.5 * ahead[batch] for batch in batches})


def _two_optima(world: Made, chance: Random) -> Made:
    """One among the smaller batches, one among the larger ones, of which either is the deeper."""
    places, depths = (chance.uniform(0.5, 1.5), chance.uniform(5.5, 6.5)), (0.0, chance.uniform(0.1, 0.4))
    deeper_first = chance.random() < 0.5
    wells = list(zip(places if deeper_first else places[::-1], depths, strict=True))
    level = {
        batch: min(0.15 * (i - place) ** 2 + depth for place, depth in wells) for i, batch in enumerate(world.budgets)
    }
    return replace(world, level=level)


def _edge(world: Made, chance: Random) -> Made:
    """The smallest or the largest batch is the best: the minimum lies at it or beyond."""
    beyond, batches = -chance.uniform(0, 1), list(world.budgets)
    best_at, edge = chance.choice(((beyond, batches[0]), (NUM_BATCHES - 1 - beyond, batches[-1])))
    level = _levels(batches, chance, best_at)
    return replace(world, level=level | {edge: min(level.values()) - 0.001})


def _slow_clock(world: Made, chance: Random) -> Made:
    """What was timed is far off, and with it how long each batch may train."""
    return replace(world, timing_noise=0.15)


KINDS: dict[str, Callable[[Made, Random], Made]] = {
    "plain": _plain_kind,
    "cliff": _cliff,
    "late_cliff": _late_cliff,
    "rate_too_low": _rate_too_low,
    "rate_too_high": _rate_too_high,
    "other_exponent": _other_exponent,
    "noise_by_batch": _noise_by_batch,
    "spikes": _spikes,
    "flat": _flat,
    "plateau": _plateau,
    "quiet_seeds": _quiet_seeds,
    "late_crossing": _late_crossing,
    "two_optima": _two_optima,
    "edge": _edge,
    "slow_clock": _slow_clock,
}
