"""What is said of a command line that cannot be taken: one message that ends with the remedy, as of all other bad input."""

from __future__ import annotations

import argparse
import shlex
import sys
from typing import Any, NoReturn

from batchscout.orchestrator.near_words import OTHER_WORDS, instead
from batchscout.orchestrator.terminal import printable

BY_ITSELF = ("--resume", "--continue", "--resume-from-checkpoint")
"""Options of other programs for what `run` does without one."""


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
            word, _, value = unknown[0].partition("=")
            typed = sys.argv[1:] if args is None else list(args)
            after = typed[typed.index(unknown[0]) + 1 :] if unknown[0] in typed else []
            remedy = (
                self._option_meant(word, value or "".join(after[:1]))
                if word.startswith("-")
                else self._argument_meant(unknown[0])
            )
            _refuse(f"{self.prog} takes no {word!r}; {remedy}")
        return found, unknown

    def _option_meant(self, word: str, value: str) -> str:
        """Return the remedy for an option that there is not: one of ours, or a key of the study file."""
        options = [option for option in self._option_string_actions if option.startswith("--")]
        if "--set" not in options or OTHER_WORDS.get(word) in options:
            return instead(word, options)
        if word in BY_ITSELF:
            return "run goes on by itself with what is there; leave it out"
        from batchscout.orchestrator.config.faults import as_option  # no command line but a wrong one needs the keys

        return as_option(word.lstrip("-").replace("-", "_"), value) or instead(word, options)

    def _argument_meant(self, word: str) -> str:
        """Return the remedy for an argument too many: the option that takes it."""
        if "=" in word and "--set" in self._option_string_actions:
            return f"write --set {shlex.quote(word)}"
        for action in self._actions:
            for choice in (word, OTHER_WORDS.get(word.lower())):
                if action.option_strings and choice in (action.choices or ()):
                    return f"write {action.option_strings[-1]} {choice}"
        return "quote what has spaces in it, or leave it out"


def _refuse(message: str) -> NoReturn:
    print(f"batchscout: {printable(message)}", file=sys.stderr)
    sys.exit(2)
