"""`steps.jsonl` in a run's directory: every step of the run, so that spikes and plateaus can be drawn. Loads no torch.

A line is a JSON object for steps that follow each other: the number of the first, and a list for each figure, to the
seven digits that float32 carries; null is a figure that was not finite. Lines are only ever appended. A run that goes
on from a checkpoint takes some steps again, so a line is the last word on its first step and on all that come after
it.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trainers.files import own_file

FILE_NAME = "steps.jsonl"
FIGURES = ("loss", "gradient_norm", "learning_rate")


@dataclass(frozen=True)
class Step:
    """One optimizer step."""

    number: int
    """From 1."""
    samples_seen: int
    """Training samples up to its end, over all ranks."""
    loss: float
    """The mean over its targets, before its update."""
    gradient_norm: float
    """Before clipping."""
    learning_rate: float


def line_of(steps: Sequence[Step]) -> str:
    """Return the line for steps that follow each other; there is at least one."""
    line: dict[str, Any] = {"first_step": steps[0].number, "samples_seen": [step.samples_seen for step in steps]}
    line |= {name: [_short(getattr(step, name)) for step in steps] for name in FIGURES}
    return json.dumps(line) + "\n"


def _short(value: float) -> float | None:
    return float(f"{value:.7g}") if math.isfinite(value) else None


def append(path: Path, lines: Iterable[str]) -> None:
    """Append lines. Raises StorageLost where the storage refuses."""
    with own_file(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("ab") as file:
            # A process that was killed may have left half a line: what follows it must not become a part of it.
            file.write(b"".join([b"\n" * (not _ends_a_line(path)), *(line.encode() for line in lines)]))


def _ends_a_line(path: Path) -> bool:
    with path.open("rb") as file:
        if file.seek(0, os.SEEK_END) == 0:
            return True
        file.seek(-1, os.SEEK_END)
        return file.read() == b"\n"


def settle(path: Path) -> None:
    """Sync the file to the disk, if there is one: a checkpoint must not outlive a crash that its steps do not."""
    with own_file(path):
        if path.exists():
            with path.open("ab") as file:
                os.fsync(file.fileno())


def read_steps(path: Path) -> list[Step]:
    """Return every step of a run once, in its order; none where the file does not exist.

    Half a line, which a killed process leaves, is passed over: the run has taken its steps again, or ended with them.
    """
    steps: list[Step] = []
    for line in path.read_bytes().splitlines() if path.exists() else ():
        new = _steps_of(line)
        while new and steps and steps[-1].number >= new[0].number:
            steps.pop()
        steps += new
    return steps


def _steps_of(line: bytes) -> list[Step]:
    """Return the steps of a line, or none where it is half a line."""
    try:
        told = json.loads(line)
    except ValueError:
        return []
    columns = zip(told["samples_seen"], *(map(_number, told[name]) for name in FIGURES), strict=True)
    return [Step(number, *figures) for number, figures in enumerate(columns, start=told["first_step"])]


def _number(value: float | None) -> float:
    return math.nan if value is None else value
