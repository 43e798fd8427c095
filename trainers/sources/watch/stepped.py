"""How often a script steps a schedule of torch's that it does not step with each optimizer step: read from the loops around backward, and from
the functions that they call."""

from __future__ import annotations

import ast
import inspect
import itertools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import CodeType
from typing import Any

from torch.optim.lr_scheduler import LRScheduler

from batchscout.trainers.sources.watch.by_hand import Part, function_of, inside_of
from batchscout.trainers.sources.watch.length import changing_at
from batchscout.trainers.sources.watch.observer import Place, Seen, value_of
from batchscout.trainers.sources.watch.statements import Loop, assigned, is_true, range_of, same_in_each_round
from batchscout.trainers.user_code import is_librarys

_MOST_PASSES = 10_000
"""Of more, a test that reads their number is not made for each: each takes some microseconds."""
_MOST_LISTED = 16
"""A longer list than this is none of schedules."""


def calls_before_passes(
    schedule: LRScheduler, parts: Sequence[Part], seen: Seen, num_passes: int | None
) -> list[int] | None:
    """Return how often a script has stepped a schedule from its first optimizer step until each of its passes begins; None where that is not known.
    parts: the bodies on the way to backward. num_passes: rounds of the second of its loops; None where they are not known."""
    walks = [_Walk(schedule, one.place, frozenset(changing_at(one.place, seen))) for one in parts]
    found = [walk.of_all(_beside(part)) for walk, part in zip(walks, parts, strict=True)]
    rings = {part.ring for part, calls in zip(parts, found, strict=True) if calls.number != 0}
    if not rings:  # made, and never stepped
        is_whole = all(one.is_the_scripts or not one.loops for one in seen.backward.all_places)
        return [0] * (num_passes or 1) if is_whole and not any(one.has_unknown for one in found) else None
    if rings != {1} or num_passes is None:  # now and then between batches, or once in several passes
        return None
    # What comes before the first backward was called when it was seen.
    befores, afters = [0] * num_passes, [0] * num_passes
    for walk, part in ((walk, part) for walk, part in zip(walks, parts, strict=True) if part.ring == 1):
        counted = _counted(parts, part.place)
        for counts, statements in ((befores, part.level.body[: part.level.place]), (afters, _after(part))):
            for one in statements:
                of_each = walk.of(one).number
                if of_each is None and num_passes > _MOST_PASSES:
                    return None
                for number in range(num_passes):
                    calls = of_each
                    if calls is None:
                        calls = walk.in_round(counted, number).of(one).number
                    if calls is None:
                        return None
                    counts[number] += calls
    between = (after + before for after, before in zip(afters, befores[1:], strict=False))
    return list(itertools.accumulate(between, initial=0))


def _beside(part: Part) -> list[ast.stmt]:
    """Return the statements of a body but the one that leads to backward."""
    return [*part.level.body[: part.level.place], *_after(part)]


def _after(part: Part) -> Sequence[ast.stmt]:
    return part.level.body[part.level.place + 1 :]


def _counted(parts: Sequence[Part], place: Place) -> tuple[str, range] | None:
    """Return the name that counts the passes in a place, and its values; None where nothing does."""
    loops = [
        one.level.owner for one in parts if one.ring == 1 and one.place is place and isinstance(one.level.owner, Loop)
    ]
    loop = loops[-1] if loops else None
    call = range_of(loop) if isinstance(loop, ast.For) and isinstance(loop.target, ast.Name) else None
    if call is None or not ast.unparse(call.func).endswith("range"):
        return None
    values = [value_of(one, place) for one in call.args]
    counted = range(*values) if values and all(isinstance(one, int) for one in values) else range(0)
    return (ast.unparse(loop.target), counted) if isinstance(loop, ast.For) and counted else None


def _named(target: ast.expr, value: Any) -> dict[str, Any]:
    """Return the names that a loop gives to one of its values."""
    if isinstance(target, ast.Tuple) and isinstance(value, tuple):
        return {ast.unparse(name): one for name, one in zip(target.elts, value, strict=False)}
    return {ast.unparse(target): value}


@dataclass(frozen=True)
class _Calls:
    """Calls of a schedule's step."""

    number: int | None = 0
    """None where that depends on what is not known."""
    has_unknown: bool = False
    """Something may step it that could not be looked into."""
    has_step: bool = False
    """Something is stepped, also where that is not run."""

    def __add__(self, other: _Calls) -> _Calls:
        number = None if self.number is None or other.number is None else self.number + other.number
        return _Calls(number, self.has_unknown or other.has_unknown, self.has_step or other.has_step)


@dataclass(frozen=True)
class _Walk:
    """Through statements, as they are run in a place."""

    schedule: LRScheduler
    place: Place
    changing: frozenset[str]
    """Names that may stand for something else in a later round."""
    known: frozenset[CodeType] = frozenset()
    """Of the functions that are looked into."""
    without: set[CodeType] = field(default_factory=set)
    """Of functions that step nothing."""

    def in_round(self, counted: tuple[str, range] | None, number: int) -> _Walk:
        """Return the same in a round of which the number is known. counted: the name that counts, and its values."""
        if counted is None:
            return self
        name, values = counted
        return replace(self.having({name: values[number % len(values)]}), changing=self.changing - {name})

    def value(self, node: ast.expr) -> Any:
        """Return what an expression stands for; None where that may be something else in a later round, as what the schedule and the optimizer have."""
        groups = self.schedule.optimizer.param_groups
        owners = [one.value for one in ast.walk(node) if isinstance(one, ast.Attribute | ast.Subscript)]
        live = (self.schedule, self.schedule.optimizer, groups, *groups)
        if any(value_of(owner, self.place) is one for owner in owners for one in live):
            return None
        return same_in_each_round(self.place, value_of, self.changing)(node)

    def of_all(self, statements: Iterable[ast.stmt]) -> _Calls:
        return sum(map(self.of, statements), _Calls())

    def of(self, statement: ast.stmt) -> _Calls:
        match statement:
            case ast.If(test=test, body=body, orelse=orelse):
                then, otherwise, truth = self.of_all(body), self.of_all(orelse), is_true(test, self.value)
                both, is_same = then + otherwise, then.number == otherwise.number
                found = replace(both, number=then.number if is_same else None) if truth is None else then
                found = otherwise if truth is False else found
                return self.within(test) + replace(found, has_step=both.has_step)
            case ast.For(target=target, iter=over, body=body):
                values = self.listed(over)
                if values is not None and len(values) <= _MOST_LISTED:
                    return sum((self.having(_named(target, one)).of_all(body) for one in values), _Calls())
                return self.within(over) + self.sometimes(body)
            case ast.While(test=test, body=body):
                return self.within(test) + self.sometimes(body)
            case ast.With(items=items, body=body):
                return sum((self.within(one.context_expr) for one in items), _Calls()) + self.of_all(body)
            case ast.Try(body=body, orelse=orelse, finalbody=finalbody):
                return self.of_all([*body, *orelse, *finalbody])
            case ast.FunctionDef() | ast.ClassDef():
                return _Calls()
            case _:
                return self.within(statement)

    def sometimes(self, body: Sequence[ast.stmt]) -> _Calls:
        found = self.of_all(body)
        return found if found.number == 0 else replace(found, number=None)

    def listed(self, over: ast.expr) -> list[Any] | None:
        """Return what a loop goes through, if that is a list, or what a dictionary has; None of anything else."""
        match over:
            case ast.List(elts=elements) | ast.Tuple(elts=elements):
                return [value_of(one, self.place) for one in elements]
            case ast.Call(func=ast.Name("enumerate"), args=[inner, *_]):
                return None if (found := self.listed(inner)) is None else [*enumerate(found)]
            case ast.Call(func=ast.Attribute(value=owner, attr="values" | "items" as method), args=[]):
                found = value_of(owner, self.place)
                return [*getattr(found, method)()] if isinstance(found, dict) else None
            case _:
                found = value_of(over, self.place)
                return [*found] if isinstance(found, list | tuple) else None

    def having(self, names: Mapping[str, Any]) -> _Walk:
        return replace(self, place=replace(self.place, local={**self.place.local, **names}))

    def within(self, node: ast.AST) -> _Calls:
        return sum((self.of_call(one) for one in ast.walk(node) if isinstance(one, ast.Call)), _Calls())

    def of_call(self, call: ast.Call) -> _Calls:
        found = value_of(call.func, self.place)
        if found is None:
            is_named_so = ast.unparse(call.func).rpartition(".")[2] == "step"
            is_unknown = is_named_so or not isinstance(call.func, ast.Name | ast.Attribute)
            return _Calls(has_unknown=is_unknown, has_step=is_unknown)
        try:
            owner, called = getattr(found, "__self__", None), inspect.unwrap(found)
            code, name = getattr(called, "__code__", None), getattr(called, "__name__", "")
        except Exception:  # of the script's own objects, whose attributes may be computed
            return _Calls(has_unknown=True, has_step=True)
        if owner is self.schedule:
            return _Calls(int(name == "step"), has_step=True)
        if code is None or code in self.known or code in self.without:
            return _Calls()
        if is_librarys(Path(code.co_filename)):  # accelerate's has the schedule in it
            given = [value_of(one, self.place) for one in (*call.args, *(word.value for word in call.keywords))]
            holds = any(one is self.schedule for one in getattr(owner, "__dict__", {}).values())
            is_handed = holds or any(one is self.schedule for one in given)
            return _Calls(int(holds and name == "step"), has_unknown=is_handed, has_step=is_handed)
        function = function_of(code)
        if not isinstance(function, ast.FunctionDef):
            return _Calls()
        calls = self.inside(function, found, called, call).of_all(function.body)
        if not calls.has_step:
            self.without.add(code)
        return calls

    def inside(self, function: ast.FunctionDef, found: Any, called: Any, call: ast.Call) -> _Walk:
        """Return the walk through a function that is called: with the arguments that are known. found: as it is called. called: what was defined."""
        parameters = inspect.signature(found).parameters
        given = dict(zip(parameters, call.args, strict=False))
        given |= {word.arg: word.value for word in call.keywords if word.arg}
        handed = {name: self.value(node) for name, node in given.items()}
        defaults = {name: one.default for name, one in parameters.items() if one.default is not one.empty}
        is_none = {name for name, node in given.items() if isinstance(node, ast.Constant) and node.value is None}
        known = {name: value for name, value in handed.items() if value is not None or name in is_none}
        known |= {name: value for name, value in defaults.items() if name not in given}
        own = {*parameters, *(name for name in assigned(function.body) if "." not in name)}
        changing = {name for name in self.changing if "." in name or name not in own} | (own - {*known})
        place = inside_of(self.place, called, getattr(found, "__self__", None))
        place = replace(place, local={**dict.fromkeys(own), **place.local, **known})
        return replace(self, place=place, changing=frozenset(changing), known=self.known | {called.__code__})
