"""Sets that a feed reads: ones that draw random numbers, that fail, that are slow, and streams."""

from __future__ import annotations

import os
import random
import signal
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, IterableDataset

from tests.support.tiny import Samples, data

Sample = dict[str, Tensor]


class Drawing(Dataset[Sample]):
    """Moves each sample's tokens by numbers that are drawn from each generator that data sets draw from."""

    def __init__(self, samples: Samples) -> None:
        self.samples, self.vocab_size, self.seq_len = samples, samples.vocab_size, samples.seq_len

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int) -> Sample:
        return drawn(self.samples[index], self.vocab_size)


def drawn(sample: Sample, vocab_size: int) -> Sample:
    shift = torch.randint(3, ()) + int(np.random.randint(3)) + random.randrange(3)
    return sample | {"input_ids": (sample["input_ids"] + shift) % vocab_size}


def drawing(num_train: int = 64) -> tuple[Drawing, Samples]:
    train, val = data(num_train=num_train)
    return Drawing(train), val


class Failing(Drawing):
    """What goes wrong at sample 5."""

    def __init__(self, samples: Samples, how: str) -> None:
        super().__init__(samples)
        self.how = how

    def __getitem__(self, index: int) -> Sample:
        if index == 5 and self.how == "raises":
            raise KeyError("label")
        if index == 5 and self.how == "raises, and has run out of memory":
            raise RuntimeError("DefaultCPUAllocator: can't allocate memory")
        if index == 5 and self.how == "exits":
            os._exit(3)
        if index == 5 and self.how == "is killed":
            os.kill(os.getpid(), signal.SIGKILL)
        return self.samples[index]


def failing(how: str) -> tuple[Failing, Samples]:
    train, val = data()
    return Failing(train, how), val


class Slow(Drawing):
    def __init__(self, samples: Samples, seconds: float) -> None:
        super().__init__(samples)
        self.seconds = seconds

    def __getitem__(self, index: int) -> Sample:
        time.sleep(self.seconds)
        return self.samples[index]


def slow(seconds: float) -> tuple[Slow, Samples]:
    train, val = data()
    return Slow(train, seconds), val


def loaders(num_workers: int) -> tuple[DataLoader[Sample], DataLoader[Sample]]:
    train, val = data()
    more: dict[str, Any] = {"prefetch_factor": 3} if num_workers else {}
    return DataLoader(Drawing(train), 8, num_workers=num_workers, **more), DataLoader(Drawing(val), 8)


class Stream(IterableDataset[Sample]):
    """The samples of `tiny.data` as they come, each moved by numbers that are drawn."""

    def __init__(self, samples: Samples) -> None:
        self.samples, self.vocab_size, self.seq_len = samples, samples.vocab_size, samples.seq_len

    def __iter__(self) -> Iterator[Sample]:
        for sample in self.samples:
            yield drawn(sample, self.vocab_size)


class Resumable(Stream):
    """Says where it is, and notes what it was read from the beginning for."""

    def __init__(self, samples: Samples) -> None:
        super().__init__(samples)
        self.taken = 0

    def __iter__(self) -> Iterator[Sample]:
        for number in range(self.taken, len(self.samples)):
            self.taken = number + 1
            yield drawn(self.samples[number], self.vocab_size)

    def state_dict(self) -> dict[str, int]:
        return {"taken": self.taken}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.taken = state["taken"]


class Once(Stream):
    """Has no samples when it is begun again."""

    epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[Sample]:
        yield from iter(self.samples) if self.epoch == 0 else ()


class Uneven(Stream):
    def __iter__(self) -> Iterator[Sample]:
        for number, sample in enumerate(self.samples):
            yield {name: tensor[: 5 + number % 3] for name, tensor in sample.items()}


class GoesOn(Stream):
    """Has one iterator, as of a file that was opened when it was made."""

    def __init__(self, samples: Samples) -> None:
        super().__init__(samples)
        self.left = iter(samples)

    def __iter__(self) -> Iterator[Sample]:
        yield from self.left


class Shuffled(Stream):
    """Draws its order from a generator of its own."""

    def __init__(self, samples: Samples) -> None:
        super().__init__(samples)
        self.random = random.Random(0)

    def __iter__(self) -> Iterator[Sample]:
        yield from self.random.sample(self.samples, len(self.samples))


class OwnGenerator(Drawing):
    """Masks what it reads by a generator of its own."""

    def __init__(self, samples: Samples) -> None:
        super().__init__(samples)
        self.random = random.Random(0)

    def __getitem__(self, index: int) -> Sample:
        sample = self.samples[index]
        return {**sample, "input_ids": sample["input_ids"] * self.random.randint(0, 1)}


def with_its_own_generator(of: str) -> tuple[Any, Any]:
    train, val = data()
    own = {"train": train, "val": val} | {of: OwnGenerator(train if of == "train" else val)}
    return own["train"], own["val"]


def streams(kind: str = "plain", num_train: int = 200) -> tuple[Any, Any]:
    """(train, val), of which val is a stream, too."""
    train, val = data(num_train=num_train)
    of_kind: dict[str, type[Stream]] = {
        "plain": Stream,
        "resumable": Resumable,
        "once": Once,
        "uneven": Uneven,
        "goes on": GoesOn,
        "shuffled": Shuffled,
    }
    if kind == "generator":
        return (sample for sample in train), val
    if kind == "empty":
        train.clear()
        kind = "plain"
    return of_kind[kind](train), Stream(val)


def of_library(num_train: int = 200, shuffled: bool = False, buffer_size: int = 16) -> tuple[Any, Any]:
    """Streams of the library datasets, over 4 shards."""
    import datasets

    found = []
    for samples in data(num_train=num_train):
        rows = datasets.Dataset.from_list([{key: value.tolist() for key, value in one.items()} for one in samples])
        stream: Any = rows.to_iterable_dataset(num_shards=4).with_format("torch")
        found.append(stream.shuffle(seed=7, buffer_size=buffer_size) if shuffled else stream)
    return found[0], found[1]


def split_by_rank() -> tuple[Any, Any]:
    from datasets.distributed import split_dataset_by_node

    train, val = of_library()
    return split_dataset_by_node(train, rank=0, world_size=2), val
