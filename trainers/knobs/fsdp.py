"""Each rank holds a shard of weights, gradients and optimizer state: `parallel: fsdp` under the name of a knob, so that it is compared
with the others. `trainers/model/parallel.py` does it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from batchscout.trainers.knobs.knob import Knob

if TYPE_CHECKING:
    from batchscout.trainers.config import TrialConfig

NAME = "fsdp"


def _incompatible_with(config: TrialConfig) -> str:
    if config.world_size == 1:
        return "it shards the model over ranks, and world_size is 1; raise it, or leave the knob out"
    if config.compile == "whole":
        return (
            "it gathers the model block by block, and compile: whole makes one graph of it; use compile: blocks, or leave the knob "
            "out"
        )
    if config.optimizer.type == "muon":
        return "optimizer muon needs whole matrices, which it shards; use optimizer adamw, or leave the knob out"
    return ""


KNOB = Knob(
    NAME,
    words="the model in shards over the ranks (FSDP)",
    effect="rounding",
    changes="settings",
    incompatible_with=_incompatible_with,
    excludes=("activation_offload", "bfloat16_weights", "optimizer_offload"),
)
