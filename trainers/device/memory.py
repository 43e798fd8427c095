"""The memory of the device that a run trains on: what is free, a limit on it that is real, and the peak."""

from __future__ import annotations

import torch

from batchscout.trainers.device.device import pick_device
from batchscout.trainers.device.gpu_memory import GpuMemory
from batchscout.trainers.device.host_memory import GIVING_BACK, HostMemory

# As a process that trains on a CPU begins: see host_memory.py. Its peak can then be measured.
MALLOC_ENVIRONMENT = {
    "MALLOC_MMAP_THRESHOLD_": str(GIVING_BACK[0]),
    "MALLOC_TRIM_THRESHOLD_": str(GIVING_BACK[1]),
    "MALLOC_ARENA_MAX": "1",
}


def memory_of(device: torch.device) -> GpuMemory | HostMemory:
    """Return the memory of a GPU, or that of the host where runs compute on its CPU. `GpuMemory` says what both can be asked."""
    return GpuMemory(device) if device.type == "cuda" else HostMemory()


def give_back() -> None:
    """Give back what nothing refers to any more, on the device that runs of this process use."""
    memory_of(pick_device()).give_back()
