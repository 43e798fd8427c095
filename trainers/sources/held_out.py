"""Training data in two, where nothing was set aside to validate on: every tenth sample is held out and only evaluated."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, IterableDataset, Subset

from batchscout.trainers.sources.sampling import places_of, refuse_batches_of_its_own, whole_of
from batchscout.trainers.sources.settings import num_samples_of

EVERY = 10
"""Of so many training samples one is held out where there are no others to validate on."""


def every_tenth(samples: Any) -> str:
    """Return, in words, what is held out of a set."""
    drawn = ", and what its stream draws, such as its order, is the same in each pass" if _is_stream(samples) else ""
    return f"every tenth sample is held out and only evaluated{drawn}"


def _is_stream(samples: Any) -> bool:
    return isinstance(samples, IterableDataset) or num_samples_of(samples) is None  # some streams tell a length


def held_out(loader: DataLoader[Any]) -> tuple[DataLoader[Any], DataLoader[Any]]:
    """Return the loader in two: its samples but every tenth, and these. Raises ValueError where there are too few, or where a study
    could not batch them."""
    refuse_batches_of_its_own(loader, "its DataLoader")
    if _is_stream(loader.dataset):
        stream = loader.dataset
        return _with_set(loader, Tenths(stream, held_out=False)), _with_set(loader, Tenths(stream, held_out=True))
    places = places_of(loader)
    if len(places) < 2:
        raise ValueError(
            f"there are no data to validate on, and too few training samples ({len(places)}, at least 2) to hold one "
            "out; give it data to validate on, too"
        )
    every = min(len(places), EVERY)
    kept = [one for n, one in enumerate(places) if n % every != every - 1]
    return of_places(loader, kept), of_places(loader, places[every - 1 :: every])


class Tenths(IterableDataset[Any]):
    """A stream without every tenth sample, or these alone. What it draws is the same in every pass and run."""

    def __init__(self, stream: Any, *, held_out: bool) -> None:
        self.stream, self.held_out = stream, held_out

    def __iter__(self) -> Iterator[Any]:
        # A stream may draw its order. In another one the samples at these places would be among those that are trained on.
        # Whoever reads it sets seeds of its own for each sample, and gives the generators back.
        _draw_from(0)
        number, samples = 0, iter(self.stream)
        while True:
            _draw_from(number + 1)
            found = list(itertools.islice(samples, 1))
            if not found:
                break
            if (number % EVERY == EVERY - 1) == self.held_out:
                yield found[0]
            number += 1
        if number < EVERY:
            raise ValueError(
                f"there are no data to validate on, and too few samples in its stream ({number}, at least {EVERY}) to "
                "hold one out; give it data to validate on, too"
            )


def _draw_from(seed: int) -> None:
    torch.default_generator.manual_seed(seed)
    np.random.seed(seed)
    random.seed(seed)


def of_places(loader: DataLoader[Any], places: Sequence[int]) -> DataLoader[Any]:
    return _with_set(loader, Subset(loader.dataset, places))


def _with_set(loader: DataLoader[Any], samples: Any) -> DataLoader[Any]:
    made = DataLoader(
        samples,
        batch_size_of(loader),
        shuffle=False,
        num_workers=loader.num_workers,
        collate_fn=loader.collate_fn,
        worker_init_fn=loader.worker_init_fn,
    )
    made.whole = whole_of(loader)  # pyright: ignore[reportAttributeAccessIssue]
    return made


def batch_size_of(loader: DataLoader[Any]) -> int:
    """Return the samples of a batch, where a sampler of batches says it, too."""
    batches: Any = loader
    while batches is not None:
        if getattr(batches, "batch_size", None):
            return int(batches.batch_size)
        batches = getattr(batches, "batch_sampler", None)
    return 1
