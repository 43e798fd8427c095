"""What an exception of the user's code says, whatever it is. Loads no torch."""

from __future__ import annotations

import traceback
from pathlib import Path

MOST_OF_A_LINE = 300


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


def users_frame(error: BaseException) -> tuple[str, int]:
    """Return the file and line of the user's code in which an error was raised, or from which; where none of that was running,
    those in which it was raised."""
    frames = traceback.extract_tb(error.__traceback__)
    frame = next((frame for frame in reversed(frames) if _is_the_users(frame.filename)), frames[-1])
    return frame.filename, frame.lineno or 0


_OURS = tuple(str(Path(__file__).parents[1] / package) for package in ("trainers", "orchestrator"))


def _is_the_users(file: str) -> bool:
    return "site-packages" not in file and not file.startswith((*_OURS, "<frozen "))


def raised_text(error: BaseException) -> str:
    """Return the exception's type, and its first line where it has one."""
    said = first_line(error)
    return said if said == type(error).__name__ else f"{type(error).__name__}: {said}"


def first_line(error: BaseException) -> str:
    """Return the first line that says something, or else the exception's type."""
    lines = (line for line in said_by(error).splitlines() if line.strip())
    return next(lines, type(error).__name__)[:MOST_OF_A_LINE]
