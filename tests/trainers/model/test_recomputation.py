"""A block that is run again must give the same, or it is not checkpointed: the gradient would be wrong, without a word."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.parametrizations import spectral_norm

from batchscout.trainers.model.activation_checkpointing import apply_to_blocks
from batchscout.trainers.model.recomputation import BlocksAgain
from tests.support.tiny import config

SIZE = 16


class Block(nn.Module):
    """A layer with dropout, which torch's random numbers make."""

    def __init__(self) -> None:
        super().__init__()
        self.layer: nn.Module = nn.Sequential(nn.Linear(SIZE, SIZE), nn.Tanh(), nn.Dropout(0.1))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.layer(x)


class Normed(Block):
    """BatchNorm's statistics change, and what it returns does not depend on them."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(SIZE)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(super().forward(x))


class Cached(Block):
    """What it keeps for the next forward is the same as it would make."""

    def forward(self, x: Tensor) -> Tensor:
        self.kept = torch.arange(SIZE)
        return super().forward(x) + self.kept


class Spectral(Block):
    def __init__(self) -> None:
        super().__init__()
        self.layer = spectral_norm(nn.Linear(SIZE, SIZE))


class OldSpectral(Block):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.utils.spectral_norm(nn.Linear(SIZE, SIZE))


class Averaging(Block):
    mean: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(SIZE))

    def forward(self, x: Tensor) -> Tensor:
        self.mean.mul_(0.9).add_(x.detach().mean(0), alpha=0.1)
        return super().forward(x) - self.mean.clone()


class LayerDrop(Block):
    def forward(self, x: Tensor) -> Tensor:
        return x if random.random() < 0.1 else super().forward(x)


class NumpyNoise(Block):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x * float(np.random.rand()))


class OwnGenerator(Block):
    def __init__(self) -> None:
        super().__init__()
        self.generator = torch.Generator()

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x * torch.rand(SIZE, generator=self.generator))


class RarelyLeftOut(Block):
    """In a first run and one more the three blocks of a model are kept in every second case."""

    def __init__(self) -> None:
        super().__init__()
        self.generator = random.Random(1)

    def forward(self, x: Tensor) -> Tensor:
        return x if self.generator.random() < 0.1 else super().forward(x)


class Counting(Block):
    count = 0

    def forward(self, x: Tensor) -> Tensor:
        self.count += 1
        return super().forward(x) * self.count


class OnlyOnce(Block):
    done = False

    def forward(self, x: Tensor) -> Tensor:
        if self.done:
            raise RuntimeError("it is done")
        self.done = True
        return super().forward(x)


SAME = [Block, Normed, Cached]
OTHER = [
    (Spectral, "changes something that it reads"), (OldSpectral, "changes something that it reads"),
    (Averaging, "changes something that it reads"), (OwnGenerator, "changes something that it reads"),
    (RarelyLeftOut, "changes something that it reads"),
    (Counting, "changes something that it reads"), (LayerDrop, "it draws random numbers of Python's `random` or of NumPy"),
    (NumpyNoise, "it draws random numbers of Python's `random` or of NumPy"), (OnlyOnce, "it raises RuntimeError: it is done"),
]  # fmt: skip


class Stack(nn.Module):
    def __init__(self, block: type[Block]) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(block() for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x.square().sum()


def seeded(block: type[Block]) -> tuple[Stack, Tensor]:
    torch.manual_seed(0)
    random.seed(0)
    np.random.seed(0)
    return Stack(block).train(), torch.randn(8, SIZE)


def differed(block: type[Block]) -> str | None:
    module, x = seeded(block)
    again = BlocksAgain(module, None)
    with again.watched():
        module(x).backward()
    assert not any(one._forward_hooks or one._forward_pre_hooks for one in module.blocks)
    return again.differed


def gradient(block: type[Block], mode: Any) -> Tensor:
    """The second step's: what a first forward has changed, the second one reads."""
    module, x = seeded(block)
    module = apply_to_blocks(module, config(activation_checkpointing=mode, compile=False))
    for _ in range(2):
        module.zero_grad()
        module(x).backward()
    return torch.cat([parameter.grad.flatten() for parameter in module.parameters() if parameter.grad is not None])


@pytest.mark.parametrize("block", SAME)
def test_a_block_that_gives_the_same_again_has_the_same_gradient_when_it_is_recomputed(block: type[Block]) -> None:
    assert differed(block) is None
    assert torch.equal(gradient(block, "full"), gradient(block, "none"))


@pytest.mark.parametrize(("block", "said"), OTHER)
def test_a_block_that_gives_something_else_is_told_with_what_it_does(block: type[Block], said: str) -> None:
    assert said in (differed(block) or "")


@pytest.mark.parametrize("block", [Spectral, OldSpectral, Averaging, OwnGenerator, Counting, NumpyNoise])
def test_its_gradient_would_be_wrong(block: type[Block]) -> None:
    """What the check is for: if torch restores this one day, the mode need not be left out."""
    right, wrong = gradient(block, "none"), gradient(block, "full")
    assert (wrong - right).norm() > 1e-4 * right.norm()


def test_torchs_random_numbers_go_on_as_if_no_block_had_run_again() -> None:
    module, x = seeded(Block)
    with BlocksAgain(module, None).watched():
        watched = module(x)
    module, x = seeded(Block)
    assert torch.equal(watched, module(x))
