"""Checkpoints of one run: whole or absent, never half.

A file is named by the samples it has seen and by the token of the study run that wrote it: ranks outlive a killed
driver by seconds, and what they still write must not meet what its successor writes. Whoever writes one deletes those
with fewer samples, whoever wrote them: it is the same run, which goes on from the newest. A checkpoint that is kept for
other runs is named by the sample count that asked for it; who writes it again writes the same.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from batchscout.trainers.checksums import Damaged, load_tensors, save_tensors
from batchscout.trainers.files import StorageLost, is_there, own_file, quoted
from batchscout.trainers.notices import Notice, NoticeKind, give_notice

KEPT = "kept"
"""The directory of the checkpoints that are kept for other runs, beside the newest ones."""
NUM_DIGITS = 12
"""Those of the samples that a file is named by."""
_NAME = re.compile(rf"[0-9]{{{NUM_DIGITS}}}.*\.pt")
SET_ASIDE = "set_aside"
"""The directory of the checkpoints that no run goes on from, since they are damaged or another run's. It lies beside
that of the run's own, which a study deletes when it has no use for them."""

WhyNot = Callable[[Path, dict[str, Any]], str | None]
"""Takes a file and what it holds. Returns why a run must not go on from it, as a sentence without its subject; None where it may."""


def save_checkpoint(directory: Path, token: str, samples_seen: int, state: dict[str, Any], keep: int) -> Path:
    """Write a checkpoint, then delete older ones until `keep` are left with it. Newer ones stay as they are.

    Raises StorageLost where the storage refuses.
    """
    path = directory / f"{samples_seen:0{NUM_DIGITS}d}-{token}.pt"
    save_tensors(path, state)
    others = [other for other in _newest_first(directory) if other != path and samples_of(other) <= samples_seen]
    for old in others[keep - 1 :]:
        with own_file(old, "removed"):
            old.unlink(missing_ok=True)  # ranks of a killed driver may do the same
    return path


def _newest_first(directory: Path) -> list[Path]:
    """Return the checkpoints in a directory; none where it does not exist. Raises StorageLost where it cannot be read.

    It is listed here because `Path.glob` takes a directory that it may not enter for an empty one: the run would begin
    again.
    """
    with own_file(directory, "read"), contextlib.suppress(FileNotFoundError):
        return sorted((path for path in directory.iterdir() if _NAME.fullmatch(path.name)), reverse=True)
    return []


def keep_checkpoint(directory: Path, samples: int, state: dict[str, Any]) -> None:
    """Write a checkpoint that stays: the one that was asked for at so many samples."""
    save_tensors(directory / KEPT / f"{samples:0{NUM_DIGITS}d}.pt", state)


def load_kept(directory: Path, samples: int) -> dict[str, Any]:
    """Return what was kept at that sample count. Raises ValueError, with the counts that there are, where there is
    none."""
    path = directory / KEPT / f"{samples:0{NUM_DIGITS}d}.pt"
    if not is_there(path):
        there = ", ".join(str(int(kept.stem)) for kept in sorted(path.parent.glob("*.pt"))) or "none"
        raise ValueError(
            f"there is no {path}: the run to begin from has kept no checkpoint at {samples} samples; it has kept: {there}; "
            f"begin at one of these, or run it with {samples} in its kept_checkpoints"
        )
    try:
        return load_tensors(path)
    except Damaged as error:
        raise ValueError(f"the kept checkpoint {quoted(path)} is damaged ({error}); run its trial again") from error


def load_newest(directory: Path, why_not: WhyNot = lambda *_: None) -> tuple[Path, dict[str, Any]] | None:
    """Return the file with the most samples that is undamaged and that `why_not` has nothing against, and what it
    holds; None where there is none.

    Files that would have come before it are set aside, each with a notice. Raises StorageLost where one cannot be read.
    """
    found, refused = None, dict[Path, Notice]()
    for path in _newest_first(directory):
        try:
            state = load_tensors(path)
        except StorageLost:
            if is_there(path):
                raise
            return load_newest(directory, why_not)  # a rank of a killed driver has just replaced it by a newer one
        except Damaged as error:
            refused[path] = Notice(NoticeKind.DAMAGED_CHECKPOINT, f"is damaged: {error}")
            continue
        reason = why_not(path, state)
        if reason is None:
            found = path, state
            break
        refused[path] = Notice(NoticeKind.FOREIGN_CHECKPOINT, reason)
    for path, notice in refused.items():
        then = "begins again" if found is None else f"goes on from {samples_of(found[0])} samples"
        aside = _set_aside(path)
        text = f"{quoted(path)} {notice.text}; the run {then}, and the file is set aside in {quoted(aside.parent)}"
        give_notice(notice.kind, text)
    return found


def _set_aside(path: Path) -> Path:
    """Move a file to where no run looks for it, but its user may; return its new path. Raises StorageLost where the
    storage refuses."""
    aside = path.parents[1] / SET_ASIDE / path.name
    with own_file(aside):
        aside.parent.mkdir(exist_ok=True)
        return path.replace(aside)


def samples_of(path: Path) -> int:
    """Return how many samples the run had seen that saved this checkpoint."""
    return int(path.name[:NUM_DIGITS])


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
