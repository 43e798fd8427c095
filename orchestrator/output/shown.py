"""Text as rich prints it, whoever wrote it: Text itself lets escape sequences through to the terminal."""

from __future__ import annotations

from rich.text import Text

from orchestrator.terminal import printable


def shown(text: str, style: str = "") -> Text:
    return Text(printable(text), style=style)
