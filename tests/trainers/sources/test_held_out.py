"""Every tenth sample of what has no data to validate on is held out."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import pytest
from torch.utils.data import DataLoader, IterableDataset

from batchscout.trainers.data.streams import Stream, StreamReader
from batchscout.trainers.sources.held_out import Tenths, held_out


@pytest.mark.parametrize("count", [10, 19, 25])
def test_each_sample_of_a_stream_is_trained_on_or_held_out(count: int) -> None:
    train, val = (list(Tenths(range(count), held_out=kept)) for kept in (False, True))
    assert sorted(train + val) == list(range(count))
    assert len(val) == count // 10


@pytest.mark.parametrize("kept", [False, True])
def test_a_stream_of_which_none_can_be_held_out_is_refused(kept: bool) -> None:
    with pytest.raises(ValueError, match=r"\(9, at least 10\).*; give it data to validate on"):
        list(Tenths(range(9), held_out=kept))


class Shuffled(IterableDataset[int]):
    """Files in another order whenever it begins, as the seed has it."""

    def __init__(self, *, at_once: bool) -> None:
        self.at_once = at_once

    def __iter__(self) -> Iterator[int]:
        return iter(self.drawn()) if self.at_once else (one for one in self.drawn())

    def drawn(self) -> list[int]:
        return random.sample(range(60), 60)


class Buffered(IterableDataset[int]):
    """Each sample is drawn from a buffer of the next ones."""

    def __iter__(self) -> Iterator[int]:
        buffer = list[int]()
        for one in range(60):
            buffer.append(one)
            if len(buffer) == 8:
                yield buffer.pop(random.randrange(8))
        yield from buffer


@pytest.mark.parametrize("stream", [Shuffled(at_once=True), Shuffled(at_once=False), Buffered()])
def test_what_is_held_out_of_a_stream_that_shuffles_is_trained_on_in_no_pass_and_with_no_seed(stream: Any) -> None:
    train, val = (Stream(loader.dataset, "it", loader) for loader in held_out(DataLoader(stream)))
    held = set(val.first(6))
    assert len(held) == 6
    for seed in (0, 1, 2):
        trained = StreamReader(train, 0, None, seed).take(range(162), 0)
        assert len({*trained}) == 54
        assert not held & {*trained}


class WithLength(Shuffled):
    """As Lightning and tqdm ask for."""

    def __len__(self) -> int:
        return 60


def test_of_a_stream_that_tells_its_length_every_tenth_sample_is_held_out_as_of_another() -> None:
    train, val = held_out(DataLoader(WithLength(at_once=True)))
    assert (len(list(train)), len(list(val))) == (54, 6)


@pytest.mark.parametrize("own", [{"batch_sampler": [[0, 1], [2, 3]] * 20}, {"batch_size": None}])
def test_batches_that_a_loader_makes_itself_are_refused(own: dict[str, Any]) -> None:
    samples: Any = range(40)
    with pytest.raises(
        ValueError, match=r"batch_sampler\).*; leave it out|batch_size=None.*give the DataLoader a batch_size"
    ):
        held_out(DataLoader(samples, **own))


def test_a_single_sample_is_refused() -> None:
    samples: Any = [1]
    with pytest.raises(ValueError, match=r"\(1, at least 2\).*; give it data to validate on"):
        held_out(DataLoader(samples))
