"""Trials as rows of a table, for Python and for trackers."""

from __future__ import annotations

from typing import Any

from batchscout.orchestrator.config.mode import mode_of
from batchscout.orchestrator.study.trial import Trial


def trial_row(trial: Trial) -> dict[str, Any]:
    """Return its stage, state and reason, its split and learning rate, and its last metrics."""
    config = trial.config
    row = {
        "trial": trial.id,
        "stage": trial.stage,
        "state": trial.state.value,
        "reason": trial.explanation,
        "micro_batch_size": config.micro_batch_size,
        "gradient_accumulation_steps": config.gradient_accumulation_steps,
        "world_size": config.world_size,
        "effective_batch_size": config.effective_batch_size,
        "activation_checkpointing": str(config.activation_checkpointing),
        "compile": str(config.compile).lower(),
        "precision": config.precision,
        "cross_entropy": mode_of(config).cross_entropy,
        "memory_knobs": " ".join(config.memory_knobs),
        "learning_rate": config.learning_rate,
        "sample_budget": config.sample_budget,
    }
    # A metric of the same name, as the rate of the last step, is not what the run was given.
    return row | {name: value for name, value in trial.metrics.items() if name not in row}
