"""Cross-entropy in chunks: the logits of all targets never exist at once. `trainers/model/linear_head.py` does it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from batchscout.trainers.criteria import CrossEntropyCriterion, TransformersLoss
from batchscout.trainers.knobs import fsdp
from batchscout.trainers.knobs.knob import Knob, first

if TYPE_CHECKING:
    from batchscout.trainers.config import TrialConfig

NAME = "chunked_cross_entropy"


def _incompatible_with(config: TrialConfig) -> str:
    return first(_other_loss(config), _shards(config))


def _other_loss(config: TrialConfig) -> str:
    if isinstance(config.loss, CrossEntropyCriterion | TransformersLoss) or _has_its_own(config):
        return ""
    said = (
        f"loss is {config.loss.type}" if config.loss else f"model.target '{config.model.target}' returns its own loss"
    )
    return (
        f"it computes the cross-entropy from what the model's last linear layer is given, and {said}; return logits and set "
        "loss: cross_entropy (or transformers), or leave it out"
    )


def _has_its_own(config: TrialConfig) -> bool:
    """True of the built-in models, whose cross-entropy is computed within them."""
    return config.loss is None and config.model.target in ("gpt", "hf")


def _shards(config: TrialConfig) -> str:
    shards = config.parallel == "fsdp" or fsdp.NAME in config.memory_knobs
    if not shards or _has_its_own(config):
        return ""
    return (
        "it needs the weights of the last linear layer after the forward pass, when parallel: fsdp has sharded them again; use "
        "parallel: ddp, or leave it out"
    )


KNOB = Knob(
    NAME,
    words="cross-entropy in chunks",
    effect="none",
    changes="loss",
    incompatible_with=_incompatible_with,
    tried_by_itself=True,
)
