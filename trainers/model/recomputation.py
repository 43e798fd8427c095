"""Whether the blocks of a model give the same again, as activation checkpointing has them do in the backward pass.

torch gives a recomputation the random numbers of its forward again, and nothing else: not the buffers and attributes that the
forward has changed (spectral norm, averages over batches), nor the random numbers of Python, of NumPy or of a generator of
the model's own. The gradient is then that of another function, and nothing says so.
"""

from __future__ import annotations

import contextlib
import random
import time
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from batchscout.trainers.data.batches import leaves
from batchscout.trainers.device.out_of_memory import is_out_of_memory
from batchscout.trainers.errors import raised_text
from batchscout.trainers.model.adding_up import cuda_devices
from batchscout.trainers.model.blocks import find_blocks

SAME_WITHIN, SAME_WITHIN_ON_A_GPU = 1e-6, 1e-5
"""The same operations on the same numbers give the same; but a GPU's threads may add in any order."""
TIMES_AGAIN, SECONDS_AGAIN = 16, 0.1
"""Of each block, as far as time allows, and once at the least."""


class BlocksAgain:
    """Runs each block of a model again behind every forward, some times on the same input and torch's same random numbers, until one
    differs: what is drawn may leave a layer out rarely."""

    def __init__(self, module: nn.Module, names: str | Iterable[str] | None) -> None:
        """names: of the containers of the blocks, as in the study file."""
        self.differed: str | None = None
        """How the second result was another one, in words; None where it was none."""
        self._modules = {id(block.module): block.module for block in find_blocks(module, names)}.values()
        self._devices = cuda_devices(module)
        self._entered: list[tuple[list[Tensor], object]] = []
        self._is_again = False

    @contextlib.contextmanager
    def watched(self) -> Iterator[None]:
        """Do it to all forwards within this."""
        with contextlib.ExitStack() as hooks:
            for block in self._modules:
                hooks.callback(block.register_forward_pre_hook(self._before).remove)
                hooks.callback(block.register_forward_hook(self._after, with_kwargs=True).remove)
            yield

    def _before(self, block: nn.Module, args: tuple[Any, ...]) -> None:
        if not self._is_again:
            torchs = [torch.get_rng_state(), *map(torch.cuda.get_rng_state, self._devices)]
            self._entered.append((torchs, _other_random_states()))

    def _after(self, block: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        if self._is_again:
            return
        torchs, others = self._entered.pop()
        if self.differed is not None:
            return
        if others != _other_random_states():
            self.differed = "it draws random numbers of Python's `random` or of NumPy, and would draw others"
            return
        first = _floats(output)
        self._is_again = True
        try:
            apart, ends = 0.0, time.monotonic() + SECONDS_AGAIN
            for _ in range(TIMES_AGAIN):
                with _random_states_set(torchs, self._devices):
                    apart = max(apart, _apart(first, _floats(block(*args, **kwargs))))
                if time.monotonic() > ends:
                    break
        except Exception as error:
            if is_out_of_memory(error):
                raise
            self.differed = f"it raises {raised_text(error)}"
        else:
            if apart > (SAME_WITHIN_ON_A_GPU if self._devices else SAME_WITHIN):
                self.differed = (
                    f"its result is {apart:.2g} of its length away from the first, so its forward changes something that it reads (a buffer, an "
                    "attribute, a generator of its own)"
                )
        finally:
            self._is_again = False


def _floats(output: Any) -> list[Tensor]:
    tensors = [leaf for leaf in leaves(output) if isinstance(leaf, Tensor)]
    return [tensor.detach().clone() for tensor in tensors if tensor.is_floating_point()]


def _apart(first: list[Tensor], again: list[Tensor]) -> float:
    """Return the distance of two results over the length of the first; 0 where both are no number."""
    if [tensor.shape for tensor in first] != [tensor.shape for tensor in again]:
        return float("inf")
    pairs = [(one.double().nan_to_num(), other.double().nan_to_num()) for one, other in zip(first, again, strict=True)]
    length = sum(one.square().sum().item() for one, _ in pairs) ** 0.5
    distance = sum((one - other).square().sum().item() for one, other in pairs) ** 0.5
    return distance / length if length else distance


def _other_random_states() -> object:
    of_numpy: Any = np.random.get_state()
    return random.getstate(), of_numpy[1].tobytes(), of_numpy[2:]


@contextlib.contextmanager
def _random_states_set(states: list[Tensor], devices: list[torch.device]) -> Iterator[None]:
    with torch.random.fork_rng(devices):
        torch.set_rng_state(states[0])
        for device, state in zip(devices, states[1:], strict=True):
            torch.cuda.set_rng_state(state, device)
        yield
