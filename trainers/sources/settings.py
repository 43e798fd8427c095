"""What an object that trains elsewhere says of a study. Loads no torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

GROUPS = "batchscout.trainers.sources.adapted:param_groups"
"""`optimizer.param_groups` of a study of such an object."""
LIBRARIES = ("transformers", "trl", "peft", "accelerate", "lightning", "pytorch-lightning")
"""Whose objects are taken, and what they are made with."""


@dataclass(frozen=True)
class Settings:
    keys: Mapping[str, Any]
    """As in a study file, which comes first where it says them itself."""
    told: tuple[str, ...]
    """What people should know, one sentence each."""
    run_samples: int | None = None
    """The samples of the run that it is set to; None where that has no end."""
    taken: tuple[str, ...] = ()
    """What was found in it, a line each: for people who look whether that is right."""


def num_samples_of(samples: Any) -> int | None:
    """Return how many samples a set has; None of a stream."""
    return len(samples) if hasattr(samples, "__len__") else None
