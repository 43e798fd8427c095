"""What a device can compute at most, against which utilisation is told: its data sheet's figure, or a measured one."""

from __future__ import annotations

import functools
import time
from collections.abc import Iterable

import torch

from trainers.config import DevicePeak, Precision

# Dense peak TFLOP/s without sparsity, per device name and precision (vendors' data sheets).
_PEAK_TFLOPS = {
    "H100 PCIe": {"bfloat16": 756, "float16": 756, "float32": 51},
    "H100 NVL": {"bfloat16": 835, "float16": 835, "float32": 60},
    "A100": {"bfloat16": 312, "float16": 312, "float32": 19.5},
    "H100": {"bfloat16": 989, "float16": 989, "float32": 67},
    "H200 NVL": {"bfloat16": 835, "float16": 835, "float32": 60},
    "H200": {"bfloat16": 989, "float16": 989, "float32": 67},
    "L40S": {"bfloat16": 362, "float16": 362, "float32": 91.6},
    "RTX 4090": {"bfloat16": 165, "float16": 165, "float32": 82.6},
    "B200": {"bfloat16": 2250, "float16": 2250, "float32": 75},
}
# A share of a GPU, or a slower chip under the same name.
_NOT_THE_WHOLE = (" MIG ", " Laptop", " 4090 D")

# Sizes of the products that are timed: which is the fastest depends on caches and cores. A size is the last one if its
# product takes longer than this, as a CPU's does in a precision that it does not have.
_CPU_SIZES, _CUDA_SIZES = (256, 512, 1024), (8192,)
_LONGEST_PRODUCT_SECONDS = 0.02
# A round takes so long at every size. What disturbs some rounds is left behind by the others: they go on until so many
# in a row have found nothing faster, or the time is up.
_SECONDS_PER_ROUND, _ROUNDS_WITHOUT_GAIN, _MOST_SECONDS = 0.03, 4, 3.0


def device_peaks(device: torch.device, precisions: Iterable[Precision]) -> dict[Precision, DevicePeak]:
    """Return the device's peak in each of these precisions."""
    return {precision: device_peak(device, precision) for precision in precisions}


def device_peak(device: torch.device, precision: Precision) -> DevicePeak:
    """Return the data sheet's peak of a GPU that is known here; of any other device what matrix products reach."""
    known = data_sheet_flops(torch.cuda.get_device_name(device), precision) if device.type == "cuda" else None
    if known is not None:
        return DevicePeak(flops_per_second=known, source="data sheet")
    return DevicePeak(flops_per_second=matmul_flops_per_second(device, precision), source="measured")


def data_sheet_flops(name: str, precision: Precision) -> float | None:
    """Return the dense peak in FLOP/s of a GPU of this name; None if it is not in the table."""
    if any(part in name for part in _NOT_THE_WHOLE):
        return None
    known = next((peaks for key, peaks in _PEAK_TFLOPS.items() if key in name), None)
    return known[precision] * 1e12 if known else None


def matmul_flops_per_second(device: torch.device, precision: Precision) -> float:
    """Return the FLOP/s of the fastest of many large square matrix products, with as many threads as torch uses now."""
    return _fastest(device, precision, torch.get_num_threads())


@functools.cache
def _fastest(device: torch.device, precision: Precision, num_threads: int) -> float:
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
