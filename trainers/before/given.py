"""What a model's forward takes and what it was given, in words: most of what it raises on a first batch is told by the two."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

MOST_MEMBERS = 12


def given_text(module: nn.Module, batch: Any) -> str:
    """Return the parameters of the module's forward, and the members of a batch with their types and shapes."""
    return f"its forward takes {_parameters(module)}, and a batch of samples is {_described(batch)}"


def _parameters(module: nn.Module) -> str:
    try:
        signature = inspect.signature(module.forward)
    except (TypeError, ValueError):  # compiled code need not have one
        return "what it does not tell"
    bare = [parameter.replace(annotation=inspect.Parameter.empty) for parameter in signature.parameters.values()]
    return str(inspect.Signature(bare))


def _described(batch: Any) -> str:
    if isinstance(batch, Mapping):
        return f"a dictionary of {_listed([f'{key}: {_member(value)}' for key, value in batch.items()])}"
    if isinstance(batch, list | tuple):
        return f"a {type(batch).__name__} of {_listed([_member(value) for value in batch])}"
    return _member(batch)


def _listed(members: list[str]) -> str:
    more = len(members) - MOST_MEMBERS
    return ", ".join(members[:MOST_MEMBERS]) + (f" and {more} more" if more > 0 else "")


def _member(value: Any) -> str:
    if not isinstance(value, Tensor) or value.is_nested:
        return type(value).__name__
    told = f"{str(value.dtype).removeprefix('torch.')} {list(value.shape)}"
    is_whole = not (value.dtype.is_floating_point or value.dtype.is_complex or value.dtype is torch.bool)
    if not is_whole or not value.numel() or value.layout is not torch.strided:
        return told
    return f"{told} from {value.min().item()} to {value.max().item()}"
