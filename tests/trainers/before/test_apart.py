"""Parts of one set whose samples are not apart are told, and no others."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, Subset, TensorDataset, random_split

from batchscout.trainers.before.apart import not_held_apart
from batchscout.trainers.data.samples import first_of, loaded

SERIES = torch.randn(400, 3, generator=torch.Generator().manual_seed(0))
LETTERS = torch.randint(20, (400,), generator=torch.Generator().manual_seed(0))


class Windows(Dataset[Any]):
    def __init__(self, of: Tensor, by: int = 1) -> None:
        self.of, self.by = of, by

    def __len__(self) -> int:
        return 100

    def __getitem__(self, index: int) -> Any:
        begin = index * self.by
        return {"x": self.of[begin : begin + 24].numpy(), "y": self.of[begin + 24]}


class Anywhere(Windows):
    def __getitem__(self, index: int) -> Any:
        return super().__getitem__(random.randrange(100))


def told_of(train: Any, val: Any = None) -> str:
    ours, held = (first_of(samples, 16) for samples in loaded((train, val), "mine:data"))
    return not_held_apart({"training": ours, "validation": held}) or ""


def held_out_of(samples: Any) -> tuple[Any, Any]:
    return DataLoader(samples), None


def split(samples: Any) -> tuple[Any, Any]:
    train, val = random_split(samples, [0.9, 0.1])
    return train, val


@pytest.mark.parametrize("parts", [held_out_of, split])
@pytest.mark.parametrize(
    ("samples", "said"),
    [
        (Windows(SERIES), "each sample overlaps the next"),
        (Windows(LETTERS), "each sample overlaps the next"),
        (Windows(SERIES, by=3), "each sample overlaps the next"),
        (Anywhere(SERIES), "which draws them at random whatever their index"),
    ],
)
def test_what_is_held_out_of_samples_that_overlap_is_told(parts: Callable[[Any], Any], samples: Any, said: str) -> None:
    assert said in told_of(*parts(samples))


class Noisy(Dataset[Any]):
    """Each of its samples is another, and each time with other noise."""

    def __len__(self) -> int:
        return 40

    def __getitem__(self, index: int) -> Any:
        return torch.full((8,), float(index)) + torch.randn(8)


APART = {
    "windows of their own part": lambda: (
        Subset(Windows(SERIES), range(90)),
        Subset(Windows(SERIES), range(90, 100)),
    ),
    "one piece at the end": lambda: [Subset(whole := Windows(SERIES), range(80)), Subset(whole, range(80, 100))],
    "windows side by side": lambda: held_out_of(Windows(SERIES[:, 0].repeat(8), by=24)),
    "classes in turns": lambda: held_out_of(TensorDataset(torch.eye(2).repeat(20, 1))),
    "equal samples": lambda: held_out_of(TensorDataset(torch.arange(3.0).repeat(40, 4))),
    "noise": lambda: held_out_of(Noisy()),
    "a stream": lambda: (iter_of := DataLoader(Streamed()), iter_of),
    "single numbers": lambda: held_out_of(TensorDataset(torch.arange(40.0))),
}


class Streamed(torch.utils.data.IterableDataset[Any]):
    def __iter__(self) -> Any:
        return iter(SERIES)


@pytest.mark.parametrize("name", APART)
def test_of_other_samples_nothing_is_told(name: str) -> None:
    assert not told_of(*APART[name]())
