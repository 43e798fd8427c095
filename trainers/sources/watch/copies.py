"""Copies of the modules that a script trains, each of which can stand in the place of the script's own."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Iterator, Sequence
from typing import Any

from torch import nn

from batchscout.trainers.sources.watch.observer import Seen

_numbers = itertools.count(1)


class Copies:
    """Copies of all modules that are trained, which share what these share."""

    def __init__(self, seen: Seen) -> None:
        self.number, self.modules = next(_numbers), copy.deepcopy(seen.pristine)
        self.parts = {key: list(module.modules()) for key, module in self.modules.items()}
        """As they were made: others may be put around them later."""

    def __deepcopy__(self, memo: dict[int, Any]) -> Copies:
        again = copy.copy(self)
        again.number = next(_numbers)
        again.modules, again.parts = copy.deepcopy(self.modules, memo), copy.deepcopy(self.parts, memo)
        return again

    def of_parameters(self, seen: Seen) -> Iterator[tuple[nn.Parameter, nn.Parameter]]:
        """Yield the script's own parameters, each with its copy."""
        for key, own in seen.parameters.items():
            yield from zip(own, self.modules[key].parameters(), strict=True)

    def put_in_use(self, seen: Seen) -> None:
        """Make the script's own modules these copies: whatever of its code holds one of them, has one of these then."""
        if seen.in_use != self.number:
            for key, parts in self.parts.items():
                _give(seen.parts[key], [part.__dict__ for part in parts])
            seen.in_use = self.number


def give_back(seen: Seen, number: int) -> None:
    """Make the script's modules its own again, if they are these copies, whose memory is free then."""
    if seen.in_use == number:
        for key, own in seen.own.items():
            _give(seen.parts[key], own)
        seen.in_use = 0


def _give(parts: Sequence[nn.Module], attributes: Sequence[dict[str, Any]]) -> None:
    for part, own in zip(parts, attributes, strict=True):
        part.__dict__ = own
