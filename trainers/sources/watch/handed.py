"""What changes over a run in the functions of a script: what their loops change, what their callers' loops hand on to them, and what they make of it. Read
from the syntax tree: two steps show none of what a later pass changes."""

from __future__ import annotations

import ast
import itertools
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from torch import Tensor

from batchscout.trainers.sources.watch.observer import Place, Seen, value_of
from batchscout.trainers.sources.watch.statements import (
    Loop,
    assigned,
    levels_of,
    needed,
    parsed,
    position_of,
    targets_of,
    walk_own,
    wanted_before,
)


def handed_on(place: Place, seen: Seen) -> set[str]:
    """Return the names that loops of the callers of a place's function change from one of its calls to a later one: arguments that are made of what these
    loops change, and what the function makes of them before its own loops, as `beta` in `def train(epoch): beta = min(1, epoch / 10)`. None of the innermost
    loop of all is among them: of it, two steps show what changes."""
    innermost = next(iter(seen.backward.all_loops), None)
    ways = itertools.dropwhile(lambda one: one is not place, seen.backward.all_places)
    changes = set[str]()
    for caller, called in itertools.pairwise(reversed([*ways])):
        loops = seen.loops_of(caller)
        of_innermost = assigned([innermost]) if innermost is not None and innermost in loops else set[str]()
        changes |= changed_by([one for one in loops if one is not innermost], caller) - of_innermost
        function = levels_of(parsed(called.file), called.position)[0].owner
        if changes and isinstance(function, ast.FunctionDef):
            if (call := _call_of(called.function, caller)) is not None:
                changes |= given(call, function, caller, changes)
            changes = _with_what_is_made(changes | _counted_by(function), _before_loops(called), called)
    return changes


def changed_by(loops: Sequence[Loop], place: Place) -> set[str]:
    """Return the names that loops of a place's function change: what they go through and count, numbers that a call returns, and what they make of these.
    What they only give the same value again is not among them."""
    inner = [one for loop in loops for one in [loop, *walk_own(loop)]]
    changes = {name for one in inner if isinstance(one, ast.For) for name in targets_of(one)}
    changes |= {name for loop in loops for name in _counted_by(loop)}
    for one in (one for one in inner if isinstance(one, ast.Assign)):
        numbers = {name for name in assigned([one]) if isinstance(place.get(name), int | float)}
        changes |= numbers if numbers and value_of(one.value, place) is None else set()
    makers = [one for one in inner if isinstance(one, ast.Assign | ast.AugAssign | ast.If)]
    return _with_what_is_made(changes, makers, place)


def reads_a_change(node: ast.expr, place: Place, changes: set[str]) -> bool:
    """True if an expression reads a number, or numbers, that change: no object, a model's say, and no word, as of a phase."""
    return _has_a_change(needed([], node)[1], place, changes)


def _has_a_change(names: Iterable[str], place: Place, changes: set[str]) -> bool:
    values = (place.get(one) for one in names if one in changes)
    return any((isinstance(one, int | float) and not isinstance(one, bool)) or is_of_numbers(one) for one in values)


def is_of_numbers(value: Any) -> bool:
    inner = value.values() if isinstance(value, Mapping) else value if isinstance(value, list | tuple) else ()
    return isinstance(value, Tensor) or any(map(is_of_numbers, inner))


def given(call: ast.Call, function: ast.FunctionDef, caller: Place, changes: set[str]) -> set[str]:
    """Return the names of a function that a call of it gives what changes, attributes as `self.epoch` among them."""
    pairs = arguments_of(call, function)
    found = {name for name, value in pairs if reads_a_change(value, caller, changes)}
    owners = [(name, f"{ast.unparse(value)}.") for name, value in pairs if isinstance(value, ast.Name | ast.Attribute)]
    return found | {f"{name}.{one[len(of) :]}" for name, of in owners for one in changes if one.startswith(of)}


def arguments_of(call: ast.Call, function: ast.FunctionDef) -> list[tuple[str, ast.expr]]:
    """Return the arguments of a function with what a call gives them, its own object among them, as far as it names them."""
    names, values = [one.arg for one in (*function.args.posonlyargs, *function.args.args)], list(call.args)
    if names[:1] in (["self"], ["cls"]):
        values.insert(0, call.func.value if isinstance(call.func, ast.Attribute) else call.func)
    in_order = itertools.takewhile(lambda pair: not isinstance(pair[1], ast.Starred), zip(names, values, strict=False))
    return [*in_order, *((word.arg, word.value) for word in call.keywords if word.arg)]


def _call_of(name: str, caller: Place) -> ast.Call | None:
    """Return the call that a place stands at, of a function of this name; of `train(net)(x)` either is there."""
    nodes = (one for one in ast.walk(parsed(caller.file)) if isinstance(one, ast.Call))
    calls = [one for one in nodes if position_of(one) == caller.position]
    named = [one for one in calls if ast.unparse(one.func).rpartition(".")[2] == name]
    return next(iter(named or (calls if len(calls) == 1 else [])), None)


def _counted_by(node: ast.AST) -> set[str]:
    """Return what a loop counts; of a function, what it counts beyond its own end: attributes, and what it declares `global`."""
    inner = list(walk_own(node))
    names = {name for one in inner if isinstance(one, ast.AugAssign) for name in assigned([one])}
    if isinstance(node, Loop):
        return names
    apart = {name for one in inner if isinstance(one, ast.Global | ast.Nonlocal) for name in one.names}
    return {name for name in names if "." in name or name in apart}


def _before_loops(place: Place) -> list[ast.stmt]:
    """Return the statements of a place's function that are run once in each of its calls."""
    levels = itertools.takewhile(
        lambda one: not isinstance(one.owner, Loop), levels_of(parsed(place.file), place.position)
    )
    return [one for level in levels for one in level.body if one is not level.statement]


def _with_what_is_made(changes: set[str], statements: Sequence[ast.stmt], place: Place) -> set[str]:
    """Return what changes, and what these statements make of it."""
    while True:
        makers = [one for one in statements if _has_a_change(wanted_before(one, set()), place, changes)]
        if assigned(makers) <= changes:
            return changes
        changes = changes | assigned(makers)
