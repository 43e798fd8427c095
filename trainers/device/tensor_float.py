"""TF32: float32 products of a GPU whose factors are rounded to 10 bits of mantissa, for about eight times the speed."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch

from batchscout.trainers.device.device import on_cuda


@contextlib.contextmanager
def tensor_float_32(allowed: bool) -> Iterator[None]:
    """Let products of float32 matrices and convolutions use TF32, or have none do so. A CPU is left as it is."""
    if not on_cuda():
        yield
        return
    products, each = _products(), [operation.fp32_precision for operation in _operations()]
    tf32_or_not = "tf32" if allowed else "ieee"
    _set("high" if allowed else "highest", [tf32_or_not] * len(each))
    try:
        yield
    finally:
        _set(products, each)


def _operations() -> tuple[Any, ...]:
    """Return those that torch's newer settings name one by one; a kernel obeys these, and the older ones set them along.
    A CPU's products are among them since the older setting is theirs, too."""
    backends: Any = torch.backends
    return backends.cudnn.conv, backends.cudnn.rnn, backends.cuda.matmul, backends.mkldnn.matmul


def _products() -> str:
    """Return torch's older setting for products. It refuses to say where a user's module has set the newer one to
    something else; then the one that agrees with the newer."""
    try:
        return torch.get_float32_matmul_precision()
    except RuntimeError:
        return "high" if torch.backends.cuda.matmul.fp32_precision == "tf32" else "highest"


def _set(products: str, each: list[str]) -> None:
    """Set both kinds, since torch's compiler reads both and fails where they differ; the newer last, since each of the
    older sets more than one of them."""
    torch.set_float32_matmul_precision(products)
    torch.backends.cudnn.allow_tf32 = each[0] == "tf32"
    for operation, precision in zip(_operations(), each, strict=True):
        operation.fp32_precision = precision
