"""Checkpoints of one run: whole or absent, never half.

A file is named by the samples it has seen and by the token of the study run that wrote it: ranks outlive a killed
driver by seconds, and what they still write must not meet what its successor writes. A checkpoint that is kept for
other runs is named by the sample count that asked for it; who writes it again writes the same.
"""

from __future__ import annotations

import pickle
import warnings
from pathlib import Path
from typing import Any

import torch

from trainers.files import written_whole
from trainers.memory import is_out_of_memory

KEPT = "kept"
"""The directory of the checkpoints that are kept for other runs, beside the newest ones."""
UNREADABLE = (RuntimeError, EOFError, OSError, ValueError, pickle.UnpicklingError)
"""What loading a damaged file raises."""


def save_checkpoint(directory: Path, token: str, samples_seen: int, state: dict[str, Any], keep: int) -> Path:
    """Write a checkpoint, then delete all but the newest `keep` of those that this token has written."""
    path = directory / f"{samples_seen:012d}-{token}.pt"
    _save(path, state)
    for old in sorted(directory.glob(f"*-{token}.pt"))[:-keep]:
        old.unlink()
    return path


def keep_checkpoint(directory: Path, samples: int, state: dict[str, Any]) -> None:
    """Write a checkpoint that stays: the one that was asked for at so many samples."""
    _save(directory / KEPT / f"{samples:012d}.pt", state)


def load_kept(directory: Path, samples: int) -> dict[str, Any]:
    """Return what was kept at that sample count. Raises ValueError, with the counts that there are, where there is
    none."""
    path = directory / KEPT / f"{samples:012d}.pt"
    if not path.exists():
        there = ", ".join(str(int(kept.stem)) for kept in sorted(path.parent.glob("*.pt"))) or "none"
        raise ValueError(
            f"there is no {path}: the run to begin from has kept no checkpoint at {samples} samples; it has kept: {there}; "
            f"begin at one of these, or run it with {samples} in its kept_checkpoints"
        )
    try:
        return load(path)
    except UNREADABLE as error:
        if is_out_of_memory(error):
            raise
        raise ValueError(f"the kept checkpoint {path} is damaged and cannot be read; run its trial again") from error


def _save(path: Path, state: dict[str, Any]) -> None:
    with written_whole(path) as file:
        torch.save(state, file)


def load_newest(directory: Path) -> tuple[Path, dict[str, Any]] | None:
    """Return the readable file with the most samples, and what it holds; None where there is none.

    A damaged file is named in a warning and passed over. Running out of memory is no damage, and is raised.
    """
    for path in sorted(directory.glob("*.pt"), reverse=True):
        try:
            return path, load(path)
        except UNREADABLE as error:
            if is_out_of_memory(error):
                raise
            warnings.warn(f"checkpoint {path} is damaged ({error}); going on from the one before it", stacklevel=2)
    return None


def load(path: Path) -> dict[str, Any]:
    return torch.load(path, weights_only=True, map_location="cpu")


def random_state(device: torch.device) -> dict[str, torch.Tensor]:
    """Return the state of the random generators: what dropout will draw next, on the host and on the device."""
    state = {"cpu": torch.get_rng_state()}
    if device.type == "cuda":
        state["cuda"] = torch.cuda.get_rng_state(device)
    return state


def set_random_state(state: dict[str, torch.Tensor], device: torch.device) -> None:
    torch.set_rng_state(state["cpu"])
    if device.type == "cuda" and "cuda" in state:
        torch.cuda.set_rng_state(state["cuda"], device)
