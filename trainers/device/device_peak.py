"""What a device can compute at most, against which utilisation is told: its data sheet's figure, or a measured one."""

from __future__ import annotations

import functools
import re
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Literal

import torch

from batchscout.trainers.config import DevicePeak, Precision
from batchscout.trainers.device.tensor_float import tensor_float_32


@dataclass(frozen=True)
class _Sheet:
    """What a vendor's data sheet says of a whole device: dense products, without sparsity, at the boost clock."""

    num_multiprocessors: int
    tflops: Mapping[Precision | Literal["tf32"], float]
    """Precisions that the device computes in units made for them, where it has any: plain float32 has none."""


def _sheet(num_multiprocessors: int, half: float, float32: float) -> _Sheet:
    """half: of both 16-bit types. TF32 runs in the same units at half the speed."""
    return _Sheet(num_multiprocessors, {"bfloat16": half, "float16": half, "tf32": half / 2, "float32": float32})


_SHEETS = {
    "H100 PCIe": _sheet(114, 756, 51),
    "H100 NVL": _sheet(132, 835, 60),
    "H100": _sheet(132, 989, 67),
    "H200 NVL": _sheet(132, 835, 60),
    "H200": _sheet(132, 989, 67),
    "GH200": _sheet(132, 989, 67),
    "B200": _sheet(148, 2250, 75),
    "A100": _sheet(108, 312, 19.5),
    "A10": _sheet(72, 125, 31.2),
    "L40S": _sheet(142, 362, 91.6),
    "L4": _sheet(58, 121, 30.3),
    "RTX 3090": _sheet(82, 71, 35.6),
    "RTX 4090": _sheet(128, 165, 82.6),
    "V100-SXM2": _Sheet(80, {"float16": 125, "float32": 15.7}),
    "V100-PCIE": _Sheet(80, {"float16": 112, "float32": 14.0}),
    "T4": _Sheet(40, {"float16": 65, "float32": 8.1}),
    "MI300X": _sheet(304, 1307, 163.4),
}
# A slower or faster chip under the same name.
_OTHERS = (" Laptop", " 4090 D", " 3090 Ti", "MI300X HF")

# Sizes of the products that are timed: which is the fastest depends on caches and cores. A size is the last one if its
# product takes longer than this, as a CPU's does in a precision that it does not have.
_CPU_SIZES, _CUDA_SIZES = (256, 512, 1024), (8192,)
_LONGEST_PRODUCT_SECONDS = 0.02
# A round takes so long at every size. What disturbs some rounds is left behind by the others: they go on until so many
# in a row have found nothing faster, or the time is up.
_SECONDS_PER_ROUND, _ROUNDS_WITHOUT_GAIN, _MOST_SECONDS = 0.03, 4, 3.0


def device_peaks(
    device: torch.device, precisions: Iterable[Precision], *, allow_tf32: bool = False
) -> dict[Precision, DevicePeak]:
    """Return the device's peak in each of these precisions."""
    return {precision: device_peak(device, precision, allow_tf32=allow_tf32) for precision in precisions}


def device_peak(device: torch.device, precision: Precision, *, allow_tf32: bool = False) -> DevicePeak:
    """Return the data sheet's peak of a GPU that is known here; of any other device what matrix products reach."""
    if device.type == "cuda":
        found = torch.cuda.get_device_properties(device)
        known = data_sheet_flops(found.name, found.multi_processor_count, precision, allow_tf32=allow_tf32)
        if known is not None:
            return DevicePeak(flops_per_second=known, source="data sheet")
    with tensor_float_32(allow_tf32):
        measured = matmul_flops_per_second(device, precision, allow_tf32=allow_tf32)
    return DevicePeak(flops_per_second=measured, source="measured")


def data_sheet_flops(
    name: str, num_multiprocessors: int, precision: Precision, *, allow_tf32: bool = False
) -> float | None:
    """Return the dense peak in FLOP/s of a GPU of this name; None if it is not in the table.

    Of a slice, as MIG cuts them, it is the share of the whole that the slice's multiprocessors are.
    """
    if any(other in name for other in _OTHERS):
        return None
    sheet = next((sheet for key, sheet in _SHEETS.items() if re.search(rf"\b{key}\b", name)), None)
    if sheet is None or precision not in sheet.tflops or num_multiprocessors > sheet.num_multiprocessors:
        return None
    rate = "tf32" if precision == "float32" and allow_tf32 and "tf32" in sheet.tflops else precision
    return sheet.tflops[rate] * 1e12 * num_multiprocessors / sheet.num_multiprocessors


def matmul_flops_per_second(device: torch.device, precision: Precision, *, allow_tf32: bool = False) -> float:
    """Return the FLOP/s of the fastest of many large square matrix products, with as many threads as torch uses now.

    allow_tf32: whether it is allowed now; each is measured once.
    """
    return _fastest(device, precision, torch.get_num_threads(), allow_tf32)


@functools.cache
def _fastest(device: torch.device, precision: Precision, num_threads: int, allow_tf32: bool) -> float:
    squares = _squares(device, precision)
    until = time.perf_counter() + _MOST_SECONDS
    best, without_gain = 0.0, 0
    while without_gain < _ROUNDS_WITHOUT_GAIN and (not best or time.perf_counter() < until):
        rate = max(2.0 * len(square) ** 3 / _fastest_seconds(square) for square in squares)
        without_gain = 0 if rate > 1.01 * best else without_gain + 1
        best = max(best, rate)
    return best


def _squares(device: torch.device, precision: Precision) -> list[torch.Tensor]:
    """Return the matrices to multiply, none of them too large for this device."""
    squares = []
    for size in _CUDA_SIZES if device.type == "cuda" else _CPU_SIZES:
        squares.append(torch.rand(size, size, device=device).to(getattr(torch, precision)))
        if _fastest_seconds(squares[-1]) > _LONGEST_PRODUCT_SECONDS:
            break
    return squares


def _fastest_seconds(square: torch.Tensor) -> float:
    """Return how long the product of this matrix with itself takes, at its fastest in one round."""
    fastest, until = float("inf"), time.perf_counter() + _SECONDS_PER_ROUND
    while time.perf_counter() < until:
        started = time.perf_counter()
        torch.mm(square, square)[0, 0].item()  # a value is read, so the product is done
        fastest = min(fastest, time.perf_counter() - started)
    return fastest
