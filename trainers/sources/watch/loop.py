"""A loop that was watched, as a study takes it: a module that gives the loss of a batch, and its data."""

from __future__ import annotations

import weakref
from collections import UserDict
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Self

import torch
from torch import nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader

from batchscout.trainers.sources.held_out import batch_size_of
from batchscout.trainers.sources.optimizers import groups_of
from batchscout.trainers.sources.own_checkpointing import without_own_checkpointing
from batchscout.trainers.sources.takes_batch import TakesBatch
from batchscout.trainers.sources.watch.batches import (
    Batches,
    FromCall,
    FromLoader,
    FromRows,
    draws_at_will,
    loaders_of,
    validation_loader,
    with_plain_batches,
    within,
)
from batchscout.trainers.sources.watch.copies import Copies, give_back
from batchscout.trainers.sources.watch.observer import Place, Seen, num_samples_in
from batchscout.trainers.sources.watch.replay import LossOfBatch


@dataclass(frozen=True)
class Loop:
    """What a script's loop trains, and how. One of these serves a whole process: its modules are copied for each run."""

    seen: Seen
    batches: Batches
    loss: LossOfBatch | None
    """None where the study has one of its own."""
    sums: bool = False
    """True if the loss of a batch is the sum of those of its samples."""

    @property
    def optimizer(self) -> Optimizer:
        return self.seen.optimizer

    @property
    def place(self) -> Place:
        """Of the script, where a batch and its loss have names."""
        return self.loss.place if self.loss is not None else self.seen.backward.places[0]

    @property
    def validation(self) -> DataLoader[Any] | None:
        if not isinstance(self.batches.source, FromLoader):
            return None
        named = {name: value for place in reversed(self.seen.backward.places) for name, value in names_around(place)}
        return validation_loader(self.batches.source.loader, self.seen.loaders, named)

    def name_of(self, loader: DataLoader[Any]) -> str:
        """Return what the script calls it."""
        places = self.seen.backward.places
        named = (name for place in places for name, value in names_around(place) if within(value) is loader)
        return next(named, "a DataLoader")

    @property
    def in_any_order(self) -> list[DataLoader[Any]]:
        """The script's own that a study reads in their place, but those that draw at will, of which it takes each sample once."""
        source = self.batches.source
        both = (source.loader, self.validation) if isinstance(source, FromLoader) else ()
        return [one for one in both if one is not None and not draws_at_will(one)]

    @property
    def loaders(self) -> tuple[Any, Any]:
        found = loaders_of(self.batches.source, self.validation)
        return (with_plain_batches(found[0]), with_plain_batches(found[1])) if self.boxes else found

    @property
    def micro_batch_size(self) -> int:
        """Samples of a call of backward."""
        match self.batches.source:
            case FromLoader(loader):
                return batch_size_of(loader)
            case FromRows():
                return len(self.batches.first[0])
            case FromCall():
                return num_samples_in(self.batches.first)

    @property
    def boxes(self) -> bool:
        """True if its batches are dictionaries of a library's own kind, such as a tokenizer's: a study passes plain ones on."""
        return isinstance(self.batches.first, UserDict)

    @property
    def num_micro_batches(self) -> int:
        """Of an optimizer step."""
        return max(1, self.seen.steps[-1].num_backwards)  # the first step of some comes too early

    @property
    def is_averaged(self) -> bool:
        """True if the gradient of a step is the mean of those of its micro-batches, or there is a single one."""
        if self.num_micro_batches == 1 or self.loss is None or self.loss.factor != self.seen.backward.scaled_by:
            return True
        return self.loss.divided_by > 1

    @property
    def times(self) -> float:
        """By what the statements' loss is multiplied to be that of its micro-batch alone."""
        assert self.loss is not None
        return float(self.loss.divided_by)


def names_around(place: Place) -> Iterator[tuple[str, Any]]:
    """Yield the names at a place of the script, and what they stand for: with the attributes of what trains, and what is in dictionaries."""
    yield from place.global_.items()
    yield from place.local.items()
    for value in [*place.global_.values(), *place.local.values()]:
        if type(value) is dict:  # `loaders["val"]`
            yield from ((str(key), one) for key, one in value.items() if isinstance(one, DataLoader))
    for value in list(place.local.values()):  # the loaders of a class that trains
        if not isinstance(value, nn.Module) and hasattr(value, "__dict__"):
            yield from vars(value).items()


class _OfScript(nn.Module):
    """inner: a copy of what the script trains."""

    def __init__(self, loop: Loop) -> None:
        super().__init__()
        copies = Copies(loop.seen)
        modules = list(copies.modules.values())
        self.inner = modules[0] if len(modules) == 1 else nn.ModuleList(modules)
        without_own_checkpointing(self.inner)
        # Not told to who asks what a model is made of: all the names of the script hang on them.
        self._held, self._copies = _Held(loop), copies
        copies.put_in_use(loop.seen)
        weakref.finalize(self, give_back, loop.seen, copies.number)

    @property
    def loop(self) -> Loop:
        return self._held.one

    def train(self, mode: bool = True) -> Self:
        """As of any module, but what the script trains in evaluation mode stays so."""
        super().train(mode)
        if mode and hasattr(self, "_copies"):
            for key, parts in self._copies.parts.items():
                for part, was_training in zip(parts, self.loop.seen.modes[key], strict=True):
                    part.training = was_training
        return self


class WithoutLoss(_OfScript):
    """What the script trains, for a loss that is not the script's: it is called, and has attributes, as the script's own."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        self._copies.put_in_use(self.loop.seen)
        return self.inner(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            inner = super().__getattr__("inner")  # not by this method again, before it is there
            return getattr(inner, name)


class OfLoop(_OfScript, TakesBatch):
    """Called with a batch, it returns the loss that the script computes of it."""

    def __init__(self, loop: Loop) -> None:
        super().__init__(loop)
        assert loop.loss is not None
        self.loss_of_batch = loop.loss.call

    def forward(self, batch: Any) -> Any:
        loop = self.loop
        self._copies.put_in_use(loop.seen)
        loss = self.loss_of_batch(type(loop.batches.first)(batch) if loop.boxes else batch) * loop.times
        loss = loss.reshape(()) if loss.numel() == 1 else loss  # backward takes a tensor of one number, too
        if not loop.sums:
            return loss
        return loss, torch.tensor(num_samples_in(batch), device=loss.device)


@dataclass
class _Held:
    """Not a part of the module, and not copied with it."""

    one: Loop

    def __deepcopy__(self, memo: dict[int, Any]) -> _Held:
        return self


def groups(model: OfLoop | WithoutLoss) -> list[dict[str, Any]]:
    """Return the groups of the script's optimizer, of the parameters of this copy."""
    loop = model.loop
    ours = {id(own): again for own, again in model._copies.of_parameters(loop.seen)}
    return [
        {**group, "params": [ours[id(one)] for one in group["params"] if id(one) in ours]}
        for group in groups_of(loop.optimizer)
    ]
