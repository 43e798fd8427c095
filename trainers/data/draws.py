"""Random numbers as a function of what they are for. Those that a data set draws (crops, noise, masks) are the same whoever fetches the
sample and when; those that an optimizer draws, on every rank."""

from __future__ import annotations

import contextlib
import hashlib
import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch


def seed_of(*what: int) -> int:
    """Return a seed of 32 bits that these numbers decide."""
    return int.from_bytes(hashlib.sha256(" ".join(map(str, what)).encode()).digest()[:4], "big")


def draw_from(seed: int) -> None:
    """Let torch, numpy and Python draw on the host what this seed decides."""
    torch.default_generator.manual_seed(seed)
    np.random.seed(seed)
    random.seed(seed)


_numpy_random: Any = np.random  # its stubs do not know of the two functions that are used here
_APART = np.random.MT19937()
"""What numpy draws from meanwhile: to copy the state of its own takes longer than to read a small batch."""


@contextlib.contextmanager
def drawing_apart() -> Iterator[None]:
    """Leave the generators as they were before this block: the run draws its dropout from torch's."""
    of_torch, of_numpy, of_python = torch.get_rng_state(), _numpy_random.get_bit_generator(), random.getstate()
    _numpy_random.set_bit_generator(_APART)
    try:
        yield
    finally:
        torch.set_rng_state(of_torch)
        _numpy_random.set_bit_generator(of_numpy)
        random.setstate(of_python)


@contextlib.contextmanager
def drawing_from(seed: int) -> Iterator[None]:
    """Draw in this block what the seed decides, and leave the generators as they were."""
    with drawing_apart():
        draw_from(seed)
        yield


@contextlib.contextmanager
def drawing_on_device_from(seed: int, device: torch.device) -> Iterator[None]:
    """Draw in this block what the seed decides, on the host and on this process's device, and leave the generators as they were."""
    is_cuda = device.type == "cuda"
    with torch.random.fork_rng([device] if is_cuda else []), drawing_from(seed):
        if is_cuda:
            torch.cuda.manual_seed(seed)
        yield
