"""What the backward pass needs waits for it in the host's pinned memory. `trainers/model/activation_offload.py` does it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from batchscout.trainers.knobs.knob import Knob, needs_cuda

if TYPE_CHECKING:
    from batchscout.trainers.config import TrialConfig

NAME = "activation_offload"


def _incompatible_with(config: TrialConfig) -> str:
    if config.parallel == "ddp":
        return ""
    return (
        "it tells activations from weights by their memory, which parallel: fsdp gathers anew for every block; use parallel: ddp, "
        "or leave it out"
    )


KNOB = Knob(
    NAME,
    words="activations offloaded to the host",
    effect="none",
    changes="loss",
    incompatible_with=_incompatible_with,
    missing=needs_cuda("it moves what the backward pass needs from a GPU"),
)
