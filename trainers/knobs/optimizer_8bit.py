"""AdamW whose moments have 8 bits (Dettmers et al. 2021, arXiv 2110.02861). `trainers/step/optimizers.py` builds it."""

from __future__ import annotations

import importlib.util
from typing import TYPE_CHECKING

from batchscout.trainers.knobs.knob import Knob

if TYPE_CHECKING:
    from batchscout.trainers.config import TrialConfig

NAME = "optimizer_8bit"


def _incompatible_with(config: TrialConfig) -> str:
    if config.optimizer.type in ("adamw", "adamw_8bit"):
        return ""
    return (
        f"it is AdamW with moments of 8 bits, and optimizer.type is {config.optimizer.type}; set optimizer.type: adamw, or leave it "
        "out"
    )


def _missing(_: str) -> str:
    if importlib.util.find_spec("torchao"):
        return ""
    return "it is torchao's, which is not installed here; pip install torchao, or leave it out"


KNOB = Knob(
    NAME,
    words="AdamW's moments in 8 bits",
    effect="loss",
    changes="settings",
    incompatible_with=_incompatible_with,
    missing=_missing,
    excludes=("bfloat16_weights", "optimizer_offload"),
)
