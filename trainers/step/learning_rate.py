"""The learning rate over a run, in samples, so that runs of different batch sizes are comparable."""

from __future__ import annotations

import math
from collections.abc import Sequence

from batchscout.trainers.config import TrialConfig


def learning_rate_of_step(config: TrialConfig, first_sample: int) -> float:
    """Return the learning rate of the step whose first sample has this number, from 0: that of its phase, as warm-up and
    schedule have it when the step ends."""
    phase = config.phase_at(first_sample)
    samples_seen = first_sample + config.split_in(phase).effective_batch_size
    warmup = min(1.0, samples_seen / config.warmup_samples) if config.warmup_samples else 1.0
    return phase.learning_rate * min(warmup, _after_warmup(config, samples_seen))


def _after_warmup(config: TrialConfig, samples_seen: int) -> float:
    budget, schedule = config.sample_budget, config.schedule
    if schedule.type == "table":
        first_batch = config.effective_batch_size
        return factor_at(schedule.factors, (samples_seen - first_batch) / max(1, budget - first_batch))
    last_batch = config.last_effective_batch_size
    if schedule.type == "cosine":
        # As below: spread over one step more than the budget, or the last step would not move.
        progress = (samples_seen - config.warmup_samples) / (budget + last_batch - config.warmup_samples)
        return 0.5 * (1 + math.cos(math.pi * min(1.0, max(0.0, progress))))
    if schedule.type == "warmup_stable_decay" and schedule.decay > 0:
        # The step that reaches the budget still moves: the anneal ends one step's share above zero.
        remaining = budget + last_batch - samples_seen
        return min(1.0, max(0.0, remaining / (schedule.decay * budget + last_batch)))
    return 1.0


def factor_at(factors: Sequence[float], share: float) -> float:
    """Return the factor of a table at a share of the run, from 0 at its first step to 1 at its last."""
    place = min(1.0, max(0.0, share)) * (len(factors) - 1)
    below = min(int(place), len(factors) - 2)
    return factors[below] + (place - below) * (factors[below + 1] - factors[below])
