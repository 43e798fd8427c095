"""Weights in bfloat16, each update rounded up or down at random so that it is right on average (Zamirai et al. 2020, arXiv
2010.06192). `trainers/step/stochastic_rounding.py` does it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from batchscout.trainers.knobs.knob import Knob

if TYPE_CHECKING:
    from batchscout.trainers.config import TrialConfig

NAME = "bfloat16_weights"


def _incompatible_with(config: TrialConfig) -> str:
    optimizer = config.optimizer
    if optimizer.type != "adamw":
        return f"its updates are AdamW's, and optimizer.type is {optimizer.type}; set optimizer.type: adamw, or leave it out"
    if optimizer.kwargs:
        further = ", ".join(optimizer.kwargs)
        return f"its AdamW takes no further arguments, and optimizer.kwargs has {further}; leave them or it out"
    if config.precision != "bfloat16":
        return (
            f"with weights in bfloat16 all is computed in it, and precision is {config.precision}; set precision: bfloat16, or leave "
            "it out"
        )
    if config.ema_half_life_samples:
        return (
            "an average of bfloat16 weights would lose what a step adds to it, and ema_half_life_samples is "
            f"{config.ema_half_life_samples}; set it to null, or leave the knob out"
        )
    if config.parallel == "fsdp":
        return "it rounds whole tensors, and parallel: fsdp shards them; use parallel: ddp, or leave it out"
    return ""


KNOB = Knob(
    NAME,
    words="weights in bfloat16, rounded stochastically",
    effect="loss",
    changes="optimizer",
    incompatible_with=_incompatible_with,
)
