"""TF32: float32 products of a GPU whose factors are rounded to 10 bits of mantissa, for about eight times the speed."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch

from trainers.device.device import on_cuda


@contextlib.contextmanager
def tensor_float_32(allowed: bool) -> Iterator[None]:
    """Let products of float32 matrices and convolutions use TF32, or have none do so. A CPU is left as it is."""
    if not on_cuda():
        yield
        return
    cudnn = torch.backends.cudnn
    before = torch.get_float32_matmul_precision(), cudnn.allow_tf32
    _set("high" if allowed else "highest", allowed)
    try:
        yield
    finally:
        _set(*before)


def _set(products: str, convolutions: bool) -> None:
    torch.set_float32_matmul_precision(products)
    torch.backends.cudnn.allow_tf32 = convolutions
