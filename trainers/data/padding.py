"""Samples of uneven length in one batch: padded at their ends, each member with the value that the study file names for it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import default_collate

from batchscout.trainers.data.loaders import KEPT, lengths_told, loader_of
from batchscout.trainers.data.streams import tell_alike
from batchscout.trainers.errors import DataFault

Pad = Mapping[str, int | float]
"""By the key of a dictionary, or the place in a tuple, what fills it up."""


class Padded:
    """A map-style set whose samples are dictionaries or tuples of tensors, arrays or lists of numbers."""

    def __init__(self, samples: Any, pad: Pad, where: str) -> None:
        """where: the set, in words. Raises DataFault where it batches its samples in another way."""
        if getattr(samples, "collate_fn", default_collate) is not default_collate:
            raise DataFault(
                f"{where} has a collate_fn of its own, which makes its batches, and data.pad says how to make them; leave one of the two out"
            )
        self.samples, self.pad, self.where, self.loader = samples, dict(pad), where, loader_of(samples)
        tell_alike(self, samples, KEPT)

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int) -> Any:
        return self.samples[index]

    def __getitems__(self, indices: list[int]) -> list[Any]:
        many = getattr(self.samples, "__getitems__", None)
        return many(indices) if many else [self.samples[index] for index in indices]

    @cached_property
    def lengths(self) -> Sequence[int] | np.ndarray:
        """How long each sample is, of its longest padded member. A set that does not say so is read once, from end to end."""
        told = lengths_told(self.samples, self.pad)
        return np.array([self._length(self.samples[index]) for index in range(len(self))]) if told is None else told

    def _length(self, sample: Any) -> int:
        return max(len(tensor) for tensor in self.padded_members(sample).values())

    def padded_members(self, sample: Any) -> dict[str, Tensor]:
        """Return what is padded of a sample. Raises DataFault where it has no such member, or one without a length."""
        members = dict(members_of(sample))
        if missing := [name for name in self.pad if name not in members]:
            has = f"a sample has {', '.join(members)}" if members else f"a sample is a {type(sample).__name__}"
            raise DataFault(
                f"data.pad names {', '.join(missing)}, and in {self.where} {has}; name keys of dictionaries, or places of tuples from 0"
            )
        found = {name: torch.as_tensor(members[name]) for name in self.pad}
        for name, tensor in found.items():
            if tensor.dim() == 0:
                raise DataFault(
                    f"data.pad names {name}, which is a single number in {self.where}; it needs no padding: leave it out"
                )
        return found

    def collate_fn(self, samples: list[Any]) -> Any:
        """Return the batch: what data.pad names is padded at the end to the longest of these samples, all else is stacked."""
        padded = [self.padded_members(sample) for sample in samples]
        batch = {
            name: pad_sequence([one[name] for one in padded], batch_first=True, padding_value=self.pad[name])
            if name in self.pad
            else stacked([dict(members_of(sample))[name] for sample in samples])
            for name, _ in members_of(samples[0])
        }
        return like(samples[0], batch)


def members_of(sample: Any) -> Iterator[tuple[str, Any]]:
    """Yield the members of a dictionary or a tuple, by their name; nothing of any other sample."""
    if isinstance(sample, Mapping):
        yield from ((str(key), value) for key, value in sample.items())
    elif isinstance(sample, list | tuple):
        yield from ((str(place), value) for place, value in enumerate(sample))


def like(sample: Any, batch: dict[str, Any]) -> Any:
    """Return the members of a batch in the form that its samples have."""
    if isinstance(sample, Mapping):
        return {key: batch[str(key)] for key in sample}
    return type(sample)(*batch.values()) if hasattr(sample, "_fields") else tuple(batch.values())


def stacked(samples: list[Any]) -> Any:
    """Return what torch's default_collate makes of them. Raises DataFault, with the remedy, where they differ in length."""
    try:
        return default_collate(samples)
    except RuntimeError as error:
        if (fault := uneven(samples)) is not None:
            raise DataFault(fault) from error
        raise


LABELS = ("label", "labels", "target", "targets")


def uneven(samples: Sequence[Any]) -> str | None:
    """Return which member of these samples differs in length, and how to say what it is padded with; None if none does."""
    members = [dict(members_of(sample)) for sample in samples]
    lengths = {name: {_length_of(one.get(name)) for one in members} for name in members[0]}
    found = {name: [one for one in some if one is not None] for name, some in lengths.items() if len(some) > 1}
    alone = {_length_of(sample) for sample in samples}
    if found:
        name, different = next(iter(found.items()))
        pad = ", ".join(f"{one}: {-100 if one in LABELS else 0}" for one in found)
        return (
            f"{f'member {name}' if str(name).isdigit() else name} of the samples of a batch differs in length ({min(different)} and {max(different)}), and nothing says how to pad it; set data.pad: {{{pad}}}, each "
            "with the value that fills it up, or give the data set a collate_fn"
        )
    if not members[0] and len(alone) > 1 and None not in alone:
        return (
            "the samples of a batch differ in length, and nothing says how to pad them; give the data set a collate_fn"
        )
    return None


def _length_of(value: Any) -> int | None:
    """Return how long a tensor, an array or a list is; None of anything else."""
    if isinstance(value, Tensor | np.ndarray):
        return len(value) if value.ndim else None
    return len(value) if isinstance(value, list | tuple) else None
