"""Which script a command line runs, and with which arguments: `train.py --lr 1e-3`, `-m package.train`, `torchrun train.py`. Pure."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import PurePath

_LAUNCHERS = ("torchrun", "accelerate", "deepspeed", "composer", "fabric", "lightning")
_PYTHON = re.compile(r"python(\d(\.\d+)?)?")
_MODULE = ("-m", "--module")
_PROCESSES = re.compile(r"--num[_-]processes")
_PROCESSES_OF_A_NODE = re.compile(r"--(nproc[_-]per[_-]node|num[_-]gpus|nproc|devices)")
_NODES = re.compile(r"--(nnodes|num[_-]nodes)")
_OF_TORCH = "torch.distributed.run", "torch.distributed.launch", "accelerate.commands.launch"


@dataclass(frozen=True)
class Command:
    """What a command line runs."""

    script: str
    """A file, or a module as `python -m` takes it."""
    args: tuple[str, ...] = ()
    """All after its name."""
    num_processes: int = 1
    """In which it trains together."""
    uncounted: str = ""
    """The launcher's words that say this without a number: `--nproc_per_node=gpu`."""


def command_in(words: Sequence[str]) -> Command | None:
    """Return the script that these words run; None where they name none."""
    if not words:
        return None
    name = PurePath(words[0]).name
    if words[0] in _MODULE:
        return _module(words[1:])
    if _PYTHON.fullmatch(name) or name in _LAUNCHERS:
        return _launched(words[1:])
    return Command(words[0], tuple(words[1:])) if words[0].endswith(".py") else None


def _module(words: Sequence[str]) -> Command | None:
    if not words:
        return None
    return _launched(words[1:]) if words[0] in _OF_TORCH else Command(words[0], tuple(words[1:]))


def _launched(words: Sequence[str]) -> Command | None:
    """Return what comes after a launcher's own words: the first file of Python, or what `-m` names."""
    place = next((n for n, word in enumerate(words) if word.endswith(".py") or word in _MODULE), None)
    if place is None:
        return None
    found = _module(words[place + 1 :]) if words[place] in _MODULE else Command(words[place], tuple(words[place + 1 :]))
    # The launcher's processes on all nodes, as far as its words say so.
    said = [_value_of(words[:place], one) for one in (_PROCESSES, _PROCESSES_OF_A_NODE, _NODES)]
    in_all, on_a_node, nodes = (int(value) if value.isdigit() else None for _, value in said)
    uncounted = [f"{name}={value}" for name, value in said if value and not value.isdigit()] if in_all is None else []
    num_processes = in_all or (on_a_node or 1) * (nodes or 1)
    return found and replace(found, num_processes=found.num_processes * num_processes, uncounted=" ".join(uncounted))


def _value_of(words: Sequence[str], option: re.Pattern[str]) -> tuple[str, str]:
    """Return an option as it is typed, and its value; both empty where it is not there."""
    for word, following in zip(words, [*words[1:], ""], strict=False):
        name, equals, value = word.partition("=")
        if option.fullmatch(name):
            return name, value if equals else following
    return "", ""
