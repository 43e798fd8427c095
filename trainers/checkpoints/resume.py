"""What a run goes on from: its own newest checkpoint, or for a branch one that another run has kept."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch import Tensor

from batchscout.trainers.checkpoints.checkpoint import load_kept, load_newest
from batchscout.trainers.checkpoints.made_with import MadeWith, differences, spoken, spoken_differences
from batchscout.trainers.checksums import load_tensors
from batchscout.trainers.config import BranchPoint, TrialConfig
from batchscout.trainers.files import is_there, quoted, seen_from
from batchscout.trainers.report import Known


def newest_state(directory: Path, made: MadeWith, rank: int, token: str, known: Known | None) -> dict[str, Any] | None:
    """Return the newest checkpoint in this directory that is this run's; None where there is none. It is the same on every rank: the
    ranks of a killed driver may still write and delete files.

    made: what this run is made with, as `made_with` says. Others are set aside, each with a notice.
    """
    folder, found = directory / "checkpoints", None
    if rank == 0:
        found = load_newest(folder, lambda path, state: why_foreign(path, state, made, token, known))
    names = [found[0].name if found else None]
    if dist.is_initialized():
        dist.broadcast_object_list(names, src=0)
    if rank == 0 or names[0] is None:
        return found[1] if found else None
    path = folder / names[0]
    if not is_there(path):
        raise ValueError(
            f"rank {rank} does not see {quoted(path)}, which rank 0 goes on from; put the run directory on storage that all nodes share"
        )
    return load_tensors(path)


def why_foreign(path: Path, state: dict[str, Any], made: MadeWith, token: str, known: Known | None) -> str | None:
    """Return why a checkpoint is not that of a run, or tells of more than the journal knows of the run; else None."""
    saved_by = path.stem.partition("-")[2]
    if known is not None and saved_by not in {token, *known.tokens}:
        return f"was saved by a run of the study ({saved_by}) of which the journal does not tell"
    for difference in differences(state, made).values():
        return f"was made with {difference}"
    # What this driver has saved it has heard of, too; the journal that it was given the run from is older.
    unknown = set() if known is None or saved_by == token else set(state["evaluated_at"]) - known.evaluations
    if unknown:
        return f"comes after the evaluation at {min(unknown)} samples, of which the journal does not tell"
    return None


def branch_state(point: BranchPoint, config: TrialConfig, directory: Path) -> dict[str, Any]:
    """Return the checkpoint from which a branch begins. Its batch, rate and schedule may be others than the branch's.

    directory: the branch's own, which need not be there yet.
    """
    source = seen_from(directory, point.directory)
    state = load_kept(source / "checkpoints", point.samples)
    for key, difference in spoken_differences(state, spoken(config)).items():
        if key in ("parallel", "optimizer_type"):
            raise ValueError(
                f"{quoted(source)}, from which this run branches at {point.samples} samples, was made with {difference}; "
                "a branch must have the same"
            )
    return state


def of_every_rank(state: dict[str, Tensor]) -> list[dict[str, Tensor]]:
    if not dist.is_initialized():
        return [state]
    gathered: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, state)
    return gathered
