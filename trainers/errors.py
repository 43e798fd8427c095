"""What an exception of the user's code says, whatever it is. Loads no torch."""

from __future__ import annotations

import itertools
import sys
import traceback
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from importlib.machinery import PathFinder
from pathlib import Path

from batchscout.trainers.user_code import OURS, is_librarys

MOST_OF_A_LINE = 300


def first_of(names: Sequence[object], most: int) -> str:
    """Return `a, b and 3 more`: the first `most` names, and how many there are beside them."""
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(map(str, names[:most])) + more


def said_by(error: BaseException) -> str:
    """Return the exception's text; nothing where to ask for it raises another one."""
    try:
        return str(error)
    except Exception:
        return ""


class LossFault(ValueError):
    """What the model or its loss returns is not what a run can train on. The message is in the user's words."""


class DataFault(ValueError):
    """Samples cannot be put together in a batch. The message is in the user's words."""


class SourceFault(ValueError):
    """An object that trains elsewhere cannot be made, or not be honoured. The message is in the user's words."""


class NotInTime(SourceFault):
    """An object was not made within the time that there is for it. The message is in the user's words."""


class LossNotSeen(SourceFault):
    """All but the loss of a batch was found in a script. The message is in the user's words."""


class NoStudy(SourceFault):
    """What trains elsewhere is no study of one loss by one optimizer. The message is in the user's words."""


class Obstacle(StrEnum):
    """What keeps a training step from being followed with tensors that have shapes and no values."""

    READS_VALUES = "reads_values"
    """It reads a tensor's values: item(), a condition on it, a result as large as the values say."""
    UNKNOWN_OPERATION = "unknown_operation"
    """It calls an operation that has no kernel for shapes alone."""
    RAISED = "raised"
    """It raises, and may do so in this way only."""
    ON_THE_HOST = "on_the_host"
    """It leaves tensors in the memory of the host, where those that stand for the device's are, too."""
    ENDED = "ended"
    """It ended the process that followed it."""


@dataclass(frozen=True)
class NotFollowed:
    """Why a training step was not followed."""

    obstacle: Obstacle
    what: str
    """The operation, what was raised, or how the process ended."""
    where: str = ""
    """The file and line in which that was; empty where they are not known."""

    def __str__(self) -> str:
        told = f"{self.what}{self.where and f', in {self.where}'}"
        match self.obstacle:
            case Obstacle.READS_VALUES:
                return (
                    f"a training step of it reads a tensor's values ({told}), and a prediction knows their shapes alone"
                )
            case Obstacle.UNKNOWN_OPERATION:
                return f"it calls an operation that torch knows no shapes for ({told}); torch.library.register_fake tells them"
            case Obstacle.RAISED:
                return f"a training step of it raises where tensors have shapes and no values ({told})"
            case Obstacle.ON_THE_HOST:
                return f"{told} keeps tensors on the host, and their bytes cannot be told from the device's"
            case Obstacle.ENDED:
                return f"the process that followed a training step of it ended ({told})"


def users_frame(error: BaseException) -> tuple[str, int]:
    """Return the file and line of the user's code in which an error was raised, or from which; where none of that was running,
    those in which it was raised."""
    frames = traceback.extract_tb(error.__traceback__)
    frame = next((frame for frame in reversed(frames) if _is_the_users(frame.filename)), frames[-1])
    return frame.filename, frame.lineno or 0


def _is_the_users(file: str) -> bool:
    return not file.startswith("<frozen ") and not is_librarys(Path(file))


def innermost_line(error: BaseException, leave_out: str) -> str:
    """Return "FILE, line N" of the innermost code, a library's too, that is neither ours nor below the directory `leave_out`; empty
    where there is none."""
    theirs = [one for one in traceback.extract_tb(error.__traceback__) if not one.filename.startswith((leave_out, "<"))]
    frames = [frame for frame in theirs if not Path(frame.filename).is_relative_to(OURS)]
    return f"{frames[-1].filename}, line {frames[-1].lineno}" if frames else ""


def raised_text(error: BaseException) -> str:
    """Return the exception's type, its first line where it has one, what was noted on its way, and which library a file hides that
    lacks what was looked for in it."""
    said, name = first_line(error), type(error).__name__
    notes = "".join(f" ({note})" for note in (*getattr(error, "__notes__", ()), *_hidden_library(error)))
    return f"{name if said == name else f'{name}: {said}'}{notes}"


def raised_where(error: BaseException) -> str:
    """Return what was raised, and the line of the user's code in which, or from which, it was."""
    file, line = users_frame(error)
    return f"{raised_text(error)} (in {file}, line {line})"


def _hidden_library(error: BaseException) -> Iterator[str]:
    """Yield, at most once, the file in which a name was looked for, where that lies before a library of its name on sys.path."""
    looked_in = getattr(error.obj, "__name__", None) if isinstance(error, AttributeError) else None
    looked_in = error.name if isinstance(error, ImportError) else looked_in
    module = sys.modules.get(str(looked_in).partition(".")[0])
    if module is None or not (file := getattr(module, "__file__", None)) or not _is_the_users(file):
        return
    later = itertools.dropwhile(lambda folder: not Path(file).is_relative_to(Path(folder).absolute()), sys.path)
    hidden = PathFinder.find_spec(module.__name__, [*later][1:])
    if hidden is not None and hidden.origin not in (None, file):
        yield f"{file} hides the library '{module.__name__}'; if that is meant, rename the file"


def first_line(error: BaseException) -> str:
    """Return the first line that says something, or else the exception's type."""
    lines = (line for line in said_by(error).splitlines() if line.strip())
    return next(lines, type(error).__name__)[:MOST_OF_A_LINE]
