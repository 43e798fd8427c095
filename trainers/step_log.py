"""`steps.jsonl` in a run's directory: every step of the run, so that spikes and plateaus can be drawn. Loads no torch.

A line is a JSON object for steps that follow each other: the number of the first, and a list for each figure, to the
seven digits that float32 carries or fewer; null is a figure that was not finite. Its last key is its checksum. Lines are only
ever appended. A run that goes
on from a checkpoint takes some steps again, so a line is the last word on its first step and on all that come after
it.
"""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from batchscout.trainers import lines
from batchscout.trainers.files import exists, own_file

FILE_NAME = "steps.jsonl"
NUM_DIGITS = {"loss": 7, "gradient_norm": 7, "learning_rate": 7, "data_wait": 2}
"""The significant digits of each figure; a share of a time is not known to more."""
_FIRST_NUMBER = re.compile(rb'"first_step": (\d{1,18})[,}]')
_FIRST_SAMPLES = re.compile(rb'"samples_seen": \[(\d{1,18})[,\]]')

_First = tuple[float, float]
"""A bound on the first step that a line tells of: its number, and the samples seen at its end."""
_UNTOLD: _First = (math.inf, math.inf)


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
    data_wait: float
    """The share of its time that it waited for data."""


def line_of(steps: Sequence[Step]) -> str:
    """Return the line for steps that follow each other; there is at least one."""
    line: dict[str, Any] = {"first_step": steps[0].number, "samples_seen": [step.samples_seen for step in steps]}
    line |= {name: [_short(getattr(step, name), digits) for step in steps] for name, digits in NUM_DIGITS.items()}
    return lines.line_of(json.dumps(line).encode()).decode()


def _short(value: float, num_digits: int) -> float | None:
    return float(f"{value:.{num_digits}g}") if math.isfinite(value) else None


def append(path: Path, new_lines: Iterable[str]) -> None:
    """Append lines. Raises StorageLost where the storage refuses."""
    with own_file(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("ab") as file:
            # A process that was killed may have left half a line: what follows it must not become a part of it.
            file.write(b"".join([b"\n" * (not _ends_a_line(path)), *(line.encode() for line in new_lines)]))


def _ends_a_line(path: Path) -> bool:
    with path.open("rb") as file:
        if file.seek(0, os.SEEK_END) == 0:
            return True
        file.seek(-1, os.SEEK_END)
        return file.read() == b"\n"


def settle(path: Path) -> None:
    """Sync the file to the disk, if there is one: a checkpoint must not outlive a crash that its steps do not."""
    with own_file(path):
        if exists(path):
            with path.open("ab") as file:
                os.fsync(file.fileno())


def read_steps(path: Path) -> list[Step]:
    """Return every step of a run once, in its order; none where the file does not exist.

    Half a line, which a killed process leaves, is passed over: the run has taken its steps again, or ended with them.
    A damaged line is left out, and so are the steps before it that it may have told anew. A notice names it, unless a
    later line tells its steps again. Raises StorageLost where the file cannot be read.
    """
    steps: list[Step] = []
    left_out: dict[int, _First] = {}
    for number, line in enumerate(lines.lines_in(path), start=1):
        new = _steps_of(line)
        if new:
            _forget_from(steps, (new[0].number, math.inf))
            left_out = {one: first for one, first in left_out.items() if not _reaches_back(new[0], first)}
            steps += new
        else:
            first = _first_told(line)
            _forget_from(steps, first)
            if not _is_torn(line):
                left_out[number] = first
    lines.tell_left_out(path, list(left_out), "the loss and the gradient norm of these steps")
    return steps


def _steps_of(line: bytes) -> list[Step]:
    """Return the steps of a line; none where it is damaged, or half a line."""
    body = lines.body_of_last(line)
    if body is None:
        return []
    told = json.loads(body)
    columns = zip(told["samples_seen"], *(map(_number, told[name]) for name in NUM_DIGITS), strict=True)
    return [Step(number, *figures) for number, figures in enumerate(columns, start=told["first_step"])]


def _is_torn(line: bytes) -> bool:
    """Tell whether a line may be one that a process is writing now, or was killed over; who appends to that ends it."""
    return b"}" not in line and not (line.endswith(b"\n") and lines.CHECKSUM_KEY in line)


def _first_told(line: bytes) -> _First:
    """Return the first step of a damaged line, by its number and by its samples. Where one byte has changed, one of the two is
    still right, so the earlier of both is never too late."""
    numbers, samples = _FIRST_NUMBER.findall(line), _FIRST_SAMPLES.findall(line)
    return min(map(int, numbers), default=math.inf), min(map(int, samples), default=math.inf)


def _forget_from(steps: list[Step], first: _First) -> None:
    while steps and (steps[-1].number >= first[0] or steps[-1].samples_seen >= first[1]):
        steps.pop()


def _reaches_back(step: Step, first: _First) -> bool:
    """Tell whether what begins with this step surely tells again all that a damaged line told."""
    return first != _UNTOLD and step.number <= first[0] and step.samples_seen <= first[1]


def _number(value: float | None) -> float:
    return math.nan if value is None else value
