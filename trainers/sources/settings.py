"""What an object that trains elsewhere says of a study. Loads no torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from batchscout.trainers.config import Schedule

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


@dataclass(frozen=True)
class OwnRun:
    """The run that an object which trains elsewhere is set to: what an export gives back, with other numbers."""

    library: Literal["transformers", "trl", "lightning", "script"]
    samples: int | None = None
    """None where it has no end, or none that is known."""
    samples_per_step: int = 1
    """Of one process."""
    schedule: Schedule | None = None
    """None where it could not be foretold."""
    arguments: dict[str, Any] = field(default_factory=dict)
    """Those that its Trainer was made with and that are not as by default; of Lightning's its length alone."""
    not_plain: tuple[str, ...] = ()
    """Further ones whose values cannot be written down."""


def num_samples_of(samples: Any) -> int | None:
    """Return how many samples a set has; None of a stream."""
    return len(samples) if hasattr(samples, "__len__") else None
