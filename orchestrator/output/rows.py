"""Rows of words for a terminal: beside each other where they fit, and one below the other where they do not."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Sequence

_GAP = 2
_INDENT = 2
# Fewer columns hold no sentence that is read with ease.
LEAST_ROOM = 30


def labelled_lines(rows: Sequence[tuple[str, str]], width: int, indent: int = _INDENT) -> Iterator[str]:
    """Yield a name and its text for each row. Texts begin in one column and are broken between words; where that leaves them little
    room they go below their names."""
    column = indent + max((len(name) for name, _ in rows), default=0) + _GAP
    for name, text in rows:
        if width - column < LEAST_ROOM:
            if name.strip():
                yield " " * indent + name.rstrip()
            yield from _broken(text, width, indent + 2)
        else:
            first, *others = _broken(text, width, column) or [""]
            yield f"{' ' * indent}{name}".ljust(column) + first.lstrip() if first else f"{' ' * indent}{name}"
            yield from others


def table_lines(head: Sequence[str], rows: Sequence[Sequence[str]], width: int) -> Iterator[str]:
    """Yield a table of short cells; where the terminal is too narrow for it, the cells of each row below its first, after the names of
    their columns."""
    widths = [max(map(len, column)) for column in zip(head, *rows, strict=True)]
    if _INDENT + sum(widths) + _GAP * (len(widths) - 1) <= width:
        for row in (head, *rows):
            cells = (cell.ljust(size + _GAP) for cell, size in zip(row, widths, strict=True))
            yield (" " * _INDENT + "".join(cells)).rstrip()
        return
    for first, *cells in rows:
        yield " " * _INDENT + first
        yield from labelled_lines(list(zip(head[1:], cells, strict=True)), width, 2 * _INDENT)


def _broken(text: str, width: int, indent: int) -> list[str]:
    margin = " " * indent
    lines = text.splitlines()
    room = max(LEAST_ROOM, width - indent)
    return [
        margin + part
        for line in lines
        for part in textwrap.wrap(line, room, break_long_words=False, break_on_hyphens=False) or [""]
    ]
