"""Cross-entropy in chunks: the logits of all targets never exist at once. `trainers/model/linear_head.py` does it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from batchscout.trainers.criteria import CrossEntropyCriterion, TransformersLoss
from batchscout.trainers.knobs import fsdp
from batchscout.trainers.knobs.knob import Knob

if TYPE_CHECKING:
    from batchscout.trainers.config import TrialConfig

NAME = "chunked_cross_entropy"


def _incompatible_with(config: TrialConfig) -> str:
    loss, model = config.loss, config.model.target
    if loss is None and model in ("gpt", "hf"):  # their cross-entropy is computed within them
        return ""
    if not isinstance(loss, CrossEntropyCriterion | TransformersLoss):
        said = f"loss is {loss.type}" if loss else f"model.target '{model}' returns its own loss"
        return (
            f"it computes the cross-entropy from what the model's last linear layer is given, and {said}; return logits and set "
            "loss: cross_entropy (or transformers), or leave it out"
        )
    if config.parallel == "fsdp" or fsdp.NAME in config.memory_knobs:
        return (
            "it needs the weights of the last linear layer after the forward pass, when parallel: fsdp has sharded them again; use "
            "parallel: ddp, or leave it out"
        )
    return ""


KNOB = Knob(
    NAME,
    words="cross-entropy in chunks",
    effect="none",
    changes="loss",
    incompatible_with=_incompatible_with,
    tried_by_itself=True,
)
