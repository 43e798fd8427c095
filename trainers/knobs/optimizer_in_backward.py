"""Each parameter's update inside the backward pass, as soon as its gradient is there, which is then let go (Lv et al. 2023, arXiv
2306.09782). `trainers/step/in_backward.py` does it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from trainers.knobs.knob import Knob, first

if TYPE_CHECKING:
    from trainers.config import TrialConfig

NAME = "optimizer_in_backward"
BY_PARAMETER = ("adamw", "sgd", "adafactor", "adamw_8bit", "adamw_4bit")
"""The optimizers that treat every parameter by itself."""


def _in_the_way(config: TrialConfig) -> str:
    optimizer, accumulation = config.optimizer, max(config.accumulations)
    return first(
        f"it steps in the backward pass of each micro-batch, and gradient_accumulation_steps is {accumulation}, which sums several "
        "before a step; set it to 1, or leave the knob out"
        if accumulation > 1
        else "",
        f"it lets each gradient go before the norm of all is known, and optimizer.max_gradient_norm is "
        f"{optimizer.max_gradient_norm:g}, which clips by it; set it to null, or leave the knob out"
        if optimizer.max_gradient_norm is not None
        else "",
        f"it steps before ranks have exchanged their gradients, and world_size is {config.world_size}; set it to 1, or leave the "
        "knob out"
        if config.world_size > 1
        else "",
        f"it steps parameter by parameter, and optimizer {optimizer.name} may look at several at once; use "
        f"{', '.join(BY_PARAMETER)}, or leave the knob out"
        if optimizer.type not in BY_PARAMETER
        else "",
        "it cannot skip a step whose gradients overflowed, and precision is float16; use bfloat16, or leave the knob out"
        if config.precision == "float16"
        else "",
        f"noise_snapshots has {len(config.noise_snapshots)} places at which gradients are taken without a step; leave them out, or "
        "the knob"
        if config.noise_snapshots
        else "",
    )


KNOB = Knob(
    NAME,
    words="the optimizer's step inside the backward pass",
    effect="none",
    changes="update",
    in_the_way=_in_the_way,
    excludes=("optimizer_offload",),
    accumulates=False,
)
