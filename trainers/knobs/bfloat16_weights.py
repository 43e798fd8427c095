"""Weights in bfloat16, each update rounded up or down at random so that it is right on average (Zamirai et al. 2020, arXiv
2010.06192). `trainers/step/stochastic_rounding.py` does it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from batchscout.trainers.knobs.knob import Knob, first

if TYPE_CHECKING:
    from batchscout.trainers.config import TrialConfig

NAME = "bfloat16_weights"


def _incompatible_with(config: TrialConfig) -> str:
    optimizer = config.optimizer
    return first(
        f"its updates are AdamW's, and optimizer.type is {optimizer.type}; set optimizer.type: adamw, or leave it out"
        if optimizer.type != "adamw"
        else "",
        f"its AdamW takes no further arguments, and optimizer.kwargs has {', '.join(optimizer.kwargs)}; leave them or it out"
        if optimizer.kwargs
        else "",
        f"with weights in bfloat16 all is computed in it, and precision is {config.precision}; set precision: bfloat16, or leave "
        "it out"
        if config.precision != "bfloat16"
        else "",
        "an average of bfloat16 weights would lose what a step adds to it, and ema_half_life_samples is "
        f"{config.ema_half_life_samples}; set it to null, or leave the knob out"
        if config.ema_half_life_samples
        else "",
        "it rounds whole tensors, and parallel: fsdp shards them; use parallel: ddp, or leave it out"
        if config.parallel == "fsdp"
        else "",
    )


KNOB = Knob(
    NAME,
    words="weights in bfloat16, rounded stochastically",
    effect="loss",
    changes="optimizer",
    incompatible_with=_incompatible_with,
    excludes=("optimizer_8bit",),
)
