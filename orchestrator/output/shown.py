"""Text as rich prints it, whoever wrote it: Text itself lets escape sequences through to the terminal."""

from __future__ import annotations

from rich.console import Console
from rich.text import Text

from orchestrator.signals import leave_dead_terminal
from orchestrator.terminal import printable


class Terminal(Console):
    """A console whose reader may leave, as `head` does: rich would end the program, and a study with it."""

    def on_broken_pipe(self) -> None:
        leave_dead_terminal()


def shown(text: str, style: str = "") -> Text:
    return Text(printable(text), style=style)
