"""A GPU's memory, by the figures and the fraction of torch's caching allocator."""

from __future__ import annotations

import contextlib
import functools
import gc
import time
from collections.abc import Callable, Iterator
from typing import TypeVar

import torch

T = TypeVar("T")

# A process is fit for another run if it holds no more than this: the workspaces of cuBLAS, up to 32 MiB for each of its handles, and a
# thread has one of its own.
TOLERANCE_BYTES = 256 * 2**20

# How long what is free must not have grown to count, how long that is waited for at most, and how often it is read.
SETTLED_SECONDS, MOST_SECONDS_TO_SETTLE, SECONDS_BETWEEN_READINGS = 2.0, 20.0, 0.25


class GpuMemory:
    """A GPU's memory: all figures are of what the allocator has reserved, which is nothing before the first run. `HostMemory` can be asked the
    same of a CPU host."""

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def idle_bytes(self) -> int:
        """Return what this process holds before a run."""
        return torch.cuda.memory_reserved(self.device)

    def free_bytes(self, limit_bytes: int | None = None) -> int | None:
        """Return what the device has left, whoever holds the rest; None on a CPU host, and where the device does not
        answer: some CUDA errors last as long as the process.

        limit_bytes: what a run is or was held to by `held_to`; no more is left than up to there.
        """
        try:
            free = torch.cuda.mem_get_info(self.device)[0]
        except RuntimeError:
            return None
        return free if limit_bytes is None else min(free, max(0, limit_bytes - torch.cuda.memory_reserved(self.device)))

    def give_back(self) -> None:
        """Give memory that nothing refers to any more back to the kernel or the device."""
        gc.collect()
        torch.cuda.empty_cache()

    def bytes_kept(self) -> int | None:
        """Give back all that can be, and return what this process holds then; None where the device does not answer."""
        try:
            self.give_back()
            torch.cuda.synchronize(self.device)
        except RuntimeError:  # an earlier kernel's error: each call that touches the device raises it again
            return None
        return self.idle_bytes()

    def is_fit(self, idle_bytes: int, *, ran_out: bool) -> bool:
        """True if this process may run another trial, by what it keeps after one. ran_out: whether that ran out of memory."""
        kept = self.bytes_kept()
        return kept is not None and kept <= TOLERANCE_BYTES

    def without_after_effects(self, run: Callable[[], T]) -> T:
        """Return run(), called where an error of memory that ran out cannot spoil the process."""
        return run()

    @contextlib.contextmanager
    def held_to(self, limit_bytes: int | None, idle_bytes: int | None = None) -> Iterator[None]:
        """Let the allocator refuse whatever would exceed `limit_bytes`, as if memory had run out.

        idle_bytes: what `idle_bytes` returned before anything was built, which a CPU host's limit comes on top of; None: what the
        process holds now.
        """
        if limit_bytes is None:
            yield
            return
        device = self.device
        if device.index is None:  # the call below alone does not take the current one by itself
            device = torch.device("cuda", torch.cuda.current_device())
        total = torch.cuda.get_device_properties(device).total_memory
        torch.cuda.set_per_process_memory_fraction(min(1.0, limit_bytes / total), device)
        try:
            yield
        finally:
            torch.cuda.set_per_process_memory_fraction(1.0, device)

    def peak(self) -> GpuPeak:
        """Return a meter of the peak from now on."""
        return GpuPeak(self.device)

    def metrics(self) -> dict[str, float]:
        """Return {peak_allocated_bytes, device_memory_bytes}: live tensors without the allocator's reserve; what of the GPU this process
        can have. Empty on a CPU host."""
        return {
            "peak_allocated_bytes": float(torch.cuda.max_memory_allocated(self.device)),
            "device_memory_bytes": float(capacity_bytes(self.device)),
        }


class GpuPeak:
    """The most that the allocator reserved since this was made."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.forget()

    def forget(self) -> None:
        """Forget the peak so far; what is held now still counts, and what the allocator keeps of what is not held any more does not."""
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(self.device)
        torch.cuda.reset_accumulated_memory_stats(self.device)

    def end_warm_up(self) -> None:
        """Forget how often the allocator had to empty its cache: once, to fit itself to a step, is no harm."""
        torch.cuda.reset_accumulated_memory_stats(self.device)

    def retries(self) -> dict[str, float]:
        """Return {allocator_retries}: how often the allocator had to empty its cache and ask again since the warm-up."""
        return {"allocator_retries": float(torch.cuda.memory_stats(self.device).get("num_alloc_retries", 0))}

    def peak_bytes(self) -> int:
        return torch.cuda.max_memory_reserved(self.device)


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
