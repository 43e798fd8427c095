"""The learning rate of a script over its whole run: of its scheduler, or of the expression that it sets the rate to."""

from __future__ import annotations

import ast
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from batchscout.trainers.sources.schedules import MOST_CALLS, rates_of, spread
from batchscout.trainers.sources.watch.observer import Place, Seen
from batchscout.trainers.sources.watch.statements import parsed

_SAME = 1e-6


def rates_of_run(seen: Seen, num_steps: int, steps_per_pass: float | None) -> list[float] | None:
    """Return the rate of the first group in steps that are evenly spread over the run, all of them where there are few; None where
    that cannot be foretold.

    steps_per_pass: optimizer steps of a pass over the data, of a loader.
    """
    optimizer, first = seen.steps[0].optimizer, seen.steps[0].rates[0]
    ours = [one for one in seen.schedulers if one.optimizer is optimizer]
    inner = {id(part) for one in ours for part in getattr(one, "_schedulers", ())}
    apart = [one for one in ours if id(one) not in inner]
    if (
        len(apart) > 1
    ):  # one of them steps by steps while the other does by passes, or warms up and leaves: what is seen does not tell
        return None
    schedule = next(iter(apart), None)
    if schedule is None:
        constant = len({step.rates for step in seen.steps}) == 1
        return [first, first] if constant else _of_expression(seen, num_steps)
    calls_between = schedule.last_epoch if len(seen.steps) > 1 else 0
    if calls_between:
        later = rates_of(schedule, max(0, calls_between * (num_steps - 2)))
        return later and [first, *later[::calls_between]]
    if len({step.rates for step in seen.steps}) > 1:  # the script sets it beside a schedule that steps by passes
        return None
    passes = math.ceil(num_steps / steps_per_pass) if steps_per_pass else 0
    later = rates_of(schedule, passes - 1) if passes else None
    return later and [later[min(len(later) - 1, int(step / (steps_per_pass or 1)))] for step in spread(num_steps)]


def _of_expression(seen: Seen, num_steps: int) -> list[float] | None:
    """Return the rates that an expression like `get_lr(step)` has over the run: one that gives the rates that were seen."""
    assert seen.backward is not None
    if num_steps > MOST_CALLS:
        return None
    wanted = [step.rates[0] for step in seen.steps]
    for place in seen.backward.places:
        tree = parsed(place.file)
        for expression in _set_as_rate(tree):
            for counter in _counters(tree):
                for first in (0, 1):
                    if _same(_values(expression, place, counter, [first, first + 1]), wanted):
                        return _values(expression, place, counter, [first + step for step in spread(num_steps)])
    return None


def _same(values: Sequence[float] | None, wanted: Sequence[float]) -> bool:
    return values is not None and all(
        math.isclose(one, other, rel_tol=_SAME) for one, other in zip(values, wanted, strict=False)
    )


def _values(expression: ast.expr, place: Place, counter: str, steps: Sequence[int]) -> list[float] | None:
    """Return what an expression is where the counter has these values; None where it is no number."""
    code = compile(ast.fix_missing_locations(ast.Expression(expression)), "<the script>", "eval", dont_inherit=True)
    names: Mapping[str, Any] = {**place.global_, **place.local}
    try:
        return [float(eval(code, {**names, counter: step})) for step in steps]  # the script's own expression
    except Exception:  # of the script, whose other names are not what they were
        return None


def _set_as_rate(tree: ast.Module) -> Iterator[ast.expr]:
    """Yield what is set as `group["lr"]`, and of a name what that is given."""
    assignments = [one for one in ast.walk(tree) if isinstance(one, ast.Assign)]
    for one in assignments:
        if any(isinstance(target, ast.Subscript) and ast.unparse(target.slice) == "'lr'" for target in one.targets):
            yield one.value
            name = ast.unparse(one.value)
            yield from (other.value for other in assignments if name in map(ast.unparse, other.targets))


def _counters(tree: ast.Module) -> set[str]:
    """Return the names that loops count in."""
    counted = {ast.unparse(one.target) for one in ast.walk(tree) if isinstance(one, ast.AugAssign)}
    looped = {
        name.id
        for one in ast.walk(tree)
        if isinstance(one, ast.For)
        for name in ast.walk(one.target)
        if isinstance(name, ast.Name)
    }
    return {one for one in counted | looped if one.isidentifier()}
