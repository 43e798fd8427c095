"""What an exception of the user's code says, whatever it is. Loads no torch."""

from __future__ import annotations

import traceback

MOST_OF_A_LINE = 300


def said_by(error: BaseException) -> str:
    """Return the exception's text; nothing where to ask for it raises another one."""
    try:
        return str(error)
    except Exception:
        return ""


class LossFault(ValueError):
    """What the model or its loss returns is not what a run can train on. The message is in the user's words."""


def users_frame(error: BaseException) -> tuple[str, int]:
    """Return the file and line in which an error was raised, or from which: the last one outside of installed libraries, where
    there is one."""
    frames = traceback.extract_tb(error.__traceback__)
    frame = next((frame for frame in reversed(frames) if "site-packages" not in frame.filename), frames[-1])
    return frame.filename, frame.lineno or 0


def first_line(error: BaseException) -> str:
    """Return the first line that says something, or else the exception's type."""
    lines = (line for line in said_by(error).splitlines() if line.strip())
    return next(lines, type(error).__name__)[:MOST_OF_A_LINE]
