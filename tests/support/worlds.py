"""Worlds that a played stage lives in: what memory holds, and how losses fall."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from batchscout.orchestrator.config.keys import StudyConfig
from batchscout.orchestrator.config.mode import Mode
from batchscout.orchestrator.stages.forms import Rate
from batchscout.orchestrator.stages.frontier.findings import FrontierFindings, MeasuredPoint, OperatingPoint
from batchscout.orchestrator.stages.throughput import ThroughputFindings
from batchscout.trainers.config import TrialConfig
from tests.support.lane_player import World, study_of

MIB = 2**20
BOOM = "RuntimeError: boom"


def failing(world: World, fails: Callable[[TrialConfig], bool], outcome: str = "failed") -> World:
    """This world, but for the trials that end so, for the reason BOOM."""

    def point(config: TrialConfig, samples: int) -> dict[str, Any]:
        return {"outcome": outcome, "reason": BOOM} if fails(config) else world(config, samples)

    return point


def memory_world(edges: dict[str, int]) -> World:
    """Every activation checkpointing mode holds micro-batches up to its edge."""

    def point(config: TrialConfig, samples: int) -> dict[str, Any]:
        size, edge = config.micro_batch_size, edges[str(config.activation_checkpointing)]
        if size > edge:
            return {"outcome": "out_of_memory", "reason": "too large"}
        return {"loss": 5.0, "peak_memory_bytes": size * MIB, "tokens_per_second": 1000.0 * size / (size + 4)}

    return point


NONE, FULL = (Mode(kind, compile=True, precision="float32") for kind in ("none", "full"))


def measured(mode: Mode, micro_batch_size: int) -> MeasuredPoint:
    return MeasuredPoint(mode, micro_batch_size, tokens_per_second=1000.0, peak_memory_bytes=micro_batch_size * MIB)


FRONTIER = FrontierFindings(
    chosen=measured(NONE, 8),
    winner="frontier-none-m8-verified",
    limit_bytes=None,
    baseline=OperatingPoint(NONE, 1),
    largest=measured(FULL, 16),
    fitting=(1, 8),
    front=(),
    knee=None,
)
THROUGHPUT = ThroughputFindings(
    critical_batch_size=None,
    critical_batch_size_low=None,
    critical_batch_size_high=None,
    goodput={},
)
KNOWN = (FRONTIER, THROUGHPUT)
# Where each candidate's curve ends, by (effective batch, learning rate is the rule's); 32 diverges, 12 is lost.
FLOORS = {(1, True): 3.9, (16, True): 3.1, (12, True): 3.3, (32, True): 3.2, (16, False): 3.4}


def curves(config: TrialConfig, samples: int) -> dict[str, Any]:
    """A falling curve per candidate, the same however often it is asked."""
    batch = config.micro_batch_size * config.gradient_accumulation_steps
    scaled = math.isclose(config.learning_rate, 1e-3 * (batch / 8) ** 0.5)
    floor = FLOORS.get((batch, scaled), 3.5) + 0.01 * config.seed + 0.05 * (config.micro_batch_size == 16)
    loss = floor + 2 * math.exp(-samples / 100)
    return {
        "loss": loss, "val_loss": loss + 0.1, "tokens_per_second": 1000.0, "train_seconds": samples / 100,
        "peak_memory_bytes": MIB,
    }  # fmt: skip


def with_accidents(config: TrialConfig, samples: int) -> dict[str, Any]:
    point = curves(config, samples)
    if config.gradient_accumulation_steps == 4 and samples > 300:
        return point | {"loss": math.nan, "val_loss": math.nan}
    if config.micro_batch_size == 12 and samples > 130:
        return {"outcome": "out_of_memory", "reason": "too large"}
    return point


def train_config(**changes: Any) -> StudyConfig:
    pruner = {"type": "asha", "min_samples": 64} | changes.pop("pruner", {})
    stage = {"type": "train", "pruner": pruner, "max_runs": changes.pop("max_runs", 12)}
    return study_of(stages=[stage], **changes)


def by_rate(config: TrialConfig, samples: int) -> dict[str, Any]:
    """Every learning rate ends elsewhere, in no order."""
    loss = random.Random(str(config.learning_rate)).uniform(3, 4) + 2 * math.exp(-samples / 4)
    return {"loss": loss, "val_loss": loss, "tokens_per_second": 1000.0, "train_seconds": samples / 100}


# Runs that are proposed at once: learning rates of one effective batch, which meet at every rung


FIELD = {1e-3: 3.9, 2e-3: 3.1, 3e-3: 3.15, 4e-3: 3.3, 5e-3: 3.2, 6e-3: 3.4}
"""The learning rates, and where the curve of each ends."""


def field_config(**changes: Any) -> StudyConfig:
    pruner = {"type": "asha", "min_samples": 64} | changes.pop("pruner", {})
    stage = {"type": "grid", "micro_batch_size": [8], "effective_batch_size": [16], "learning_rate": [*FIELD]}
    return study_of(stages=[stage | {"pruner": pruner}], **changes)


def run_at(learning_rate: float) -> str:
    """The id of the field's run at this rate."""
    return f"grid-m8k2-none-lr{learning_rate:g}"


def field_curves(config: TrialConfig, samples: int) -> dict[str, Any]:
    """A curve per learning rate, the same however often it is asked; all fall so early that nobody catches up later."""
    loss = FIELD[config.learning_rate] + 0.01 * config.seed + 2 * math.exp(-samples / 8)
    return {
        "loss": loss, "val_loss": loss + 0.1, "tokens_per_second": 1000.0, "train_seconds": samples / 100,
        "peak_memory_bytes": MIB,
    }  # fmt: skip


def field_with_accidents(config: TrialConfig, samples: int) -> dict[str, Any]:
    """After the first rung the third best diverges, and the second best is lost."""
    metrics = field_curves(config, samples)
    if config.learning_rate == 5e-3 and samples > 100:
        return metrics | {"loss": math.nan, "val_loss": math.nan}
    if config.learning_rate == 3e-3 and samples > 70:
        return {"outcome": "out_of_memory", "reason": "too large"}
    return metrics


# What `train` searches: batches of known rates, each at learning rates of its own


def timed(**samples_per_second: float) -> ThroughputFindings:
    """What the throughput stage finds where a split (m8k2) trains so many samples a second."""

    def rate(name: str, samples: float) -> Rate:
        size, steps = (int(number) for number in name[1:].split("k"))
        return Rate(size, steps, size * steps, NONE, samples, samples, samples, num_rounds=3)

    return replace(THROUGHPUT, rates=tuple(rate(name, samples) for name, samples in samples_per_second.items()))


TIMED = (FRONTIER, timed(m2k1=100.0, m4k1=150.0, m8k1=200.0, m8k2=250.0))


def bowl(config: TrialConfig, samples: int) -> dict[str, Any]:
    """Batch 4 is the best, and every batch is at twice the rule's rate; chance changes little."""
    batch, share = config.effective_batch_size, samples / config.sample_budget
    off = math.log2(config.learning_rate / (2e-3 * (batch / 8) ** 0.5))
    chance = random.Random(f"{batch} {config.learning_rate} {config.seed}").uniform(-0.004, 0.004)
    loss = 3 + 0.02 * math.log2(batch / 4) ** 2 + 0.05 * off**2 + 0.4 * (1 - share) + chance
    return {"loss": loss, "val_loss": loss, "tokens_per_second": 1000.0, "train_seconds": samples / 100}
