"""The learning rate of a script over its whole run: of its scheduler, or of the expression that it sets the rate to."""

from __future__ import annotations

import ast
import inspect
import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from types import CodeType
from typing import Any

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from batchscout.trainers.sources.schedules import MOST_CALLS, rates_of, spread
from batchscout.trainers.sources.watch.observer import Place, Seen
from batchscout.trainers.sources.watch.statements import compiled, is_over_batches, parsed

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
    if len(apart) > 1:  # one steps by steps and the other by passes, or warms up and leaves: what is seen does not tell
        return None
    schedule = next(iter(apart), None)
    if schedule is None:
        if not may_change(seen):
            return [first, first]
        return _of_passes(seen, num_steps, steps_per_pass) if _is_constant(seen) else _of_expression(seen, num_steps)
    # Not its calls until now: some scripts call it before the first step, too, or go on from a checkpoint.
    calls_between = seen.steps[-1].calls.get(id(schedule), 0) - seen.steps[0].calls.get(id(schedule), 0)
    if calls_between != int(calls_between) or calls_between < 0:  # `schedule.step(epoch + i / len(loader))`
        return None
    if calls_between := int(calls_between):
        later = rates_of(schedule, max(0, calls_between * (num_steps - 2)))
        return later and [first, *later[::calls_between]]
    if not _is_constant(seen) or _is_stepped_between_batches(schedule, seen):
        return None  # the script sets the rate beside a schedule of passes, or steps that after so many batches
    passes = math.ceil(num_steps / steps_per_pass) if steps_per_pass else 0
    later = rates_of(schedule, passes - 1) if passes else None
    return later and [later[min(len(later) - 1, int(step / (steps_per_pass or 1)))] for step in spread(num_steps)]


def may_change(seen: Seen) -> bool:
    """True if the rate is another later in the run, or the script has what might make it another."""
    optimizer = seen.steps[0].optimizer
    around = any(_sets_rate_around(place, optimizer) for place in seen.backward.places)
    return around or bool(seen.schedulers) or not _is_constant(seen)


def _is_constant(seen: Seen) -> bool:
    return len({step.rates for step in seen.steps}) == 1


def _sets_rate_around(place: Place, optimizer: Optimizer) -> bool:
    """True if a loop around a place sets a rate, itself or in a function that it calls, or steps a library's object that holds the optimizer and is
    no schedule of torch's."""
    loops = place.loops if place.is_the_scripts else []
    return bool(loops) and _sets_rate(loops[-1], place, optimizer, set())


def _sets_rate(node: ast.AST, place: Place, optimizer: Optimizer, known: set[Any]) -> bool:
    """known: the code of the functions that were looked into."""
    groups = {
        one.target.id
        for one in ast.walk(node)
        if isinstance(one, ast.For | ast.comprehension)
        and isinstance(one.target, ast.Name)
        and "param_groups" in ast.unparse(one.iter)
    }
    for one in ast.walk(node):
        targets = one.targets if isinstance(one, ast.Assign) else [one.target] if isinstance(one, ast.AugAssign) else []
        if any(_is_rate_of_group(target, groups) for target in targets):
            return True
        if isinstance(one, ast.Call) and _call_sets_rate(one, place, optimizer, known):
            return True
    return False


def _is_rate_of_group(target: ast.expr, groups: set[str]) -> bool:
    """True of `group["lr"]`. What a script logs is called so, too: `metrics["lr"]`. groups: the names of loops over groups."""
    if not (isinstance(target, ast.Subscript) and ast.unparse(target.slice) == "'lr'"):
        return False
    owner = ast.unparse(target.value)
    return owner in groups or "param_groups" in owner or re.fullmatch(r".*group|pg|g", owner) is not None


def _call_sets_rate(call: ast.Call, place: Place, optimizer: Optimizer, known: set[Any]) -> bool:
    owner, _, name = ast.unparse(call.func).rpartition(".")
    try:
        of = place.get(owner) if owner else None
        called: Any = inspect.unwrap(place.get(ast.unparse(call.func)))
        code = getattr(called, "__code__", None)
    except Exception:  # of the script's own objects, whose attributes may be computed
        return False
    takes_it = any(isinstance(one, ast.Name) and place.get(one.id) is optimizer for one in call.args)
    is_a_librarys = code is not None and "site-packages" in code.co_filename
    if is_a_librarys and name.startswith("step") and _holds(of, optimizer):
        return True
    if code is None or code in known or (is_a_librarys and not takes_it):
        return False
    known.add(code)
    if not (found := _function(code)):
        return False
    inside = replace(place, file=code.co_filename, local={"self": of}, global_=called.__globals__)
    return _sets_rate(found, inside, optimizer, known)


def _holds(owner: Any, optimizer: Optimizer) -> bool:
    """True of an object that has the optimizer, and is neither a schedule of torch's, which is followed, nor one of its own kind."""
    if isinstance(owner, Optimizer | LRScheduler) or type(owner).__module__.startswith(("torch.", "accelerate.")):
        return False
    return any(value is optimizer for value in getattr(owner, "__dict__", {}).values())


def _function(code: CodeType) -> ast.AST | None:
    """Return the syntax tree of a function; None where its file is not there, or it has no name."""
    if not Path(code.co_filename).is_file():
        return None
    inside = ast.walk(parsed(code.co_filename))
    functions = (one for one in inside if isinstance(one, ast.FunctionDef) and one.name == code.co_name)
    return min(functions, key=lambda one: abs(one.lineno - code.co_firstlineno), default=None)


def _is_stepped_between_batches(schedule: Any, seen: Seen) -> bool:
    """True if the loop over the batches steps a schedule, though not after each of the first steps."""
    for place in seen.backward.places:
        batches = next((one for one in place.loops if isinstance(one, ast.For) and is_over_batches(one)), None)
        called = [one.func for one in ast.walk(batches) if isinstance(one, ast.Call)] if batches else []
        owners = [one.value for one in called if isinstance(one, ast.Attribute) and one.attr == "step"]
        if any(place.get(ast.unparse(owner)) is schedule for owner in owners):
            return True
    return False


def _of_passes(seen: Seen, num_steps: int, steps_per_pass: float | None) -> list[float] | None:
    """Return the rates that an expression like `lr * 0.1 ** (epoch // 30)` has over the run, where it has the rate of the first pass."""
    passes = math.ceil(num_steps / steps_per_pass) if steps_per_pass else 0
    if not passes or passes > MOST_CALLS:
        return None
    for place in seen.backward.places:
        tree = parsed(place.file)
        for expression in _set_as_rate(tree):
            read = {one.id for one in ast.walk(expression) if isinstance(one, ast.Name)}
            for counter in sorted(read & _counters(tree)):
                now = place.get(counter)
                if not isinstance(now, int):
                    continue
                values = _values(expression, place, counter, range(now, now + passes))
                if values and math.isclose(values[0], seen.steps[0].rates[0], rel_tol=_SAME):
                    return [values[min(passes - 1, int(step / (steps_per_pass or 1)))] for step in spread(num_steps)]
    return None


def _of_expression(seen: Seen, num_steps: int) -> list[float] | None:
    """Return the rates that an expression like `get_lr(step)` has over the run: one that gives the rates that were seen."""
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
    code, names = compiled(expression), place.names
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
