"""Checkpoints of one run: whole or absent, never half.

A file is named by the samples it has seen and by the token of the study run that wrote it: ranks outlive a killed
driver by seconds, and what they still write must not meet what its successor writes.
"""

from __future__ import annotations

import os
import pickle
import warnings
from pathlib import Path
from typing import Any

import torch


def save_checkpoint(directory: Path, token: str, samples_seen: int, state: dict[str, Any], keep: int) -> Path:
    """Write atomically (sibling file, fsync, rename), then delete all of this token's but the newest `keep`."""
    directory.mkdir(parents=True, exist_ok=True)
    path = directory / f"{samples_seen:012d}-{token}.pt"
    partial = path.with_suffix(".partial")
    with partial.open("wb") as file:
        torch.save(state, file)
        file.flush()
        os.fsync(file.fileno())
    partial.replace(path)
    for old in sorted(directory.glob(f"*-{token}.pt"))[:-keep]:
        old.unlink()
    return path


def load_newest(directory: Path) -> dict[str, Any] | None:
    """The state with the most samples that can be read; a damaged file is named in a warning and passed over."""
    for path in sorted(directory.glob("*.pt"), reverse=True):
        try:
            return torch.load(path, weights_only=True, map_location="cpu")
        except (RuntimeError, EOFError, OSError, ValueError, pickle.UnpicklingError) as error:
            warnings.warn(f"checkpoint {path} is damaged ({error}); going on from the one before it", stacklevel=2)
    return None


def random_state(device: torch.device) -> dict[str, torch.Tensor]:
    """What dropout will draw next, on the host and on the device."""
    state = {"cpu": torch.get_rng_state()}
    if device.type == "cuda":
        state["cuda"] = torch.cuda.get_rng_state(device)
    return state


def set_random_state(state: dict[str, torch.Tensor], device: torch.device) -> None:
    torch.set_rng_state(state["cpu"])
    if device.type == "cuda" and "cuda" in state:
        torch.cuda.set_rng_state(state["cuda"], device)
