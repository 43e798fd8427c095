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


def describe(device: torch.device) -> str:
    """Return the device's name and memory; for a CPU host also how many threads torch uses."""
    if device.type == "cuda":
        return f"{torch.cuda.get_device_name(device)}, {device_bytes(device)} bytes"
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    name = next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), platform.machine())
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return f"{name}, {torch.get_num_threads()} threads, {total} bytes"
