"""Which script a command line runs, and with which arguments: `train.py --lr 1e-3`, `-m package.train`, `torchrun train.py`. Pure."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import PurePath

_LAUNCHERS = ("torchrun", "accelerate", "deepspeed", "composer", "fabric", "lightning")
_PYTHON = re.compile(r"python(\d(\.\d+)?)?")
_MODULE = ("-m", "--module")


def script_in(words: Sequence[str]) -> tuple[str, tuple[str, ...]] | None:
    """Return the script, a file or a module, and its arguments; None where the words name none. All after the script's name is its own."""
    if not words:
        return None
    name = PurePath(words[0]).name
    if words[0] in _MODULE:
        return (words[1], tuple(words[2:])) if len(words) > 1 else None
    if _PYTHON.fullmatch(name) or name in _LAUNCHERS:
        return _launched(words[1:])
    return (words[0], tuple(words[1:])) if words[0].endswith(".py") else None


def _launched(words: Sequence[str]) -> tuple[str, tuple[str, ...]] | None:
    """Return the script behind a launcher's own words: the first file of Python, or what comes after `-m`."""
    for place, word in enumerate(words):
        if word in _MODULE:
            return (words[place + 1], tuple(words[place + 2 :])) if place + 1 < len(words) else None
        if word.endswith(".py"):
            return word, tuple(words[place + 1 :])
    return None
