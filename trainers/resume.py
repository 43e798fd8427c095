"""What a run goes on from: its own newest checkpoint, or for a branch one that another run has kept."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch import Tensor

from trainers.checkpoint import load_kept, load_newest
from trainers.checksums import load_tensors
from trainers.config import BranchPoint, TrialConfig


def made_with(config: TrialConfig) -> dict[str, Any]:
    """Return what a checkpoint must have in common with the run that goes on from it."""
    return {
        "effective_batch_size": config.effective_batch_size,
        "ramp": [(phase.from_samples, config.split_in(phase).effective_batch_size) for phase in config.ramp],
        "parallel": config.parallel,
        "optimizer_type": config.optimizer.type,
    }


_MADE_WITH_EARLIER = {"ramp": []}
"""What was so for every run before checkpoints said it."""
_SPOKEN = {
    "effective_batch_size": "an effective batch of", "ramp": "the ramp", "parallel": "parallel:",
    "optimizer_type": "the optimizer",
}  # fmt: skip


def _differences(state: dict[str, Any], config: TrialConfig) -> dict[str, str]:
    """Return, in words, in what a checkpoint and a run differ."""
    now = made_with(config)
    before = {key: state.get(key, _MADE_WITH_EARLIER.get(key, value)) for key, value in now.items()}
    return {key: f"{_SPOKEN[key]} {before[key]}, and this run has {now[key]}" for key in now if before[key] != now[key]}


def newest_state(directory: Path, config: TrialConfig, rank: int) -> dict[str, Any] | None:
    """Return the newest checkpoint of the run in this directory; None where there is none.

    Raises ValueError where this run is another one than that which made it.
    """
    state = _newest_of_rank_0(directory / "checkpoints", rank)
    if state is None:
        return None
    for difference in _differences(state, config).values():
        raise ValueError(
            f"the checkpoint in {directory} was made with {difference}; go on with what it was made with, or start in "
            "another directory"
        )
    return state


def branch_state(point: BranchPoint, config: TrialConfig) -> dict[str, Any]:
    """Return the checkpoint from which a branch begins. Its batch, rate and schedule may be others than the branch's."""
    state = load_kept(Path(point.directory) / "checkpoints", point.samples)
    for key, difference in _differences(state, config).items():
        if key in ("parallel", "optimizer_type"):
            raise ValueError(
                f"{point.directory}, from which this run branches at {point.samples} samples, was made with {difference}; "
                "a branch must have the same"
            )
    return state


def _newest_of_rank_0(directory: Path, rank: int) -> dict[str, Any] | None:
    """Load the same file on every rank: the ranks of a killed driver may still write and delete files."""
    found = load_newest(directory) if rank == 0 else None
    names = [found[0].name if found else None]
    if dist.is_initialized():
        dist.broadcast_object_list(names, src=0)
    if rank == 0 or names[0] is None:
        return found[1] if found else None
    path = directory / names[0]
    if not path.exists():
        raise ValueError(
            f"rank {rank} does not see {path}, which rank 0 goes on from; put the run directory on storage that all nodes share"
        )
    return load_tensors(path)


def of_every_rank(state: dict[str, Tensor]) -> list[dict[str, Tensor]]:
    if not dist.is_initialized():
        return [state]
    gathered: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, state)
    return gathered
