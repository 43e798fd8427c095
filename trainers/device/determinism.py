"""The same bits each time, on a GPU as well: where sums are taken in any order, a resumed run differs by their rounding."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator

import torch


@contextlib.contextmanager
def deterministic(on: bool) -> Iterator[None]:
    """Let torch and its compiler use only algorithms that give the same bits each time; off: whatever is fastest.

    Raises torch's RuntimeError, which names the operation, where there is no such algorithm.
    """
    if not on:
        yield
        return
    from torch._inductor import config as inductor  # here, as it takes a second that eager runs need not spend

    # cuBLAS reads it with its first handle, and torch refuses to multiply without it.
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True)
    try:
        with inductor.patch(deterministic=True):  # kernels are chosen by rule, not by timings that differ each time
            yield
    finally:
        torch.use_deterministic_algorithms(before)
