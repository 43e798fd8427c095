"""From the indices of samples to one batch on the device."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import default_collate

from trainers.data.samples import SampleSet


def fetch(dataset: SampleSet, indices: Sequence[int]) -> Any:
    """Return the collated batch of these samples."""
    many = getattr(dataset, "__getitems__", None)
    return collate(many(list(indices)) if many else [dataset[index] for index in indices])


def collate(samples: list[Any]) -> Any:
    """Stack samples along a new first dimension."""
    return default_collate(samples)


def move(batch: Any, device: torch.device) -> Any:
    """Return the batch with every tensor on `device`. Copies to CUDA do not wait."""
    if isinstance(batch, Tensor):
        pinned = batch.pin_memory() if device.type == "cuda" and batch.device.type == "cpu" else batch
        return pinned.to(device, non_blocking=device.type == "cuda")
    if isinstance(batch, Mapping):
        return {key: move(value, device) for key, value in batch.items()}
    if isinstance(batch, tuple) and hasattr(batch, "_fields"):
        return type(batch)(*(move(value, device) for value in batch))
    if isinstance(batch, list | tuple):
        return type(batch)(move(value, device) for value in batch)
    return batch
