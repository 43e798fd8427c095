"""What a script does after the two steps that were watched, and a study does not: as far as its syntax tree says so for sure, for people to know."""

from __future__ import annotations

import ast
from pathlib import Path

from batchscout.trainers.sources.watch.length import rounds_of
from batchscout.trainers.sources.watch.observer import Place, Seen
from batchscout.trainers.sources.watch.statements import (
    targets_of,
)


def _line(node: ast.stmt | ast.expr, place: Place) -> str:
    return f"line {node.lineno} of {Path(place.file).name}"


def optimizer_anew(seen: Seen) -> str | None:
    """Return where the loop is in each of whose rounds the run has another optimizer; None where it has one throughout."""
    optimizer = seen.steps[0].optimizer
    for place in seen.backward.places:
        for loop in seen.loops_of(place):
            targets = targets_of(loop) if isinstance(loop, ast.For) else set[str]()
            is_another = seen.made_in(loop, place, optimizer) or any(place.get(one) is optimizer for one in targets)
            if is_another and rounds_of(loop, place, None) != 1:
                return _line(loop, place)
    return None
