"""What is said of a command line that cannot be taken: one message that ends with the remedy, as of all other bad input."""

from __future__ import annotations

import argparse
import sys
from typing import Any, NoReturn

from batchscout.orchestrator.near_words import instead
from batchscout.orchestrator.terminal import printable


class CommandLine(argparse.ArgumentParser):
    """An ArgumentParser that says which words there are, and which one was meant."""

    def error(self, message: str) -> NoReturn:
        """End with what argparse has found: a word that is missing, or one that is no number."""
        _refuse(f"{message}; {self.prog} --help says what it takes")

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        """Refuse a word that is no choice. argparse asks so of verbs, options and arguments alike."""
        if action.choices is not None and value not in action.choices:
            after = f" after {'/'.join(action.option_strings)}" if action.option_strings else ""
            _refuse(f"{self.prog} takes no {value!r}{after}; {instead(value, [*action.choices])}")

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Refuse what is left over. argparse asks each verb so, which alone knows its options."""
        found, unknown = super().parse_known_args(args, namespace)
        if unknown:
            word = unknown[0].partition("=")[0]
            options = [option for option in self._option_string_actions if option.startswith("--")]
            remedy = instead(word, options) if word.startswith("-") else "quote what has spaces in it, or leave it out"
            _refuse(f"{self.prog} takes no {word!r}; {remedy}")
        return found, unknown


def _refuse(message: str) -> NoReturn:
    print(f"batchscout: {printable(message)}", file=sys.stderr)
    sys.exit(2)
