"""The device that a run trains on: which one it is, and what can be said of it."""

from __future__ import annotations

import os
import platform
from pathlib import Path

import torch


def pick_device() -> torch.device:
    """Return this rank's GPU where there is one, else the CPU."""
    return torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")


def on_cuda() -> bool:
    """True if runs in this process use a GPU."""
    return torch.cuda.is_available()


def device_bytes(device: torch.device) -> int | None:
    """Return all memory of the GPU, or None on a CPU host."""
    return torch.cuda.get_device_properties(device).total_memory if device.type == "cuda" else None


def device_name(device: torch.device) -> str:
    """Return how the GPU, or the host's CPU, is called."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), platform.machine())


def memory_bytes(device: torch.device) -> int:
    """Return all memory of the GPU, or of the host."""
    return device_bytes(device) or os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def describe(device: torch.device) -> str:
    """Return the device's name and memory; for a CPU host also how many threads torch uses."""
    threads = "" if device.type == "cuda" else f"{torch.get_num_threads()} threads, "
    return f"{device_name(device)}, {threads}{memory_bytes(device)} bytes"
