"""Peak memory, and a limit on it that is real on both kinds of device.

CPU host (Linux): RLIMIT_DATA holds the process to its warm idle size plus the limit, so that running out is the
allocator's own error; the peak is VmHWM above the idle size, pages of files left out. CUDA: the caching allocator's
figures and fraction.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import gc
import resource
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

T = TypeVar("T")

SMALL_STACK_BYTES = 1 << 20

# How long what is free on a GPU must not have grown to count, how long that is waited for at most, and how often it is read.
SETTLED_SECONDS, MOST_SECONDS_TO_SETTLE, SECONDS_BETWEEN_READINGS = 2.0, 20.0, 0.25

# Allocations above 64 KiB go back to the kernel when freed, so the peak is the tensors' and not the heap's history.
MALLOC_ENVIRONMENT = {
    "MALLOC_MMAP_THRESHOLD_": "65536",
    "MALLOC_TRIM_THRESHOLD_": "65536",
    "MALLOC_ARENA_MAX": "1",
}


def status_bytes(key: str) -> int:
    """Return a figure of /proc/self/status (VmData, VmRSS, VmHWM) in bytes."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(key + ":"):
            return int(line.split()[1]) * 1024
    raise AssertionError(f"the kernel does not report {key}")


def give_back() -> None:
    """Give memory that nothing refers to any more back to the kernel or the device."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    else:
        ctypes.CDLL(None).malloc_trim(0)


def free_bytes(device: torch.device, limit_bytes: int | None = None) -> int | None:
    """Return what the device has left, whoever holds the rest; None on a CPU host, and where the device does not
    answer: after some errors it never does so again in the same process.

    limit_bytes: what a run is or was held to by `held_to`; no more is left than up to there.
    """
    if device.type != "cuda":
        return None
    try:
        free = torch.cuda.mem_get_info(device)[0]
    except RuntimeError:
        return None
    return free if limit_bytes is None else min(free, max(0, limit_bytes - torch.cuda.memory_reserved(device)))


@functools.cache
def capacity_bytes(device: torch.device) -> int:
    """Return what of a GPU's memory this process can have: what was free when it was first asked for, and what it had
    reserved then. The rest is the driver's, NCCL's, the context's and that of others on the device.

    A process that this one replaces may still be ending, and its memory is this one's soon.
    """
    free = settled(lambda: torch.cuda.mem_get_info(device)[0], time.sleep)
    return free + torch.cuda.memory_reserved(device)


def settled(read: Callable[[], int], wait: Callable[[float], object]) -> int:
    """Return a figure once it has not grown for SETTLED_SECONDS, or after MOST_SECONDS_TO_SETTLE: the highest so far."""
    highest, waited, since_growth = read(), 0.0, 0.0
    while since_growth < SETTLED_SECONDS and waited < MOST_SECONDS_TO_SETTLE:
        wait(SECONDS_BETWEEN_READINGS)
        waited, since_growth = waited + SECONDS_BETWEEN_READINGS, since_growth + SECONDS_BETWEEN_READINGS
        if (now := read()) > highest:
            highest, since_growth = now, 0.0
    return highest


def idle_bytes(device: torch.device) -> int:
    """Return what this process holds before a run: limits and peaks count from there."""
    return torch.cuda.memory_reserved(device) if device.type == "cuda" else status_bytes("VmData")


def bytes_kept(device: torch.device) -> int | None:
    """Give back all that can be, and return what this process holds then; None where the device does not answer."""
    try:
        give_back()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
    except RuntimeError:  # an earlier kernel's error: each call that touches the device raises it again
        return None
    return idle_bytes(device)


class PeakMeter:
    """Peak bytes from its creation on: on a CPU host above the idle process, on CUDA all that is reserved.

    Pages of files (code that is run for the first time, samples that are mapped) are left out: they never run out.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.forget()
        self.idle_resident_bytes = 0 if device.type == "cuda" else status_bytes("VmRSS") - status_bytes("RssFile")

    def forget(self) -> None:
        """Forget the peak so far; what is held now still counts."""
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self.device)
            self.forget_retries()
        else:
            Path("/proc/self/clear_refs").write_text("5")  # resets VmHWM to VmRSS; ru_maxrss cannot be reset

    def forget_retries(self) -> None:
        """Forget how often the allocator had to empty its cache: once, to fit itself to a step, is no harm."""
        if self.device.type == "cuda":
            torch.cuda.reset_accumulated_memory_stats(self.device)

    def retries(self) -> dict[str, float]:
        """{allocator_retries}: how often a GPU's allocator had to empty its cache and ask again since `forget_retries`."""
        if self.device.type != "cuda":
            return {}
        return {"allocator_retries": float(torch.cuda.memory_stats(self.device).get("num_alloc_retries", 0))}

    def peak_bytes(self) -> int:
        if self.device.type == "cuda":
            return torch.cuda.max_memory_reserved(self.device)
        return max(0, status_bytes("VmHWM") - status_bytes("RssFile") - self.idle_resident_bytes)


@contextlib.contextmanager
def held_to(limit_bytes: int | None, device: torch.device, idle_bytes: int | None = None) -> Iterator[None]:
    """Let the allocator refuse whatever would exceed `limit_bytes` above the idle process, as if memory had run out.

    idle_bytes: what `idle_bytes` returned before anything was built; None: what the process holds now.
    """
    if limit_bytes is None:
        yield
    elif device.type == "cuda":
        if device.index is None:  # this call alone does not take the current one by itself
            device = torch.device("cuda", torch.cuda.current_device())
        total = torch.cuda.get_device_properties(device).total_memory
        torch.cuda.set_per_process_memory_fraction(min(1.0, limit_bytes / total), device)
        try:
            yield
        finally:
            torch.cuda.set_per_process_memory_fraction(1.0, device)
    else:
        soft, hard = resource.getrlimit(resource.RLIMIT_DATA)
        base = status_bytes("VmData") if idle_bytes is None else idle_bytes
        with _small_stacks():
            resource.setrlimit(resource.RLIMIT_DATA, (base + limit_bytes, hard))
            try:
                yield
            finally:
                resource.setrlimit(resource.RLIMIT_DATA, (soft, hard))


def without_after_effects(device: torch.device, run: Callable[[], T]) -> T:
    """Return run(); on a CPU host from a thread of its own, since running out of memory can spoil a thread for good.

    oneDNN's code generator (Xbyak) keeps the first error of each thread for as long as the thread lives, and that there
    was no room for a kernel is one: whatever needs a new kernel in this thread would be said to run out of memory, too.
    """
    if device.type == "cuda":
        return run()
    # A CUDA build of torch 2.11 without a GPU dies in the second thread that enters this mode, unless one that lives on was the first.
    with FakeTensorMode():
        pass
    with ThreadPoolExecutor(1) as thread:
        return thread.submit(_with_its_helpers, run).result()


def _with_its_helpers(run: Callable[[], T]) -> T:
    """Start the threads with which this one computes before a limit counts their stacks: OpenMP's belong to one thread."""
    torch.zeros(torch.get_num_threads() << 16).add_(1.0)
    return run()


@contextlib.contextmanager
def _small_stacks() -> Iterator[None]:
    """Give new threads small stacks: the whole of a stack, 8 MiB by default, counts as data."""
    libc, attributes, size = ctypes.CDLL(None), ctypes.create_string_buffer(64), ctypes.c_size_t()
    libc.pthread_getattr_default_np(attributes)
    libc.pthread_attr_getstacksize(attributes, ctypes.byref(size))
    _set_stack_bytes(libc, attributes, min(SMALL_STACK_BYTES, size.value))
    try:
        yield
    finally:
        _set_stack_bytes(libc, attributes, size.value)


def _set_stack_bytes(libc: ctypes.CDLL, attributes: ctypes.Array[ctypes.c_char], stack_bytes: int) -> None:
    libc.pthread_attr_setstacksize(attributes, ctypes.c_size_t(stack_bytes))
    libc.pthread_setattr_default_np(attributes)


def device_metrics(device: torch.device) -> dict[str, float]:
    """{peak_allocated_bytes, device_memory_bytes}: live tensors without the allocator's reserve; what of the GPU this process can
    have. Empty on a CPU host."""
    if device.type != "cuda":
        return {}
    return {
        "peak_allocated_bytes": float(torch.cuda.max_memory_allocated(device)),
        "device_memory_bytes": float(capacity_bytes(device)),
    }
