"""What a DataLoader says beside its samples is kept, or refused by its name; nothing of it is dropped."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterator, Sized
from typing import Any, cast

import datasets
import numpy as np
import pytest
import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    IterableDataset,
    RandomSampler,
    Sampler,
    SequentialSampler,
    SubsetRandomSampler,
    TensorDataset,
    WeightedRandomSampler,
)

from batchscout.trainers.before.digests import digests_of_data
from batchscout.trainers.before.first_pass import lengths_not_taken
from batchscout.trainers.data.batches import fetch
from batchscout.trainers.data.loaders import Loaded, read_by
from batchscout.trainers.data.order import longest
from batchscout.trainers.data.samples import loaded
from batchscout.trainers.sources.watch.batches import draws_at_will, num_samples_in_pass, validation_loader

SAMPLES = TensorDataset(torch.arange(12))
MANY = TensorDataset(torch.arange(400))


class ByLength(BatchSampler):
    """One of the user's own."""


class OfOnesOwn(Sampler[int]):
    def __init__(self, samples: Sized) -> None:
        self.chance, self.number = random.Random(0), len(samples)

    def shuffled(self) -> list[int]:
        return self.chance.sample(range(self.number), self.number)

    def __iter__(self) -> Iterator[int]:
        return iter(self.shuffled())


class EasyFirst(OfOnesOwn):
    """In another order in every pass, and what has a small number always among the first."""

    def __iter__(self) -> Iterator[int]:
        return iter(sorted(self.shuffled(), key=lambda place: place + 100 * self.chance.random()))


class RandomPart(OfOnesOwn):
    """Another half of the set in every pass."""

    def __iter__(self) -> Iterator[int]:
        return iter(self.shuffled()[: self.number // 2])


class WithoutAnEnd(OfOnesOwn):
    def __iter__(self) -> Iterator[int]:
        return itertools.chain.from_iterable(self.shuffled() for _ in itertools.count())


class Batches(IterableDataset[torch.Tensor]):
    def __iter__(self) -> Iterator[torch.Tensor]:
        yield torch.zeros(4, 2)


def in_batches(sampler: Any, samples: Any = SAMPLES) -> DataLoader[Any]:
    return DataLoader(samples, batch_sampler=BatchSampler(sampler, 4, drop_last=True))


def prepared(sampler: Any, samples: Any = SAMPLES) -> DataLoader[Any]:
    """As accelerate makes a loader anew, which a Trainer has it do, too."""
    accelerate = pytest.importorskip("accelerate")
    return accelerate.Accelerator(cpu=True).prepare(DataLoader(samples, 4, sampler=sampler)).base_dataloader


def loader(**settings: Any) -> Callable[[], DataLoader[Any]]:
    return lambda: DataLoader(settings.pop("samples", SAMPLES), **settings)


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (loader(batch_sampler=ByLength(SequentialSampler(SAMPLES), 4, False)), r"makes its batches by a ByLength \(batch_sampler\)"),
        (loader(batch_sampler=[[0, 1], [2]]), r"makes its batches by a list \(batch_sampler\)"),
        (loader(batch_size=None), "has batch_size=None, so its data set makes the batches"),
        (loader(samples=Batches(), batch_size=None), "has batch_size=None, so its data set makes the batches"),
        (loader(sampler=WeightedRandomSampler(range(1, 13), 12)), "chooses its samples by a WeightedRandomSampler"),
        (loader(samples=MANY, sampler=WeightedRandomSampler(range(1, 1 + len(MANY)), len(MANY), replacement=False)), "chooses its samples by a WeightedRandomSampler"),
        (loader(samples=MANY, sampler=EasyFirst(MANY)), "chooses its samples by a EasyFirst"),
        (loader(samples=MANY, sampler=[*range(len(MANY)), 0]), "chooses its samples by a list"),
        (loader(samples=MANY, sampler=RandomPart(MANY)), "chooses its samples by a RandomPart"),
        (loader(sampler=RandomSampler(SAMPLES, replacement=True)), r"chooses its samples by a RandomSampler\(replacement=True\)"),
        (loader(sampler=RandomSampler(SAMPLES, num_samples=4)), r"chooses its samples by a RandomSampler\(num_samples=4\)"),
    ],
)  # fmt: skip
def test_what_a_study_cannot_do_in_its_place_is_refused_by_name(make: Callable[[], DataLoader[Any]], said: str) -> None:
    with pytest.raises(ValueError, match=f"^the loader {said}"):
        read_by(make(), "the loader")


@pytest.mark.parametrize("made", [in_batches, prepared])
@pytest.mark.parametrize(
    ("sampler", "name"),
    [
        (WeightedRandomSampler(range(1, 13), 12), "WeightedRandomSampler"),
        (RandomSampler(SAMPLES, replacement=True), r"\w*RandomSampler\(replacement=True\)"),
        (RandomPart(SAMPLES), "RandomPart"),
    ],
)
def test_samples_that_are_chosen_within_batches_are_refused_alike(
    made: Callable[..., DataLoader[Any]], sampler: Any, name: str
) -> None:
    with pytest.raises(ValueError, match=f"^the loader chooses its samples by a {name}, "):
        read_by(made(sampler), "the loader")


@pytest.mark.parametrize("made", [in_batches, prepared])
def test_parts_of_a_set_stay_apart_within_batches(made: Callable[..., DataLoader[Any]]) -> None:
    train, val = made(SubsetRandomSampler(range(8))), made(SubsetRandomSampler(range(8, 12)))
    parts = [read_by(one, "the loader") for one in (train, val)]
    assert [[int(row) for (row,) in cast(Loaded, part)] for part in parts] == [[*range(8)], [*range(8, 12)]]
    assert num_samples_in_pass(train) == 8
    assert validation_loader(train, [train, val], {"val_loader": val}) is val
    assert not draws_at_will(train)
    assert draws_at_will(made(RandomSampler(SAMPLES, replacement=True)))
    assert num_samples_in_pass(made(RandomSampler(SAMPLES, num_samples=4))) == 4


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


@pytest.mark.parametrize("make", [OfOnesOwn, WithoutAnEnd, lambda samples: range(len(samples))])
def test_a_sampler_of_ones_own_that_prefers_no_sample_is_a_shuffle(make: Callable[[Sized], Any]) -> None:
    found = read_by(DataLoader(MANY, sampler=make(MANY)), "the loader")
    assert isinstance(found, Loaded)
    assert [int(found[place][0]) for place in range(len(found))] == list(range(len(MANY)))


def test_of_a_part_of_a_set_a_study_takes_that_part_with_its_lengths() -> None:
    samples = TensorDataset(torch.arange(12))
    samples.lengths, samples.content_hash = list(range(1, 13)), "that of the whole"  # pyright: ignore[reportAttributeAccessIssue]
    found = read_by(DataLoader(samples, sampler=SubsetRandomSampler([7, 2, 5])), "the loader")
    assert isinstance(found, Loaded)
    assert [int(found[place][0]) for place in range(len(found))] == [2, 5, 7]
    assert found.lengths == [3, 6, 8]
    assert not hasattr(found, "content_hash")


OTHER_LENGTHS: list[Any] = [
    [5, 7],
    [*range(20)],
    {"a": 3},
    lambda: 12,
    12,
    ["a"] * 12,
    [[1]] * 12,
    {place: place for place in range(12)},
]


@pytest.mark.parametrize("lengths", OTHER_LENGTHS, ids=lambda one: type(one).__name__)
@pytest.mark.parametrize(
    "made",
    [lambda samples: samples, DataLoader, lambda samples: DataLoader(samples, sampler=SubsetRandomSampler([3, 1]))],
)
def test_lengths_of_another_meaning_are_not_taken_for_those_of_the_samples(
    made: Callable[[Any], Any], lengths: Any
) -> None:
    """As of a set of windows, the lengths of its files."""
    samples: Any = TensorDataset(torch.arange(12))
    samples.lengths, samples.seq_len = lengths, 9
    train, val = loaded((made(samples), made(samples)), "mine:data")
    assert not hasattr(train, "lengths")
    assert len(longest(cast(Any, train), 2)) == 2
    assert fetch(cast(Any, train), [0, 1])[0].tolist() == ([1, 3] if len(cast(Any, train)) == 2 else [0, 1])
    assert "have `lengths` that are not one number for each" in (
        lengths_not_taken({"training": cast(Any, train), "validation": cast(Any, val)}) or ""
    )


@pytest.mark.parametrize("lengths", [list(range(1, 13)), torch.arange(12), np.arange(12.0)], ids=str)
def test_one_number_for_each_sample_is_how_long_it_is(lengths: Any) -> None:
    samples: Any = TensorDataset(torch.arange(12))
    samples.lengths = lengths
    train, val = loaded((samples, samples), "mine:data")
    assert longest(cast(Any, train), 2) == [11, 10]
    assert not lengths_not_taken({"training": cast(Any, train), "validation": cast(Any, val)})


def test_a_set_of_datasets_is_known_by_what_it_holds_and_not_by_a_fingerprint_that_each_process_makes_anew() -> None:
    """That of a map hashes a pickled function, a tokenizer with it, whose sets have another order in every process."""

    def digests(fingerprint: str, rows: list[int]) -> dict[str, str]:
        held = datasets.Dataset.from_list([{"row": row} for row in rows])
        mapped = held.map(lambda one: {"row": one["row"] + 1}, new_fingerprint=fingerprint)
        found = read_by(DataLoader(cast(Any, mapped), batch_size=2), "the loader")
        assert isinstance(found, Loaded)
        return digests_of_data(found, found)

    assert digests("one", [1, 2, 3]) == digests("another", [1, 2, 3])
    assert digests("one", [1, 2, 3]) != digests("one", [1, 2, 4])
