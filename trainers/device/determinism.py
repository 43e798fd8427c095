"""The same bits each time, on a GPU as well: where sums are taken in any order, a resumed run differs by their rounding."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator

import torch

CUBLAS_ENVIRONMENT = {"CUBLAS_WORKSPACE_CONFIG": ":4096:8"}
"""cuBLAS reads it with its first handle, and torch looks once in a process whether it was there: where it was not, deterministic
products are refused. So lanes have it from their start."""


@contextlib.contextmanager
def deterministic(on: bool) -> Iterator[None]:
    """Let torch and its compiler use only algorithms that give the same bits each time; off: whatever is fastest.

    Raises torch's RuntimeError, which names the operation, where there is no such algorithm.
    """
    if not on:
        yield
        return
    from torch._inductor import config as inductor  # here, as it takes a second that eager runs need not spend

    for name, value in CUBLAS_ENVIRONMENT.items():  # a process that belongs to no lane has it from here
        os.environ.setdefault(name, value)
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True)
    try:
        with inductor.patch(deterministic=True):  # kernels are chosen by rule, not by timings that differ each time
            yield
    finally:
        torch.use_deterministic_algorithms(before)
