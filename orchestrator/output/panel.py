"""What a terminal shows of a running study below the lines that stay, drawn anew twice a second."""

from __future__ import annotations

from collections.abc import Callable
from typing import Self

from rich.console import Console, RenderableType
from rich.control import Control
from rich.live import Live
from rich.segment import ControlType, Segment


class Panel:
    """Lines that are replaced in place. Where the window has become narrower, the terminal has broken them into more lines than were
    printed; rich would leave those standing."""

    def __init__(self, console: Console, render: Callable[[], RenderableType], *, redirect: bool = True) -> None:
        """redirect: whether what is printed meanwhile is shown above the panel. A library that is imported may keep a stream for ever."""
        self._console, self._render = console, render
        self._widths: list[int] = []
        """Of the lines that the terminal shows."""
        self._live = Live(
            get_renderable=self.drawn, console=console, refresh_per_second=2, transient=True, redirect_stdout=redirect,
            redirect_stderr=redirect,
        )  # fmt: skip

    def __enter__(self) -> Self:
        """Show it, if this is a terminal."""
        if self._console.is_terminal:
            self._live.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._live.stop()

    def drawn(self) -> RenderableType:
        """Return what is drawn now, after removing what rich does not know to be there."""
        above = rows_broken_off(self._widths, self._console.width)
        self._console.control(Control(*[(ControlType.ERASE_IN_LINE, 2), (ControlType.CURSOR_UP, 1)] * above))
        drawn = self._render()
        lines = self._console.render_lines(drawn, pad=False)
        self._widths = [Segment.get_line_length(line) for line in lines]
        return drawn


def rows_broken_off(widths: list[int], columns: int) -> int:
    """Return by how many rows lines of these widths take more than a row each, in a window of so many columns."""
    return sum(max(0, -(-width // columns) - 1) for width in widths)
