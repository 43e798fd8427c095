"""The memory of the device that a run trains on: what is free, a limit on it that is real, and the peak."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Protocol, TypeVar

import torch

from batchscout.trainers.device.device import pick_device
from batchscout.trainers.device.gpu_memory import GpuMemory
from batchscout.trainers.device.host_memory import HostMemory

T = TypeVar("T")

# Allocations above 64 KiB go back to the kernel when freed, so the peak is the tensors' and not the heap's history.
MALLOC_ENVIRONMENT = {
    "MALLOC_MMAP_THRESHOLD_": "65536",
    "MALLOC_TRIM_THRESHOLD_": "65536",
    "MALLOC_ARENA_MAX": "1",
}


class PeakMeter(Protocol):
    """Peak bytes from its creation on."""

    def forget(self) -> None:
        """Forget the peak so far; what is held now still counts."""
        ...

    def forget_retries(self) -> None:
        """Forget how often the allocator had to empty its cache: once, to fit itself to a step, is no harm."""
        ...

    def retries(self) -> dict[str, float]:
        """{allocator_retries}: how often a GPU's allocator had to empty its cache and ask again since `forget_retries`."""
        ...

    def peak_bytes(self) -> int: ...


class DeviceMemory(Protocol):
    """A GPU's memory, or that of a CPU host."""

    def idle_bytes(self) -> int:
        """Return what this process holds before a run."""
        ...

    def free_bytes(self, limit_bytes: int | None = None) -> int | None:
        """Return what the device has left, whoever holds the rest; None on a CPU host, and where the device does not
        answer: some CUDA errors last as long as the process.

        limit_bytes: what a run is or was held to by `held_to`; no more is left than up to there.
        """
        ...

    def give_back(self) -> None:
        """Give memory that nothing refers to any more back to the kernel or the device."""
        ...

    def bytes_kept(self) -> int | None:
        """Give back all that can be, and return what this process holds then; None where the device does not answer."""
        ...

    def is_fit(self, idle_bytes: int, *, ran_out: bool) -> bool:
        """True if this process may run another trial, by what it keeps after one. ran_out: whether that ran out of memory."""
        ...

    def without_after_effects(self, run: Callable[[], T]) -> T:
        """Return run(), called where an error of memory that ran out cannot spoil the process: on a CPU host in a thread of its own."""
        ...

    def held_to(self, limit_bytes: int | None, idle_bytes: int | None = None) -> AbstractContextManager[None]:
        """Let the allocator refuse whatever would exceed `limit_bytes`, as if memory had run out.

        idle_bytes: what `idle_bytes` returned before anything was built, which a CPU host's limit comes on top of; None: what the
        process holds now.
        """
        ...

    def peak(self) -> PeakMeter:
        """Return a meter of the peak from now on."""
        ...

    def metrics(self) -> dict[str, float]:
        """{peak_allocated_bytes, device_memory_bytes}: live tensors without the allocator's reserve; what of the GPU this process
        can have. Empty on a CPU host."""
        ...


def memory_of(device: torch.device) -> DeviceMemory:
    return GpuMemory(device) if device.type == "cuda" else HostMemory()


def give_back() -> None:
    """Give back what nothing refers to any more, on the device that runs of this process use."""
    memory_of(pick_device()).give_back()
