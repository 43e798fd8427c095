"""What a DataLoader says beside its samples is kept, or refused by its name; nothing of it is dropped."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    SubsetRandomSampler,
    TensorDataset,
)

from batchscout.trainers.data.loaders import Loaded, read_by

SAMPLES = TensorDataset(torch.arange(12))


class ByLength(BatchSampler):
    """One of the user's own."""


class Batches(IterableDataset[torch.Tensor]):
    def __iter__(self) -> Iterator[torch.Tensor]:
        yield torch.zeros(4, 2)


def loader(**settings: Any) -> Callable[[], DataLoader[Any]]:
    return lambda: DataLoader(settings.pop("samples", SAMPLES), **settings)


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (loader(batch_sampler=ByLength(SequentialSampler(SAMPLES), 4, False)), r"makes its batches by a ByLength \(batch_sampler\)"),
        (loader(batch_sampler=[[0, 1], [2]]), r"makes its batches by a list \(batch_sampler\)"),
        (loader(batch_size=None), "has batch_size=None, so its data set makes the batches"),
        (loader(samples=Batches(), batch_size=None), "has batch_size=None, so its data set makes the batches"),
        (loader(sampler=SubsetRandomSampler(range(4))), "chooses its samples by a SubsetRandomSampler"),
        (loader(sampler=RandomSampler(SAMPLES, replacement=True)), r"chooses its samples by a RandomSampler\(replacement=True\)"),
        (loader(sampler=RandomSampler(SAMPLES, num_samples=4)), r"chooses its samples by a RandomSampler\(num_samples=4\)"),
    ],
)  # fmt: skip
def test_what_a_study_cannot_do_in_its_place_is_refused_by_name(make: Callable[[], DataLoader[Any]], said: str) -> None:
    with pytest.raises(ValueError, match=f"^the loader {said}"):
        read_by(make(), "the loader")


@pytest.mark.parametrize(
    "settings",
    [
        {"batch_size": 4, "shuffle": True, "drop_last": True},
        {"batch_size": 4},
        {"batch_sampler": BatchSampler(SequentialSampler(SAMPLES), 4, drop_last=False)},
        {"sampler": RandomSampler(SAMPLES)},
    ],
)
def test_an_order_and_a_number_of_samples_are_the_studys_to_choose(settings: dict[str, Any]) -> None:
    found = read_by(DataLoader(SAMPLES, **settings), "the loader")
    assert isinstance(found, Loaded)
    assert len(found) == len(SAMPLES)
