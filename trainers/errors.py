"""What an exception of the user's code says, whatever it is. Loads no torch."""

from __future__ import annotations

MOST_OF_A_LINE = 300


def said_by(error: BaseException) -> str:
    """Return the exception's text; nothing where to ask for it raises another one."""
    try:
        return str(error)
    except Exception:
        return ""


def first_line(error: BaseException) -> str:
    """Return the first line that says something, or else the exception's type."""
    lines = (line for line in said_by(error).splitlines() if line.strip())
    return next(lines, type(error).__name__)[:MOST_OF_A_LINE]
