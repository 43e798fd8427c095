"""What a script does after the two steps that were watched, and a study does not: as far as its syntax tree says so for sure, for people to know."""

from __future__ import annotations

import ast
import inspect
import itertools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from torch import nn
from torch.utils.data import DataLoader, Dataset

from batchscout.trainers.sources.watch.batches import FromLoader, within
from batchscout.trainers.sources.watch.by_hand import function_of
from batchscout.trainers.sources.watch.handed import arguments_of, changed_by, given, handed_on, reads_a_change
from batchscout.trainers.sources.watch.length import rounds_of
from batchscout.trainers.sources.watch.loop import Loop as Watched
from batchscout.trainers.sources.watch.observer import Place, Seen, unwrapped, value_of
from batchscout.trainers.sources.watch.statements import (
    Level,
    Loop,
    assigned,
    assigned_in,
    is_over_batches,
    is_set_in,
    levels_of,
    needed,
    parsed,
    position_of,
    targets_of,
    walk_own,
)
from batchscout.trainers.user_code import is_librarys

_LONGEST = 60
"""Of a statement that is quoted."""
_OF_THE_ORDER = ("set_epoch", "epoch", "shuffle")
"""What is called, or set, of data for another order, as they have in each pass of a study."""


def _quoted(node: ast.stmt | ast.expr, place: Place) -> str:
    text = ast.unparse(node).partition("\n")[0]
    short = text if len(text) <= _LONGEST else f"{text[:_LONGEST]}..."
    return f"`{short}` in {_line(node, place)}"


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


# Whether it trains again


def trains_again(seen: Seen) -> str | None:
    """Return where a script trains once more after the run that was watched; None where it does not, or only if something holds that is not known."""
    places = seen.backward.places
    of_run = next((number for number, one in reversed([*enumerate(places)]) if seen.loops_of(one)), len(places))
    trained = _function_that_trains(places[of_run], seen) if of_run < len(places) else None
    for place in places[of_run:]:
        loops = seen.loops_of(place)
        levels = itertools.takewhile(
            lambda one, loops=loops: one.owner not in loops, levels_of(parsed(place.file), place.position)
        )
        after = [one for level in reversed([*levels]) for one in level.body[level.place + 1 :]]
        for one in itertools.takewhile(lambda one: not isinstance(one, ast.Return | ast.Raise), after):
            entered = set[ast.AST]()
            if {"backward", "step"} <= set(_methods_called([one], place, entered)) or trained in entered:
                return _line(one, place)
    return None


def _function_that_trains(place: Place, seen: Seen) -> ast.FunctionDef | None:
    """Return the function around the outermost loop of a run, where that counts passes or steps: one over batches alone may validate, too."""
    loop, function = seen.loops_of(place)[-1], levels_of(parsed(place.file), place.position)[0].owner
    counts = isinstance(loop, ast.While) or not is_over_batches(loop)
    return function if counts and isinstance(function, ast.FunctionDef) else None


def _methods_called(nodes: Iterable[ast.AST], place: Place, known: set[ast.AST]) -> Iterator[str]:
    """Yield the names of the methods that are called for sure, here or in a function of the script. known: the functions that were looked into."""
    for one in nodes:
        match one:
            case ast.If(test=test, body=body, orelse=orelse):
                entered = {True: body, False: orelse, None: []}[_holds(test, place)]
                yield from _methods_called(entered, place, known)
                continue
            case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.ClassDef() | ast.Lambda() | ast.ExceptHandler():
                continue
            case ast.Call():
                if isinstance(one.func, ast.Attribute):
                    yield one.func.attr
                if (inside := _entered(one, place, known)) is not None:
                    yield from _methods_called(inside[0].body, inside[1], known)
        yield from _methods_called(ast.iter_child_nodes(one), place, known)


def _holds(test: ast.expr, place: Place) -> bool | None:
    """Return whether a test holds with what its names stand for at a place; None where that is not to be seen."""
    found = value_of(ast.UnaryOp(ast.Not(), test), place)
    return None if found is None else not found


def _entered(call: ast.Call, place: Place, known: set[ast.AST]) -> tuple[ast.FunctionDef, Place] | None:
    """Return the function of the script that is called, and its inside, where its arguments have names; None of any other, and of one that was looked into."""
    try:
        called: Any = inspect.unwrap(value_of(call.func, place))
        code, file = called.__code__, Path(called.__code__.co_filename)
    except Exception:  # of the script's own objects, whose attributes may be computed
        return None
    function = None if is_librarys(file) else function_of(code)
    if not isinstance(function, ast.FunctionDef) or function in known:
        return None
    known.add(function)
    apart = {name for one in walk_own(function) if isinstance(one, ast.Global) for name in one.names}
    own = {name: None for name in assigned(function.body) - apart if "." not in name}
    local = own | {name: value_of(value, place) for name, value in arguments_of(call, function)}
    at = position_of(function.body[0])
    return function, Place(str(file), at, code.co_name, local, called.__globals__, is_the_scripts=True)


# What changes in its run


@dataclass(frozen=True)
class _Code:
    """Where statements are that are run in each round of a run's loops."""

    place: Place
    changes: frozenset[str]
    """The names that change over the run there."""
    is_of_batches: bool = False
    """True in the innermost loop: of it, two steps show what changes."""
    is_late: bool = False
    """True below an `if` that asks for what changes: in some rounds alone."""
    is_sure: bool = True
    """False below any other `if`, which may never be entered."""
    weights: frozenset[str] = frozenset()
    """The names of loops over the model's weights or parts."""


def changes_later(watched: Watched) -> list[str]:
    """Return the statements by which a script changes later in its run what a study keeps: they freeze or release weights, make the optimizer, the loss, a
    number of the model or the data anew, or train on others."""
    seen, told = watched.seen, dict[str, None]()
    is_within = is_of_batches = False
    known = {levels_of(parsed(one.file), one.position)[0].owner for one in seen.backward.places}
    for place in reversed(seen.backward.places):
        loops = seen.loops_of(place)
        bodies = levels_of(parsed(place.file), place.position)[0].body if is_within else loops[-1:]
        code = _Code(place, frozenset(handed_on(place, seen) | changed_by(loops, place)), is_of_batches)
        is_within |= bool(loops)
        is_of_batches |= seen.backward.all_loops[:1] == loops[:1]
        told |= {_quoted(loop, place): None for loop in loops if _goes_through_loaders(loop, place, watched)}
        for node, inside in _changes(bodies, code, watched, known):
            told[_quoted(node, inside.place)] = None
    return [*told]


def _changes(
    statements: Sequence[ast.stmt], code: _Code, watched: Watched, known: set[ast.AST]
) -> Iterator[tuple[ast.stmt, _Code]]:
    """Yield the statements that change what a study keeps, with where they are. known: the functions that were looked into."""
    for one in statements:
        if _is_a_change(one, code, watched) or _trains_on_others(one, code, watched):
            yield one, code
        for call in _own_calls(one):
            if (entered := _entered(call, code.place, known)) is not None:
                function, place = entered
                changes = frozenset(given(call, function, code.place, {*code.changes}))
                yield from _changes(function.body, replace(code, place=place, changes=changes), watched, known)
        for body, inside in _inner(one, code, watched.seen):
            yield from _changes(body, inside, watched, known)


def _own_calls(one: ast.stmt) -> list[ast.Call]:
    """Return the calls of a statement that has no body."""
    nodes = walk_own(one) if isinstance(one, ast.Expr | ast.Assign | ast.AugAssign | ast.Return) else ()
    return [node for node in nodes if isinstance(node, ast.Call)]


def _inner(one: ast.stmt, code: _Code, seen: Seen) -> Iterator[tuple[list[ast.stmt], _Code]]:
    """Yield the bodies of a statement, and how they are run."""
    match one:
        case ast.If(test=test, body=body, orelse=orelse):
            now = _holds(test, code.place)
            if reads_a_change(test, code.place, {*code.changes}):
                yield from ((some, replace(code, is_late=True)) for some in (body, orelse))
            else:
                yield body, replace(code, is_sure=code.is_sure and now is True)
                yield orelse, replace(code, is_sure=code.is_sure and now is False)
        case ast.For(body=body) | ast.While(body=body):
            is_of_batches = code.is_of_batches or one is seen.backward.all_loops[0]
            yield body, replace(code, is_of_batches=is_of_batches, weights=code.weights | _weights(one, code, seen))
        case ast.With(body=body) | ast.Try(body=body):
            yield body, code


def _weights(loop: Loop, code: _Code, seen: Seen) -> set[str]:
    """Return the names of a loop over weights or parts of the model."""
    if isinstance(loop, ast.While):
        return set()
    calls = [one.func for one in ast.walk(loop.iter) if isinstance(one, ast.Call)]
    of_parts = [one for one in calls if isinstance(one, ast.Attribute) and one.attr.removeprefix("named_") in _PARTS]
    return targets_of(loop) if any(_is_trained(one.value, code, seen) for one in of_parts) else set()


_PARTS = ("parameters", "modules", "children")


def _is_a_change(one: ast.stmt, code: _Code, watched: Watched) -> bool:
    if not code.is_sure:
        return False
    match one:
        case ast.Assign(targets=[ast.Attribute(value=owner, attr="requires_grad")]):
            return code.is_late and _is_trained(owner, code, watched.seen)
        case ast.Assign(targets=[ast.Name() | ast.Attribute() as target], value=value):
            return _is_made_anew(target, value, code, watched)
        case ast.AugAssign(target=ast.Attribute() as target):
            return _is_kept(target, code, watched)
        case ast.Expr(value=ast.Call(func=ast.Attribute(value=owner, attr="requires_grad_"))):
            return code.is_late and _is_trained(owner, code, watched.seen)
        case ast.Expr(value=ast.Call(func=ast.Attribute(value=owner, attr="add_param_group"))):
            return any(value_of(owner, code.place) is optimizer for optimizer in watched.seen.optimizers)
        case ast.Expr(value=ast.Call(func=ast.Attribute(value=owner, attr=method))):
            is_data = not code.is_of_batches and _is_data(value_of(owner, code.place), watched)
            return is_data and method not in _OF_THE_ORDER
        case _:
            return False


def _is_made_anew(target: ast.Name | ast.Attribute, value: ast.expr, code: _Code, watched: Watched) -> bool:
    """True of the optimizer, but where it was made first, and of the loss and numbers of the model where they are made of what changes."""
    seen, place, before = watched.seen, code.place, code.place.get(ast.unparse(target))
    if any(before is one for one in seen.optimizers):
        lines = {line for file, line in seen.made_at.get(id(before), ()) if file == place.file}
        return isinstance(value, ast.Call) and not lines & {
            *range(value.lineno, (value.end_lineno or value.lineno) + 1)
        }
    reads_itself = isinstance(before, int | float) and ast.unparse(target) in needed([], value)[1]
    is_another = reads_itself or reads_a_change(value, place, {*code.changes})
    if isinstance(target, ast.Attribute) and (is_another or code.is_late) and _is_kept(target, code, watched):
        return True
    is_data = isinstance(before, DataLoader | Dataset) and _is_data(before, watched)
    if is_data and not code.is_of_batches and needed([], value)[1] & code.changes and _always_trains(_run(seen), seen):
        return True
    if code.is_of_batches or not is_another:
        return False
    if isinstance(before, float):
        return _key(target, place) in _read_by_loss(watched)
    return is_data or _is_called(before, watched)


def _is_kept(target: ast.Attribute, code: _Code, watched: Watched) -> bool:
    """True of an attribute of the data, of one of the model or of what the loss calls that code of its class reads, as `current` of an annealer whose `step` adds
    to it, and of a number that functions of the loss read. Of batches, two steps show what changes."""
    if code.is_of_batches:
        return False
    owner = value_of(target.value, code.place)
    is_number = isinstance(code.place.get(ast.unparse(target)), float)
    return (
        (_is_data(owner, watched) and target.attr not in _OF_THE_ORDER)
        or ((_is_part(owner, watched.seen) or _is_called(owner, watched)) and _is_read(target.attr, owner))
        or (is_number and _key(target, code.place) in _read_by_loss(watched))
    )


def _is_called(value: object, watched: Watched) -> bool:
    """True of what the loss calls, but the model: a criterion, or an object that weighs its terms."""
    inputs = watched.loss.code.inputs if watched.loss is not None else ()
    is_input = any(value is watched.place.get(name) for name in inputs)
    return is_input and callable(value) and not _is_part(value, watched.seen)


def _is_data(value: object, watched: Watched) -> bool:
    """True of the set that is trained on, and of its loader, but not of what is around that: a bar that is drawn has the number of the pass."""
    source = watched.batches.source
    if not isinstance(source, FromLoader):
        return False
    return value is source.loader.dataset or (isinstance(value, DataLoader) and within(value) is source.loader)


def _goes_through_loaders(loop: Loop, place: Place, watched: Watched) -> bool:
    """True of a loop that trains on several loaders, one after the other."""
    if not isinstance(loop, ast.For) or not any(
        isinstance(place.get(one), DataLoader) and _is_data(place.get(one), watched) for one in targets_of(loop)
    ):
        return False
    of_one = value_of(loop.iter, place)
    is_once = rounds_of(loop, place, None) == 1 or (isinstance(of_one, list | tuple) and len(of_one) == 1)
    return not is_once and _always_trains(loop, watched.seen)


def _trains_on_others(one: ast.stmt, code: _Code, watched: Watched) -> bool:
    """True of a call of a function of the run with another loader."""
    if not code.is_sure or not isinstance(watched.batches.source, FromLoader):
        return False
    for call in _own_calls(one):
        values = [value_of(part, code.place) for part in (*call.args, *(word.value for word in call.keywords))]
        loaders = [part for part in values if isinstance(part, DataLoader)]
        if loaders and not any(_is_data(part, watched) for part in loaders):
            called = getattr(value_of(call.func, code.place), "__code__", None)
            function = called and function_of(called)
            if function is not None and _always_trains(function, watched.seen):
                return True
    return False


def _run(seen: Seen) -> Loop:
    """Return the outermost loop of the run."""
    return [loop for place in seen.backward.places for loop in seen.loops_of(place)][-1]


def _always_trains(owner: ast.AST, seen: Seen) -> bool:
    """True if nothing is asked on the way from a loop or a function of the run to backward, and all functions on it are called by their own names: else some of
    its rounds or calls may validate, as those of `for phase, loader in loaders.items()`."""
    inner = None
    for place in seen.backward.places:
        levels = levels_of(parsed(place.file), place.position)
        first = next((n for n, one in enumerate(levels) if one.owner is owner), None)
        if any(map(_is_asked, levels[first or 0 :])) or (inner is not None and not _calls(place, inner.function)):
            return False
        if first is not None:
            return True
        inner = place
    return False


def _calls(place: Place, function: str) -> bool:
    """True if a place is a call of a function by its own name, and of none that a name stands for in one round."""
    calls = (one for one in ast.walk(parsed(place.file)) if isinstance(one, ast.Call))
    here = (one for one in calls if position_of(one) == place.position)
    return any(ast.unparse(one.func).rpartition(".")[2] == function for one in here)


def _is_asked(level: Level) -> bool:
    """True if a body may leave out what leads to backward."""
    leaves = (node for one in level.body[: level.place] for node in (one, *walk_own(one)))
    if any(isinstance(one, ast.Continue | ast.Return) for one in leaves):
        return True
    way = level.statement
    if isinstance(way, ast.If):
        branches = (ast.unparse(ast.Module(part, [])) for part in (way.body, way.orelse))
        return not all("backward(" in one for one in branches)
    value = getattr(way, "value", None)
    return isinstance(value, ast.expr) and any(isinstance(one, ast.IfExp | ast.BoolOp) for one in ast.walk(value))


def _read_by_loss(watched: Watched) -> set[tuple[object, str]]:
    """Return what the functions by which the loss is computed read beside their arguments, as `_key` has it."""
    found, known = set[tuple[object, str]](), set[ast.AST]()
    loss = watched.loss
    pending = [] if loss is None else [(list[ast.AST]([*loss.code.statements, loss.code.loss]), loss.place)]
    while pending:
        nodes, place = pending.pop()
        for node in (inner for one in nodes for inner in ast.walk(one)):
            if isinstance(node, ast.Call) and (entered := _entered(node, place, known)) is not None:
                pending.append(([*entered[0].body], entered[1]))
            if isinstance(node, ast.Name | ast.Attribute) and isinstance(node.ctx, ast.Load):
                found |= {key for key in [_key(node, place)] if key is not None}
    return found


def _key(node: ast.Name | ast.Attribute, place: Place) -> tuple[object, str] | None:
    """Return what an attribute, or a name of a file, is known by in each function; None of a function's own name."""
    if isinstance(node, ast.Attribute):
        return id(value_of(node.value, place)), node.attr
    return (place.file, node.id) if place.function == "<module>" or node.id not in place.local else None


def _is_trained(owner: ast.expr, code: _Code, seen: Seen) -> bool:
    """True of the model, a part of it, and one of its weights, also as the name of a loop over these."""
    value = value_of(owner, code.place)
    return ast.unparse(owner) in code.weights or isinstance(value, nn.Parameter) or _is_part(value, seen)


def _is_part(value: object, seen: Seen) -> bool:
    own = {id(part) for parts in seen.parts.values() for part in parts}
    return isinstance(value, nn.Module) and id(unwrapped(value)) in own


def _is_read(attribute: str, owner: Any) -> bool:
    """True of an attribute that code of the owner's class reads."""
    nodes = _nodes_of_class(type(unwrapped(owner)))
    return any(one.attr == attribute and isinstance(one.ctx, ast.Load) for one in nodes)


def _nodes_of_class(kind: type) -> list[ast.Attribute]:
    """Return the attributes in the code of a class but for that of its `__init__`; none where its file is not there."""
    files = {one.__code__.co_filename for one in vars(kind).values() if inspect.isfunction(one)}
    trees = [parsed(one) for one in files if Path(one).is_file()]
    classes = [
        one for tree in trees for one in ast.walk(tree) if isinstance(one, ast.ClassDef) and one.name == kind.__name__
    ]
    methods = [
        one for tree in classes for one in tree.body if isinstance(one, ast.FunctionDef) and one.name != "__init__"
    ]
    return [node for one in methods for node in ast.walk(one) if isinstance(node, ast.Attribute)]


# Whether its run may be shorter


def may_end_before(seen: Seen) -> str | None:
    """Return where a loop that counts may end for something that is not known in advance, as early stopping does; None where its end is known."""
    for place in seen.backward.places:
        loops = seen.loops_of(place)
        tests = _Tests(place, loops)
        for loop in (one for one in loops if isinstance(one, ast.While) or not is_over_batches(one)):
            heads = [(loop.test,)] if isinstance(loop, ast.While) else []
            ends = (asked for one, asked in _asked_before(loop.body) if isinstance(one, ast.Break | ast.Return))
            for asked in (*heads, *ends):
                if (found := tests.unforeseen(ast.BoolOp(ast.And(), [*asked]))) is not None:
                    return _quoted(found, place)
    return None


def _asked_before(
    body: Sequence[ast.stmt], asked: tuple[ast.expr, ...] = (), *, is_own: bool = True
) -> Iterator[tuple[ast.stmt, tuple[ast.expr, ...]]]:
    """Yield the statements of a loop, each with what is asked before it is run; not what is run where something was raised. is_own: whether a `break` is that
    loop's, and not of one in it."""
    for one in body:
        match one:
            case ast.If(test=test, body=inner, orelse=orelse):
                yield from _asked_before(inner, (*asked, test), is_own=is_own)
                yield from _asked_before(orelse, (*asked, ast.UnaryOp(ast.Not(), test)), is_own=is_own)
            case ast.For(body=inner) | ast.While(body=inner):
                yield from _asked_before(inner, asked, is_own=False)
            case ast.With(body=inner) | ast.Try(body=inner):
                yield from _asked_before(inner, asked, is_own=is_own)
            case ast.Break() if not is_own:
                pass
            case _:
                yield one, asked


@dataclass(frozen=True)
class _Tests:
    """What is asked in the loops of a place."""

    place: Place
    loops: Sequence[Loop]

    def unforeseen(self, test: ast.expr) -> ast.expr | None:
        """Return the part of a test of which is not known when it holds; None where that is known of all, and where it never holds."""
        match test:
            case ast.BoolOp(op=ast.And(), values=values) if any(map(self._never_holds, values)):
                return None
            case ast.BoolOp(values=values):
                return next((one for one in map(self.unforeseen, values) if one is not None), None)
            case ast.UnaryOp(op=ast.Not(), operand=operand):
                return self.unforeseen(operand)
        has_failed = any(word in ast.unparse(test) for word in _NO_NUMBER)
        return (
            None if has_failed or (not self._moves(test) and not self._is_opaque(test)) or self._counts(test) else test
        )

    def _never_holds(self, test: ast.expr) -> bool:
        """True of what is false, and stays so: an option to debug, say."""
        return _holds(test, self.place) is False and not self._moves(test)

    def _moves(self, test: ast.expr) -> bool:
        names = needed([], test)[1]
        return bool(names & self._assigned) or any(map(self._is_set_by_its_class, names))

    def _is_opaque(self, node: ast.expr) -> bool:
        has_calls = any(isinstance(one, ast.Call) for one in ast.walk(node))
        return has_calls and value_of(node, self.place) is None

    @property
    def _assigned(self) -> set[str]:
        targets = {name for one in self.loops if isinstance(one, ast.For) for name in targets_of(one)}
        return targets | assigned_in(self.loops[-1])

    def _counts(self, node: ast.expr, known: frozenset[str] = frozenset()) -> bool:
        """True if all that moves in an expression is counted. known: the names that it is to make."""
        names = needed([], node)[1]
        moving = names & self._assigned
        is_plain = not self._is_opaque(node) and not any(map(self._is_set_by_its_class, names))
        return is_plain and not moving & known and all(self._is_counted(one, known | {one}) for one in moving)

    def _is_counted(self, name: str, known: frozenset[str]) -> bool:
        """True of what a loop goes through or adds to, and of what is made of that alone, where that alone is asked: `done = step > 10` is."""
        outermost = self.loops[-1]
        if any(isinstance(one, ast.For) and name in targets_of(one) for one in self.loops):
            return True
        if any(isinstance(one, ast.AugAssign) and ast.unparse(one.target) == name for one in ast.walk(outermost)):
            return not is_set_in(outermost, name)
        makers = [(one, asked) for one, asked in _asked_before(outermost.body) if name in assigned([one])]
        return all(
            isinstance(one, ast.Assign) and all(self._counts(part, known) for part in (one.value, *asked))
            for one, asked in makers
        )

    def _is_set_by_its_class(self, name: str) -> bool:
        """True of an attribute such as `stopper.stop` that a method of its class sets."""
        owner, _, attribute = name.rpartition(".")
        is_flag = bool(owner) and isinstance(self.place.get(name), bool)
        nodes = _nodes_of_class(type(self.place.get(owner))) if is_flag else []
        return any(one.attr == attribute and isinstance(one.ctx, ast.Store) for one in nodes)


_NO_NUMBER = ("isnan", "isfinite", "isinf")
"""Asked by who ends a run that has failed."""
