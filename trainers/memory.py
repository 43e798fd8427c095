"""Peak memory, and a limit on it that is real on both kinds of device.

CPU host (Linux): RLIMIT_DATA holds the process to its warm idle size plus the limit, so that running out is the
allocator's own error; the peak is VmHWM above the idle size. CUDA: the caching allocator's figures and fraction.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import gc
import resource
from collections.abc import Iterator
from pathlib import Path

import torch

_ALLOCATOR_MESSAGES = (
    "DefaultCPUAllocator: can't allocate memory",
    "DefaultCPUAllocator: not enough memory",
    "std::bad_alloc",
    "could not create a memory object",  # oneDNN's own way to say it
    "unable to mmap",
    "can't start new thread",  # no room for its stack
    "CUDA error: out of memory",
    "CUBLAS_STATUS_ALLOC_FAILED",
    "CUDNN_STATUS_ALLOC_FAILED",
)

# Allocations above 64 KiB go back to the kernel when freed, so the peak is the tensors' and not the heap's history.
MALLOC_ENVIRONMENT = {
    "MALLOC_MMAP_THRESHOLD_": "65536",
    "MALLOC_TRIM_THRESHOLD_": "65536",
    "MALLOC_ARENA_MAX": "1",
}


def is_out_of_memory(error: BaseException) -> bool:
    """Whether the allocator refused: torch raises OutOfMemoryError on CUDA, a plain RuntimeError on a CPU."""
    if isinstance(error, (torch.OutOfMemoryError, MemoryError)):
        return True
    if isinstance(error, OSError) and error.errno == errno.ENOMEM:
        return True
    return isinstance(error, RuntimeError) and any(text in str(error) for text in _ALLOCATOR_MESSAGES)


def status_bytes(key: str) -> int:
    """A figure of /proc/self/status (VmData, VmRSS, VmHWM) in bytes."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(key + ":"):
            return int(line.split()[1]) * 1024
    raise AssertionError(f"the kernel does not report {key}")


def give_back() -> None:
    """Return what nothing refers to any more to the kernel or the device."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    else:
        ctypes.CDLL(None).malloc_trim(0)


def idle_bytes(device: torch.device) -> int:
    """What this process holds before a run: the base that limits and peaks count from."""
    return torch.cuda.memory_reserved(device) if device.type == "cuda" else status_bytes("VmData")


class PeakMeter:
    """Peak bytes above the idle process, from its creation on."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)
            torch.cuda.reset_accumulated_memory_stats(device)  # the retries
            return
        Path("/proc/self/clear_refs").write_text("5")  # resets VmHWM to VmRSS; ru_maxrss cannot be reset
        self.idle_resident_bytes = status_bytes("VmRSS")

    def peak_bytes(self) -> int:
        if self.device.type == "cuda":
            return torch.cuda.max_memory_reserved(self.device)
        return max(0, status_bytes("VmHWM") - self.idle_resident_bytes)


@contextlib.contextmanager
def held_to(limit_bytes: int | None, device: torch.device) -> Iterator[None]:
    """Within it, allocating past `limit_bytes` above the idle process is the allocator's own out-of-memory error."""
    if limit_bytes is None:
        yield
    elif device.type == "cuda":
        total = torch.cuda.get_device_properties(device).total_memory
        torch.cuda.set_per_process_memory_fraction(min(1.0, limit_bytes / total), device)
        yield
    else:
        soft, hard = resource.getrlimit(resource.RLIMIT_DATA)
        resource.setrlimit(resource.RLIMIT_DATA, (status_bytes("VmData") + limit_bytes, hard))
        try:
            yield
        finally:
            resource.setrlimit(resource.RLIMIT_DATA, (soft, hard))


def device_metrics(device: torch.device) -> dict[str, float]:
    """{peak_allocated_bytes, allocator_retries, device_memory_bytes, gpu_utilisation}: live tensors without the allocator's
    reserve; how often it had to empty its cache and ask again; all that the GPU has; the share of time in kernels as the
    driver tells it, where it answers. Empty on a CPU host."""
    if device.type != "cuda":
        return {}
    found = {
        "peak_allocated_bytes": float(torch.cuda.max_memory_allocated(device)),
        "allocator_retries": float(torch.cuda.memory_stats(device).get("num_alloc_retries", 0)),
        "device_memory_bytes": float(device_bytes(device) or 0),
    }
    with contextlib.suppress(ModuleNotFoundError, RuntimeError):  # no library; a container that may not ask
        found["gpu_utilisation"] = torch.cuda.utilization(device) / 100
    return found


def device_bytes(device: torch.device) -> int | None:
    """All memory of the GPU; None on a CPU host."""
    return torch.cuda.get_device_properties(device).total_memory if device.type == "cuda" else None


def on_cuda() -> bool:
    """Whether runs in this process use a GPU."""
    return torch.cuda.is_available()
