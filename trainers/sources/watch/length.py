"""How long a script trains: from the loops around its call of backward, and what these end at."""

from __future__ import annotations

import ast
import math
from collections.abc import Iterator
from typing import Any

from batchscout.trainers.sources.settings import num_samples_of
from batchscout.trainers.sources.watch.batches import FromLoader
from batchscout.trainers.sources.watch.observer import Place, Seen
from batchscout.trainers.sources.watch.replay import LossOfBatch
from batchscout.trainers.sources.watch.statements import Loop, ends_at, loops_around


def run_samples(loss: LossOfBatch, seen: Seen, samples_per_step: int) -> int | None:
    """Return the samples that the script's run has; None where that is not to be seen."""
    assert seen.backward is not None
    loops = [(loop, place) for place, tree in _places(seen) for loop in loops_around(tree, place.position)]
    ends = [end for loop, place in loops for end in _ends(loop, place)]
    most = min(ends) * samples_per_step if ends else None
    counts = [_count(loop, place) for loop, place in loops]
    steps_or_passes = [one for one in counts if one is not None and not _is_of_micro_batches(one, seen)]
    rounds = math.prod(steps_or_passes)
    goes_through = any(
        isinstance(loop, ast.For) and count is None for (loop, _), count in zip(loops, counts, strict=True)
    )
    found = None
    if goes_through and isinstance(loss.source, FromLoader):
        found = rounds * (num_samples_of(loss.source.loader.dataset) or 0)
    elif steps_or_passes:
        found = rounds * samples_per_step
    return min((int(one) for one in (found, most) if one), default=None)


def _places(seen: Seen) -> Iterator[tuple[Place, ast.Module]]:
    assert seen.backward is not None
    for place in seen.backward.places:
        with open(place.file, "rb") as stream:
            yield place, ast.parse(stream.read())


def _is_of_micro_batches(count: int, seen: Seen) -> bool:
    return count == seen.steps[0].num_backwards


def _count(loop: Loop, place: Place) -> int | None:
    """Return how often a loop over a range goes round; None of any other."""
    if not isinstance(loop, ast.For):
        return None
    over = loop.iter
    while isinstance(over, ast.Call) and not _is_range(over) and over.args:  # tqdm, enumerate
        if ast.unparse(over.func).endswith("islice") and len(over.args) == 2:
            return _whole_number(_value(over.args[1], place))
        over = over.args[0]
    if not (isinstance(over, ast.Call) and _is_range(over)):
        return None
    values = [_value(one, place) for one in over.args]
    return len(range(*values)) if all(isinstance(one, int) for one in values) else None


def _whole_number(value: Any) -> int | None:
    return value if isinstance(value, int) else None


def _is_range(call: ast.Call) -> bool:
    return isinstance(call.func, ast.Name) and call.func.id in ("range", "trange")


def _ends(loop: Loop, place: Place) -> Iterator[float]:
    """Yield the counts at which a loop ends: a counter of steps that has reached one."""
    for one in ends_at(loop):
        value = _value(one, place)
        if isinstance(value, int | float) and not isinstance(value, bool) and value > 1:
            yield float(value)


def _value(node: ast.expr, place: Place) -> Any:
    """Return what a plain expression stands for: a number, a name, an attribute, or arithmetic of these; None of anything else."""
    if any(not isinstance(one, _PLAIN) for one in ast.walk(node)):
        return None
    try:
        code = compile(ast.fix_missing_locations(ast.Expression(node)), "<the script>", "eval")
        return eval(code, {**place.global_, **place.local})  # names and numbers of the script's own
    except Exception:  # a name that is given a value later
        return None


_PLAIN = (ast.Name, ast.Attribute, ast.Constant, ast.BinOp, ast.operator, ast.UnaryOp, ast.unaryop, ast.expr_context)
