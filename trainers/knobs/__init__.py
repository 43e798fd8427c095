"""Memory knobs: ways to train the same model in less memory, beside activation checkpointing. A file for each says what it needs,
what it excludes and whether it changes the loss; `memory_knobs` of a trial names those in use. Loads no torch."""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterable
from typing import TYPE_CHECKING, Annotated, Any

from pydantic import AfterValidator

from batchscout.trainers.knobs import (
    activation_offload,
    bfloat16_weights,
    chunked_cross_entropy,
    fsdp,
    optimizer_8bit,
    optimizer_offload,
)
from batchscout.trainers.knobs.knob import Knob

if TYPE_CHECKING:
    from batchscout.trainers.config import TrialConfig

KNOBS = (
    chunked_cross_entropy.KNOB,
    optimizer_8bit.KNOB,
    bfloat16_weights.KNOB,
    activation_offload.KNOB,
    optimizer_offload.KNOB,
    fsdp.KNOB,
)
"""All that there are, in the order in which a frontier tries them: what costs least time first."""


def knob(name: str) -> Knob:
    """Return the knob of this name. Raises ValueError, with the names that there are."""
    found = next((one for one in KNOBS if one.name == name), None)
    if found is None:
        names = ", ".join(sorted(one.name for one in KNOBS))
        raise ValueError(f"'{name}' is no memory knob; choose among {names}")
    return found


def _known(names: tuple[str, ...]) -> tuple[str, ...]:
    """Return the names sorted, each once. Raises ValueError for an unknown one."""
    return tuple(sorted({knob(name).name for name in names}))


def excluding(names: Collection[str]) -> tuple[str, str] | None:
    """Return the first two of these knobs that exclude each other; None if all go together."""
    pairs = itertools.combinations(sorted(names), 2)
    return next(((a, b) for a, b in pairs if b in knob(a).excludes or a in knob(b).excludes), None)


def _compatible(names: tuple[str, ...]) -> tuple[str, ...]:
    if pair := excluding(names):
        raise ValueError(
            f"{pair[0]} and {pair[1]} exclude each other; leave one of them out of memory_knobs, or let the frontier's "
            "memory_knobs try each by itself"
        )
    return names


MemoryKnobs = Annotated[tuple[str, ...], AfterValidator(_known)]
"""Names of knobs, sorted, each once."""
MemoryKnobsTogether = Annotated[MemoryKnobs, AfterValidator(_compatible)]
"""The same of knobs that are in use at once."""


def check_knobs(config: TrialConfig) -> None:
    """Raise ValueError where a knob does not go with the rest of the trial: it names both, and the way out."""
    for name in config.memory_knobs:
        if reason := knob(name).incompatible_with(config):
            raise ValueError(f"memory_knobs has {name}: {reason}")


def check_machine(names: Iterable[str], device_type: str) -> None:
    """Raise ValueError where this machine lacks what a knob needs. device_type: cpu or cuda."""
    for name in names:
        if reason := knob(name).missing(device_type):
            raise ValueError(f"memory_knobs has {name}: {reason}")


def with_settings(config: TrialConfig) -> TrialConfig:
    """Return the trial with the settings that its knobs stand for: another optimizer, or shards."""
    changes: dict[str, Any] = {}
    if optimizer_8bit.NAME in config.memory_knobs:
        changes["optimizer"] = config.optimizer.model_copy(update={"type": "adamw_8bit"})
    if fsdp.NAME in config.memory_knobs:
        changes["parallel"] = "fsdp"
    return config.model_copy(update=changes) if changes else config


def in_words(names: Iterable[str]) -> str:
    """Return the knobs for a sentence."""
    return ", ".join(knob(name).words for name in names)


def that_change_the_loss(names: Iterable[str]) -> tuple[str, ...]:
    return tuple(name for name in names if knob(name).effect == "loss")
