"""Worlds with a known answer: what a batch, its learning rate and its samples come to, and how fast each batch is."""

from __future__ import annotations

import functools
import math
import random
from bisect import bisect_left
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

from batchscout.orchestrator.stages.forms import Rate
from batchscout.orchestrator.stages.throughput import ThroughputFindings
from batchscout.trainers.config import TrialConfig
from tests.support.worlds import MIB, NONE, THROUGHPUT


@dataclass(frozen=True)
class LossWorld:
    """A loss that falls as a power of the samples, of which a batch wastes 1 / (1 + noise scale / batch)."""

    noise_scale: float
    half_speed_batch: float
    """Samples/s are proportional to batch / (batch + this): 0 where every batch is equally fast."""
    offset: float = 0.0
    """How many factors of 2 the best learning rate of the reference batch lies above the rule's."""
    curvature: float = 0.012
    """What a rate that is off by a factor of 2 costs, as a share of the loss."""
    seed_deviation: float = 0.002

    def __call__(self, config: TrialConfig, samples: int) -> dict[str, Any]:
        batch = config.effective_batch_size
        seconds = samples / self.samples_per_second(batch)
        u = math.log2(config.learning_rate / (1e-3 * (batch / 8) ** 0.5))
        noise = random.Random(f"{batch} {config.learning_rate:.6g} {config.seed}").gauss(0, self.seed_deviation)
        loss = self.best_loss(batch, samples) * (1 + self.curvature * (u - self.offset) ** 2) * (1 + noise)
        return {
            "loss": loss, "val_loss": loss, "train_seconds": seconds, "peak_memory_bytes": MIB,
            "tokens_per_second": self.samples_per_second(batch), "step_seconds": batch / self.samples_per_second(batch),
        }  # fmt: skip

    def best_loss(self, batch: int, samples: float) -> float:
        """What it comes to at the best learning rate of this batch."""
        return 1.8 + 14 * (samples / (1 + batch / self.noise_scale)) ** -0.33

    def samples_per_second(self, batch: int) -> float:
        return 1000 * batch / (batch + self.half_speed_batch)

    def rates(self, batches: Iterable[int], largest_micro_batch: int = 64, within: float = 0.02) -> ThroughputFindings:
        """What the throughput stage would have found. within: half the interval of each rate, as a share of it."""
        rates = {batch: self.samples_per_second(batch) for batch in batches}
        return throughput_of(rates, largest_micro_batch, within)


@dataclass(frozen=True)
class CriticalWorld:
    """A batch up to the critical one wastes no sample; of a larger one only the steps count. The critical one may grow."""

    critical_batch: float
    """At 2,048 samples."""
    exponent: float = 0.0
    """The critical batch grows as the samples to this power."""
    half_speed_batch: float = 0.0
    """Samples/s are proportional to batch / (batch + this): 0 where every batch is equally fast."""
    chosen_batch: int = 8
    """With which the run trained before a branch."""
    seed_deviation: float = 0.002
    """Of a loss, as a share of it."""
    paired: float = 0.2
    """How much of that two runs of one seed differ by."""

    def __call__(self, config: TrialConfig, samples: int) -> dict[str, Any]:
        begin = config.branch_from.samples if config.branch_from else 0
        batches = tuple((phase.from_samples, config.split_in(phase).effective_batch_size) for phase in config.phases)
        steps = _steps(self, begin, batches, config.sample_budget)
        seen, used, seconds = steps[bisect_left(steps, (samples,))]
        noise = random.Random(config.seed).gauss(0, self.seed_deviation)
        noise += self.paired * random.Random(f"{begin} {batches} {config.seed}").gauss(0, self.seed_deviation)
        loss, batch = (1.8 + 14 * used**-0.33) * (1 + noise), config.effective_batch_size
        return {
            "samples_seen": seen, "loss": loss, "val_loss": loss, "train_seconds": seconds, "peak_memory_bytes": MIB,
            "tokens_per_second": seen / seconds, "step_seconds": batch / self.samples_per_second(batch),
        }  # fmt: skip

    def samples_per_second(self, batch: int) -> float:
        return 1000 * batch / (batch + self.half_speed_batch)


@functools.cache
def _steps(
    world: CriticalWorld, begin: int, batches: tuple[tuple[int, int], ...], sample_budget: int
) -> list[tuple[int, float, float]]:
    """Of every step of a run: the samples seen, how many of them were not wasted, and the seconds. Before a branch begins
    the chosen batch trained."""
    seen, used, seconds = 0, 1.0, 0.0
    found = []
    while seen < sample_budget:
        batch = (
            next(size for count, size in reversed(batches) if count <= seen) if seen >= begin else world.chosen_batch
        )
        critical = max(world.critical_batch * (max(seen, 1) / 2048) ** world.exponent, world.chosen_batch)
        used += batch * min(1.0, critical / batch)
        seconds += batch / world.samples_per_second(batch)
        seen += batch
        found.append((seen, used, seconds))
    return found


def throughput_of(
    samples_per_second: dict[int, float], largest_micro_batch: int = 64, within: float = 0.02
) -> ThroughputFindings:
    """Findings that know how fast these effective batches are; beyond the largest micro-batch they accumulate."""
    found = []
    for batch, rate in sorted(samples_per_second.items()):
        size = min(batch, largest_micro_batch)
        low, high = (1 - within) * rate, (1 + within) * rate
        found.append(Rate(size, batch // size, batch, NONE, rate, low, high, num_rounds=5))
    return replace(THROUGHPUT, rates=tuple(found))


IDEAL = LossWorld(noise_scale=500, half_speed_batch=16)
"""Learning rates are perfectly retuned, and a large batch is fast and wastes little: large batches win by time."""
SMALL_IS_RIGHT = LossWorld(noise_scale=5, half_speed_batch=0)
"""No batch is faster than another, and every larger one wastes samples."""
FLAT = LossWorld(noise_scale=1e6, half_speed_batch=0)
"""All batches are alike."""
