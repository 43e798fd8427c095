"""Text as rich prints it, whoever wrote it: Text itself lets escape sequences through to the terminal."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable
from typing import IO, TYPE_CHECKING

from rich.console import Console
from rich.padding import Padding
from rich.table import Column, Table
from rich.text import Text

from batchscout.orchestrator.signals import leave_dead_terminal
from batchscout.orchestrator.terminal import printable

if TYPE_CHECKING:
    from batchscout.orchestrator.output.answer import Answer

WIDTH_OF_A_LOG = 160
"""Of tables, where no terminal says how wide it is."""


class Terminal(Console):
    """A console whose reader may leave, as `head` does: rich would end the program, and a study with it. In a log or a
    pipe no line is broken."""

    def __init__(self, *, quiet: bool = False, file: IO[str] | None = None) -> None:
        """file: None: stdout, whatever that is when something is printed."""
        has_width = sys.stdout.isatty() or "COLUMNS" in os.environ
        super().__init__(
            file=file,
            quiet=quiet,
            highlight=False,
            width=None if has_width else WIDTH_OF_A_LOG,
            soft_wrap=not has_width,
        )

    def print_indented(self, text: str, indent: int = 2, style: str = "") -> None:
        """Print a text whose lines all begin so far to the right: in a log it is one line, and on a terminal it is broken between words."""
        if self.soft_wrap:
            self.print(shown(" " * indent + text, style))
        else:
            self.print(Padding(shown(text, style), (0, 0, 0, indent), expand=False))

    def print_lines(self, lines: Iterable[str]) -> None:
        """Print lines that have their width already."""
        for line in lines:
            self.file.write(printable(line) + "\n")

    def on_broken_pipe(self) -> None:
        leave_dead_terminal()


def shown(text: str, style: str = "") -> Text:
    return Text(printable(text), style=style)


def print_answer(console: Console, answer: Answer, run_dir: str) -> None:
    """Print the five lines; on a terminal each wraps beside its label. A command that would wrap stands below, unbroken, to be copied whole.
    run_dir: as its user types it."""
    if not console.is_terminal:
        console.print(shown(answer.text(run_dir)))
        return
    style, lines = "green" if answer.is_decided else "yellow", answer.lines(run_dir)
    words, _, command = lines["Next"].rpartition("\n")
    is_long = command.startswith("batchscout ") and len(command) > console.width - max(map(len, lines)) - 2
    if is_long:
        lines["Next"] = words
    table = Table.grid(Column(no_wrap=True, style="bold"), Column(overflow="fold"), padding=(0, 2))
    for label, text in lines.items():
        table.add_row(label, shown(text, style=style if label == "Verdict" else ""))
    console.print(table)
    if is_long:
        console.print(shown(command), soft_wrap=True)
