"""From the indices of samples to one batch on the device."""

from __future__ import annotations

import copy
import functools
import inspect
import itertools
from collections import deque
from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from dataclasses import fields, is_dataclass
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.utils.data import default_collate

from batchscout.trainers.data.padding import stacked
from batchscout.trainers.data.samples import SampleSet

MOST_IN_FLIGHT = 4
"""So many batches are copied ahead of the one that a GPU computes on."""


def fetch(dataset: SampleSet, indices: Sequence[int], begins: Callable[[list[int]], object] = lambda _: None) -> Any:
    """Return the batch of these samples, as the set's own `collate_fn` makes it, or stacked.

    begins: is told at which samples it is: one by one, or all where they are read or put together at once.
    """
    samples = read(dataset, list(indices), begins)
    begins(list(indices))
    return collated(dataset, samples)


def collated(dataset: object, samples: list[Any]) -> Any:
    """Return these samples of the set as one batch."""
    own = getattr(dataset, "collate_fn", default_collate)
    return collate(samples) if own is default_collate else own(samples)


def read(dataset: SampleSet, indices: list[int], begins: Callable[[list[int]], object] = lambda _: None) -> list[Any]:
    """Return these samples, not put together yet. begins: as of `fetch`."""
    many = getattr(dataset, "__getitems__", None)
    if many:
        begins(indices)
        return many(indices)
    samples = []
    for index in indices:
        begins([index])
        samples.append(dataset[index])
    return samples


def collate(samples: list[Any]) -> Any:
    """Stack samples along a new first dimension."""
    if not _is_record(samples[0]):
        return stacked(samples)
    names = [field.name for field in fields(samples[0])]
    return _with_fields(samples[0], {name: collate([getattr(one, name) for one in samples]) for name in names})


def move(batch: Any, device: torch.device) -> Any:
    """Return the batch with every tensor on `device`. Copies to CUDA do not wait.

    It may be a tensor, whatever has a method `to` (a tokenizer's BatchEncoding, a PackedSequence, a type of the user's), or
    mappings, sequences and dataclasses of these. All else is returned as it is.
    """
    if isinstance(batch, Tensor):
        return _pinned(batch, device).to(device, non_blocking=device.type == "cuda")
    if _moves_itself(batch):
        return _moved_by_itself(_pinned(batch, device), device)
    if isinstance(batch, MutableMapping):
        return _with(batch, {key: move(value, device) for key, value in batch.items()})
    if isinstance(batch, Mapping):
        return {key: move(value, device) for key, value in batch.items()}
    if isinstance(batch, tuple) and hasattr(batch, "_fields"):
        return type(batch)(*(move(value, device) for value in batch))
    if isinstance(batch, list | tuple):
        return type(batch)(move(value, device) for value in batch)
    if _is_record(batch):
        return _with_fields(batch, {field.name: move(getattr(batch, field.name), device) for field in fields(batch)})
    return batch


def _pinned(batch: Any, device: torch.device) -> Any:
    """Return it in memory that a GPU reads by itself, where it can be put there: a copy from any other would wait.

    A mapping that moves itself without a way to do this (a tokenizer's BatchEncoding) is copied, with its tensors there.
    """
    if device.type != "cuda" or (isinstance(batch, Tensor) and batch.device.type != "cpu"):
        return batch
    if hasattr(batch, "pin_memory"):
        return batch.pin_memory()
    if isinstance(batch, MutableMapping):
        tensors = {key: value for key, value in batch.items() if isinstance(value, Tensor)}
        return _with(batch, {key: _pinned(value, device) for key, value in tensors.items()})
    return batch


def _moved_by_itself(batch: Any, device: torch.device) -> Any:
    known = inspect.signature(batch.to).parameters.values()
    waits = not any(one.name == "non_blocking" or one.kind is one.VAR_KEYWORD for one in known)
    moved = batch.to(device) if waits else batch.to(device, non_blocking=device.type == "cuda")
    return batch if moved is None else moved  # as a `to` that moves what it holds, and returns nothing


def _with(mapping: MutableMapping[Any, Any], values: dict[Any, Any]) -> MutableMapping[Any, Any]:
    copied = copy.copy(mapping)
    copied.update(values)
    return copied


def _with_fields(record: Any, values: dict[str, Any]) -> Any:
    """Return a copy of a dataclass, frozen or not, with these fields, without running its __init__ on what it has made of its arguments."""
    copied = copy.copy(record)
    for name, value in values.items():
        object.__setattr__(copied, name, value)
    return copied


def move_aside(batch: Any, device: torch.device) -> Any:
    """Return what `move` does. To a GPU it is copied beside what that still computes, and what comes next waits for it.

    A batch that moves itself is copied in line: its memory would have to be kept from the next copy, and only it knows its
    tensors.
    """
    if device.type != "cuda" or any(_moves_itself(leaf) for leaf in leaves(batch)):
        return move(batch, device)
    now, aside = torch.cuda.current_stream(device), _stream_aside(device)
    _in_flight(device).one_more()
    with torch.cuda.stream(aside):
        moved = move(batch, device)
    now.wait_stream(aside)
    for leaf in leaves(moved):
        if isinstance(leaf, Tensor):
            leaf.record_stream(now)  # or the next copy could be given its memory while it is being read
    return moved


class InFlight:
    """Lets the host run ahead of a GPU by a few batches and no more: the memory of each is kept until it has been computed on, and
    the peak would depend on how fast the host is."""

    def __init__(self, most: int, mark: Callable[[], Mark]) -> None:
        """mark: puts a mark behind all that the GPU was told to do so far."""
        self._most, self._mark, self._marks = most, mark, deque[Mark]()

    def one_more(self) -> None:
        """Wait until there is room for another batch."""
        self._marks.append(self._mark())
        if len(self._marks) > self._most:
            self._marks.popleft().synchronize()


class Mark(Protocol):
    def synchronize(self) -> object: ...


@functools.cache
def _in_flight(device: torch.device) -> InFlight:
    def mark() -> torch.cuda.Event:
        event = torch.cuda.Event(blocking=True)  # whoever waits sleeps
        event.record(torch.cuda.current_stream(device))
        return event

    return InFlight(MOST_IN_FLIGHT, mark)


@functools.cache
def _stream_aside(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)


def leaves(batch: Any) -> Iterator[Any]:
    """Yield the parts of a batch in which `move` looks for none."""
    if isinstance(batch, Tensor) or _moves_itself(batch):
        yield batch
    elif isinstance(batch, Mapping):
        yield from itertools.chain.from_iterable(map(leaves, batch.values()))
    elif isinstance(batch, list | tuple):
        yield from itertools.chain.from_iterable(map(leaves, batch))
    elif _is_record(batch):
        yield from itertools.chain.from_iterable(leaves(getattr(batch, field.name)) for field in fields(batch))
    else:
        yield batch


def _moves_itself(batch: Any) -> bool:
    return not isinstance(batch, Tensor) and callable(getattr(batch, "to", None))


def _is_record(batch: Any) -> bool:
    return is_dataclass(batch) and not isinstance(batch, type)
