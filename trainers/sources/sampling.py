"""Which samples of its set a DataLoader goes through. When they come is the study's to say, as long as none is preferred."""

from __future__ import annotations

import itertools
import math
import operator
import statistics
from collections.abc import Iterable, Sequence
from typing import Any

from torch.utils.data import (
    BatchSampler,
    DataLoader,
    RandomSampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)

from batchscout.trainers.sources.settings import num_samples_of

IN_ANY_ORDER = (
    "RandomSampler",
    "SequentialSampler",
    "SeedableRandomSampler",
    "LengthGroupedSampler",
    "DistributedSampler",
)
_TELLING = 4.0
"""A correlation so many times as far from 0 as the usual one of two shuffles, whose standard deviation is 1 / sqrt(samples - 1)."""


def places_of(loader: DataLoader[Any], where: str = "its DataLoader") -> Sequence[int]:
    """Return the indices of the samples that a loader goes through, each once. where: the loader, in words.

    Raises ValueError where it prefers some, or means their order.
    """
    sampler, number = sampler_of(loader), num_samples_of(loader.dataset) or 0
    name = type(sampler).__name__
    if isinstance(sampler, RandomSampler) and sampler.replacement:
        name += "(replacement=True)"
    elif isinstance(sampler, RandomSampler) and sampler.num_samples < number:
        name += f"(num_samples={sampler.num_samples})"
    elif isinstance(sampler, RandomSampler | SequentialSampler) or name in IN_ANY_ORDER:
        return range(number)
    elif isinstance(sampler, SubsetRandomSampler):
        return sorted(map(int, sampler.indices))
    elif not isinstance(sampler, WeightedRandomSampler) and (shuffled := _shuffled(sampler, number)) is not None:
        return shuffled
    raise ValueError(
        f"{where} chooses its samples by a {name}, and every batch of a study must see the same samples in the same order; let "
        "the data set hold the samples as often as they are to come, and leave the sampler out"
    )


def sampler_of(loader: DataLoader[Any]) -> Any:
    """Return what chooses a loader's samples: where batches are chosen, what stands within that. `loader.sampler` is then one that torch
    has made and does not use. accelerate makes all its loaders so."""
    return getattr(_batches_of(loader), "sampler", loader.sampler)


def whole_of(loader: DataLoader[Any]) -> Any:
    """Return the set that a loader of the user's own reads, where it was made anew for a part of that, too."""
    return getattr(loader, "whole", loader.dataset)


def _batches_of(loader: DataLoader[Any]) -> Any:
    batches: Any = loader.batch_sampler
    while hasattr(batches, "batch_sampler"):  # accelerate's, around torch's
        batches = batches.batch_sampler
    return batches


def refuse_batches_of_its_own(loader: Any, where: str) -> None:
    """Raise ValueError where not a number of samples makes a batch, which is what a study is to choose."""
    batches = _batches_of(loader)
    if batches is None:
        raise ValueError(
            f"{where} has batch_size=None, so its data set makes the batches, and a study chooses how many samples one has; let the set hold "
            "single samples, and give the DataLoader a batch_size"
        )
    if type(batches) is not BatchSampler:
        raise ValueError(
            f"{where} makes its batches by a {type(batches).__name__} (batch_sampler), and a study chooses which samples are in one; leave it "
            "out, and give a batch_size. Batches of samples of about one length: micro_batch: {tokens: auto}"
        )


def _shuffled(sampler: Iterable[Any], number: int) -> list[int] | None:
    """Return the samples that each of two passes of a sampler has once, if it shuffles them; else None.

    number: of the set. Where a sample comes in the one pass must say nothing of where it comes in the other: what is easy first, or
    likelier first, is an order that is meant.
    """
    # Of one without an end a pass is as many samples as the set has.
    taken = itertools.islice(itertools.chain(sampler, sampler), 2 * number)
    try:
        both = [operator.index(one) for one in taken]
    except TypeError:
        return None
    first, second = both[: len(both) // 2], both[len(both) // 2 :]
    if not first or len({*first}) < len(first) or sorted(first) != sorted(second):
        return None
    in_order = sorted(first)
    if first == second == in_order or len(first) < 2:
        return in_order
    place = {sample: turn for turn, sample in enumerate(second)}
    alike = statistics.correlation(range(len(first)), [place[sample] for sample in first])
    return in_order if abs(alike) < _TELLING / math.sqrt(len(first) - 1) else None
