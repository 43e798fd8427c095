"""The page of every verb and option, made of the parser that reads the command line."""

from __future__ import annotations

import argparse
from collections.abc import Iterator

from batchscout.orchestrator.cli import _parser
from docs.site.keys import prose

INTRODUCTION = """\
# Every command

`batchscout VERB --help` says the same. `python -m batchscout` is the same program. Exit codes: 0 fine, 1 no recommendation or a trial
failed, 2 bad input (one message, no traceback), 130 Ctrl-C.
"""


def page() -> str:
    """Return the page."""
    return INTRODUCTION + "".join(verb_text(name, parser) for name, parser in verbs_of(_parser()))


def verbs_of_the_program() -> dict[str, set[str]]:
    """Return the options of every verb, by the verb as it is typed after the program's name."""
    found = verbs_of(_parser())
    return {
        name.partition(" ")[2]: {option for action in parser._actions for option in action.option_strings}
        for name, parser in found
    }


def verbs_of(parser: argparse.ArgumentParser) -> Iterator[tuple[str, argparse.ArgumentParser]]:
    """Yield every verb as it is typed, with its parser; of one that has verbs of its own, those."""
    below = [action for action in parser._actions if isinstance(action, argparse._SubParsersAction)]
    if not below:
        yield parser.prog, parser
    for verb in below:
        for one in verb.choices.values():
            yield from verbs_of(one)


def verb_text(name: str, parser: argparse.ArgumentParser) -> str:
    rows = "".join(
        f"| {_typed(action)} | {_help(action)} |\n"
        for action in parser._actions
        if action.help != argparse.SUPPRESS and not isinstance(action, argparse._HelpAction)
    )
    return f"\n## `{name}`\n\n{prose(parser.description or '')}\n\n| argument | meaning |\n|---|---|\n{rows}"


def _typed(action: argparse.Action) -> str:
    value = "" if action.nargs == 0 else _value(action)
    if not action.option_strings:
        return f"`{value}`" if action.nargs != "?" else f"`[{value}]`"
    return ", ".join(f"`{option} {value}`".replace(" `", "`") for option in action.option_strings)


def _value(action: argparse.Action) -> str:
    if action.choices is not None and not _has_many_choices(action):
        return "{" + ",".join(map(str, action.choices)) + "}"
    return str(action.metavar or action.dest.upper())


def _has_many_choices(action: argparse.Action) -> bool:
    """True of one whose choices are too wide for the first column."""
    return action.choices is not None and len(list(action.choices)) > 4


def _help(action: argparse.Action) -> str:
    """Return what an argument means. Its default stands there once, whether its help names it or not."""
    told = prose(action.help or "").replace("|", "\\|")
    choices = ", ".join(f"`{one}`" for one in action.choices or ()) if _has_many_choices(action) else ""
    silent = (None, False, argparse.SUPPRESS)
    named = "default" in told or action.default in silent or action.default == []
    default = "" if named else f" (default {action.default})"
    needed = " (must be given)" if action.required and action.option_strings else ""
    return (told + default + needed + (f"; one of {choices}" if choices else "")).strip()
