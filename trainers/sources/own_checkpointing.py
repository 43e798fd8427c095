"""A model that checkpoints its own activations: what is kept for the backward pass is the study's to decide."""

from __future__ import annotations

from collections.abc import Iterator

from torch import nn

OWN_CHECKPOINTING = "gradient_checkpointing is the study's to decide"
_FLAGS = "gradient_checkpointing", "grad_checkpointing"
"""As transformers and diffusers call it, and as timm does."""


def without_own_checkpointing(module: nn.Module) -> bool:
    """Switch it off; return whether it was on."""
    found = list(_switched_on(module))
    for part, flag in found:
        setattr(part, flag, False)
    return bool(found)


def checkpoints_itself(module: nn.Module) -> bool:
    return any(_switched_on(module))


def _switched_on(module: nn.Module) -> Iterator[tuple[nn.Module, str]]:
    yield from ((part, flag) for part in module.modules() for flag in _FLAGS if getattr(part, flag, False) is True)
