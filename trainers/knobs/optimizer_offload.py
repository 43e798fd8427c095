"""The optimizer's moments stay in the host's pinned memory, and visit the GPU one parameter at a time.
`trainers/step/optimizer_offload.py` does it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from batchscout.trainers.knobs.knob import Knob, needs_cuda

if TYPE_CHECKING:
    from batchscout.trainers.config import TrialConfig

NAME = "optimizer_offload"
WITH_PLAIN_STATE = ("adamw", "sgd", "adafactor")
"""The optimizers that treat every parameter by itself, and keep ordinary tensors for it."""


def _incompatible_with(config: TrialConfig) -> str:
    kind = config.optimizer.type
    if kind not in WITH_PLAIN_STATE:
        return (
            f"it moves an optimizer's state parameter by parameter, which is known of {', '.join(WITH_PLAIN_STATE)}, and "
            f"optimizer.type is {kind}; use one of them, or leave the knob out"
        )
    if config.parallel == "fsdp":
        return "it moves whole tensors, and parallel: fsdp shards them; use parallel: ddp, or leave the knob out"
    return ""


KNOB = Knob(
    NAME,
    words="the optimizer's state offloaded to the host",
    effect="none",
    changes="optimizer",
    incompatible_with=_incompatible_with,
    missing=needs_cuda("it moves the optimizer's state from a GPU"),
)
