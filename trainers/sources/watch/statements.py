"""Which statements of a loop's body make the loss of a batch: read from the syntax tree at the line that calls `backward`."""

from __future__ import annotations

import ast
import functools
import itertools
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import CodeType
from typing import Any

Loop = ast.For | ast.While
_CHANGES_ITS_OWNER = re.compile("append|extend|insert|update|add|.*[^_]_")
"""Methods that add to the list, dictionary or set that they are called on, and those of tensors in place: `x.div_(255)`."""
_KEEPS_VALUES = ("requires_grad_", "detach_")


@dataclass(frozen=True)
class LossCode:
    """The statements between a batch and its loss."""

    statements: tuple[ast.stmt, ...]
    loss: ast.expr
    inputs: frozenset[str]
    """The names that they read before they assign them, attributes of one as `self.model`."""
    loop: Loop | None
    """Whose body they are of; None where they are a function's from its beginning."""
    changed: frozenset[str]
    """What the whole body assigns anywhere: what is read here and assigned there later is carried from one batch to the next."""
    assignments: tuple[ast.Assign, ...]
    """Those of the whole function, in their order."""
    resets: tuple[ast.stmt, ...]
    """Those of the body, before the loss or after its backward, that may give a module the state anew with which a batch begins:
    `net.reset()`, `net.hidden = net.init_hidden(len(x))`. The loss reads nothing of them by its name."""


@dataclass(frozen=True)
class Level:
    """A body on the way to a line, the statement of it that leads there, and whose body it is."""

    body: Sequence[ast.stmt]
    place: int
    owner: ast.AST

    @property
    def statement(self) -> ast.stmt:
        return self.body[self.place]


Position = tuple[int, int]
"""A line, and a column in it."""


def position_of(node: ast.stmt | ast.expr) -> Position:
    return node.lineno, node.col_offset


@functools.cache
def parsed(file: str) -> ast.Module:
    """Return the syntax tree of a file, the same one each time: its nodes are known by their identity."""
    return ast.parse(Path(file).read_bytes())


def compiled(expression: ast.expr) -> CodeType:
    return compile(ast.fix_missing_locations(ast.Expression(expression)), "<the script>", "eval", dont_inherit=True)


def loss_codes(tree: ast.Module, at: Position, loss: str | None) -> Iterator[LossCode]:
    """Yield the statements that make the loss at a place: those of the innermost loop around it, of each loop around that one, and of the
    whole function. None where the loss is not to be seen there.

    loss: the name that it has there; None where the place itself calls `backward`.
    """
    levels = levels_of(tree, at)
    expression = ast.Name(loss, ast.Load()) if loss else _backed(levels[-1].statement) if levels else None
    if expression is None:
        return
    function = levels[0].owner
    assignments = tuple(one for one in walk_own(function) if isinstance(one, ast.Assign))
    starts = [n for n, level in enumerate(levels) if isinstance(level.owner, Loop)]
    for start in [*reversed(starts), *([] if starts[:1] == [0] else [0])]:
        owner = levels[start].owner
        # Blocks on the way count as run through: an `if` as true, a `with` without what it enters.
        before = [one for level in levels[start:] for one in level.body[: level.place]]
        kept, inputs = needed(before, expression)
        loop = owner if isinstance(owner, Loop) else None
        changed = frozenset(assigned(levels[start].body) | _changed_in_place(levels[start].body))
        resets = tuple(one for one in levels[start].body if one not in kept and _may_reset(one))
        yield LossCode(tuple(kept), expression, frozenset(inputs), loop, changed, assignments, resets)


def _may_reset(statement: ast.stmt) -> bool:
    """True of an attribute that is set, and of calls that are named so: no others, since they may write files."""
    match statement:
        case ast.Assign(targets=[ast.Attribute()]):
            return True
        case ast.Expr(value=ast.Call(func=called)):
            return _RESETS.match(ast.unparse(called).rpartition(".")[2]) is not None
        # `for part in net.modules(): if hasattr(part, "reset"): part.reset()`
        case ast.For(body=body) | ast.If(body=body, orelse=[]):
            return all(map(_may_reset, body))
        case _:
            return False


_RESETS = re.compile("_*(re_?set|re_?init|init|clear|zero)_*(?!grad)", re.IGNORECASE)


def reads_of(statement: ast.stmt) -> set[str]:
    """Return the names that a statement reads, and does not assign itself."""
    return {name for name in _read(statement) if "." not in name} - assigned([statement])


def levels_of(tree: ast.Module, at: Position) -> list[Level]:
    """Return the bodies of the innermost function around a place, the outermost first."""
    found, owner, body = list[Level](), tree, tree.body
    while (place := next((n for n, one in enumerate(body) if _spans(one, at)), None)) is not None:
        found.append(Level(body, place, owner))
        owner = body[place]
        body = next((inner for inner in _bodies(owner) if any(_spans(one, at) for one in inner)), [])
    first = max((n for n, level in enumerate(found) if isinstance(level.owner, _FUNCTIONS)), default=0)
    return found[first:]


def _spans(statement: ast.stmt, at: Position) -> bool:
    ends = (statement.end_lineno or statement.lineno, statement.end_col_offset or 0)
    return (statement.lineno, statement.col_offset) <= at < ends


def _bodies(statement: ast.stmt) -> Iterator[list[ast.stmt]]:
    for name in ("body", "orelse", "finalbody"):
        yield getattr(statement, name, None) or []
    for handler in getattr(statement, "handlers", ()):
        yield handler.body
    for case in getattr(statement, "cases", ()):
        yield case.body


def _backed(statement: ast.stmt) -> ast.expr | None:
    """Return the expression whose gradient a statement takes: `loss` of `loss.backward()`, `scaler.scale(loss).backward()` and
    `accelerator.backward(loss)`."""
    for node in ast.walk(statement):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "backward":
            return _unscaled(node.args[0] if node.args else node.func.value)
    return None


def _unscaled(loss: ast.expr) -> ast.expr:
    is_scaled = isinstance(loss, ast.Call) and isinstance(loss.func, ast.Attribute) and loss.func.attr == "scale"
    return loss.args[0] if isinstance(loss, ast.Call) and is_scaled and loss.args else loss


def needed(statements: Sequence[ast.stmt], loss: ast.expr) -> tuple[list[ast.stmt], set[str]]:
    """Return those that the loss is made by, and what these read before they assign it."""
    kept, wanted = list[ast.stmt](), _read(loss)
    for statement in reversed(statements):
        if assigned([statement]) & wanted or added_to(statement) & wanted:
            kept.append(statement)
            wanted = wanted_before(statement, wanted)
    return kept[::-1], wanted


def wanted_before(statement: ast.stmt, wanted: set[str]) -> set[str]:
    """Return what has to be there before a statement, for what is wanted after it."""
    match statement:
        case ast.With(items=items, body=body):
            return _wanted_before_all(body, wanted).union(*(_read(item.context_expr) for item in items))
        case ast.If(test=test, body=body, orelse=orelse):
            return _wanted_before_all(body, wanted) | _wanted_before_all(orelse, wanted) | _read(test)
        case ast.For(target=target, iter=over, body=body):  # which may not go round once
            return wanted | (_wanted_before_all(body, wanted) - _whole(target)) | _read(over)
        case ast.While(test=test, body=body):
            return wanted | _wanted_before_all(body, wanted) | _read(test)
    made = _assigned_for_sure(statement)
    return {name for name in wanted if not any(name == one or name.startswith(f"{one}.") for one in made)} | _read(
        statement
    )


def _wanted_before_all(statements: Sequence[ast.stmt], wanted: set[str]) -> set[str]:
    for one in reversed(statements):
        wanted = wanted_before(one, wanted)
    return wanted


def may_be_made_first(code: LossCode, name: str) -> bool:
    """True if the statements may give a name its value before they read it: that of the batch before is not meant then, as of `loss` after
    `if ...: loss = ...`, `elif ...: loss = ...`."""
    for statement in code.statements:
        if name in wanted_before(statement, set()):
            return False
        if name in assigned([statement]):
            return True
    return False


def assigned_in(loop: Loop) -> set[str]:
    """Return what a loop's body gives a value to, in whatever branch."""
    return assigned(loop.body) | _changed_in_place(loop.body)


def _read(node: ast.AST) -> set[str]:
    """Return the names that are read, and of attributes both the whole and what it begins with."""
    found = set[str]()
    for one in ast.walk(node):
        if isinstance(one, ast.Name | ast.Attribute) and isinstance(one.ctx, ast.Load) and (name := _dotted(one)):
            found.add(name)
        if isinstance(one, ast.AugAssign) and (name := _dotted(one.target)):
            found.add(name)
    return found - _local_within(node)


def _local_within(node: ast.AST) -> set[str]:
    """Return the names of comprehensions, and those that functions have of their own."""
    targets = [one.target for one in ast.walk(node) if isinstance(one, ast.comprehension)]
    functions = [one for one in ast.walk(node) if isinstance(one, (*_FUNCTIONS, ast.Lambda))]
    arguments = {a.arg for one in functions for a in one.args.args}
    arguments |= {name for one in functions if not isinstance(one, ast.Lambda) for name in assigned(one.body)}
    return arguments | {name.id for one in targets for name in ast.walk(one) if isinstance(name, ast.Name)}


def _dotted(node: ast.AST) -> str:
    match node:
        case ast.Name(id=name):
            return name
        case ast.Attribute(value=value, attr=attribute):
            return f"{before}.{attribute}" if (before := _dotted(value)) else ""
        case _:
            return ""


def assigned(statements: Iterable[ast.AST]) -> set[str]:
    """Return what any of them assigns, in whatever branch of it; of `x[0] = 1`, x."""
    found = set[str]()
    for node in (one for statement in statements for one in [statement, *walk_own(statement)]):
        if isinstance(node, ast.Name | ast.Attribute | ast.Subscript) and isinstance(node.ctx, ast.Store):
            owner = node
            while isinstance(owner, ast.Subscript):
                owner = owner.value
            found.add(_dotted(owner))
        elif isinstance(node, ast.FunctionDef | ast.ClassDef):
            found.add(node.name)
        elif isinstance(node, ast.Import | ast.ImportFrom):
            found |= {(alias.asname or alias.name).split(".")[0] for alias in node.names}
    return found - {""}


def _assigned_for_sure(statement: ast.stmt) -> set[str]:
    """Return the names that have another value after a statement, whatever they had before."""
    match statement:
        case ast.Assign(targets=targets):
            return {name for target in targets for name in _whole(target)}
        case ast.AnnAssign(target=target, value=value):
            return _whole(target) if value is not None else set()
        case ast.With(body=body) | ast.Try(body=body):
            entered = [item.optional_vars for item in getattr(statement, "items", ()) if item.optional_vars]
            return {name for one in body for name in _assigned_for_sure(one)} | {n for t in entered for n in _whole(t)}
        case ast.If(body=body, orelse=orelse):
            both = [{name for one in branch for name in _assigned_for_sure(one)} for branch in (body, orelse)]
            return both[0] & both[1]
        case ast.FunctionDef(name=name) | ast.ClassDef(name=name):
            return {name}
        case _:
            return set()


def _whole(target: ast.expr) -> set[str]:
    if isinstance(target, ast.Tuple | ast.List):
        return {name for one in target.elts for name in _whole(one)}
    if isinstance(target, ast.Starred):
        return _whole(target.value)
    return {_dotted(target)} - {""}


def added_to(statement: ast.AST) -> set[str]:
    """Return what a statement adds something to, `losses` of `losses.append(loss)`, or changes in place: `x` of `x[:, 0].zero_()`."""
    calls = [one.func for one in ast.walk(statement) if isinstance(one, ast.Call)]
    owners = [one.value for one in calls if isinstance(one, ast.Attribute) and _CHANGES_ITS_OWNER.fullmatch(one.attr)]
    return {_dotted(one.value if isinstance(one, ast.Subscript) else one) for one in owners} - {""}


def _changed_in_place(statements: Iterable[ast.stmt]) -> set[str]:
    """Return the names whose tensors get other values by a method of theirs."""
    calls = [node.func for one in statements for node in walk_own(one) if isinstance(node, ast.Call)]
    methods = [one for one in calls if isinstance(one, ast.Attribute) and re.fullmatch(".*[^_]_", one.attr)]
    return {_dotted(one.value) for one in methods if one.attr not in _KEEPS_VALUES} - {""}


_FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)


def walk_own(node: ast.AST) -> Iterator[ast.AST]:
    """Yield what is in a node, but for the insides of functions and classes in it."""
    for child in ast.iter_child_nodes(node):
        yield child
        if not isinstance(child, (*_FUNCTIONS, ast.ClassDef, ast.Lambda)):
            yield from walk_own(child)


def targets_of(loop: ast.For) -> set[str]:
    """Return the names that a loop gives the values it goes through."""
    return _whole(loop.target)


def loops_around(tree: ast.Module, at: Position) -> list[Loop]:
    """Return the loops of a function around a place, the innermost first."""
    return [level.owner for level in reversed(levels_of(tree, at)) if isinstance(level.owner, Loop)]


def range_of(loop: ast.For) -> ast.Call | None:
    """Return the range, or the islice, that a loop goes through, whatever is around it; None of any other."""
    over = loop.iter
    while isinstance(over, ast.Call):
        name = ast.unparse(over.func).rpartition(".")[2]
        if name in ("range", "trange", "islice"):
            return over
        over = over.args[0] if over.args else None
    return None


def is_over_batches(loop: ast.For) -> bool:
    """True unless it counts."""
    return range_of(loop) is None


def is_over_words(loop: Loop) -> bool:
    """True of `for phase in ["train", "val"]`: of its rounds one trains."""
    parts = loop.iter.elts if isinstance(loop, ast.For) and isinstance(loop.iter, ast.List | ast.Tuple) else []
    return any(isinstance(one, ast.Constant) and isinstance(one.value, str) for one in parts)


def ends_at(
    loop: Loop, place: Any, value_of: Callable[[ast.expr, Any], Any], changing: Collection[str]
) -> Iterator[tuple[str, float, ast.Compare]]:
    """Yield what is compared with a number where a loop surely ends, in its head and before each `break`, that number, and the comparison.

    changing: names that may stand for something else in a later round, beside those that the loop itself gives values to.
    """
    known = same_in_each_round(place, value_of, {*changing, *assigned([loop])})
    tests: list[tuple[ast.expr, bool, Collection[str] | None]] = []
    if isinstance(loop, ast.While):
        tests.append((loop.test, False, None))
    tests += [(test, True, counted) for test, counted in _tests_before_break(loop.body, known)]
    for test, ends, counted in tests:
        for node in _deciding(test, known, ends=ends):
            # `step + 1 >= most`
            left = one.left if isinstance(one := node.left, ast.BinOp) and isinstance(one.op, ast.Add) else one
            name, value = _dotted(left), known(node.comparators[0])
            is_number = isinstance(value, int | float) and not isinstance(value, bool) and value > 1
            if name and is_number and (counted is None or name in counted):
                yield name, float(value), node


Known = Callable[[ast.expr], Any]
"""What an expression stands for, if that is the same in each round of the loops; None of any other."""


def same_in_each_round(place: Any, value_of: Callable[[ast.expr, Any], Any], changing: Collection[str]) -> Known:
    return lambda node: None if _read(node) & {*changing} else value_of(node, place)


def is_true(test: ast.expr, known: Known) -> bool | None:
    """Return whether a test is true in each round; None where that is not known, or is so in some."""
    match test:
        case ast.UnaryOp(op=ast.Not(), operand=operand):
            return None if (found := is_true(operand, known)) is None else not found
        case ast.BoolOp(op=op, values=values):
            decides, found = isinstance(op, ast.Or), {is_true(one, known) for one in values}
            return decides if decides in found else None if None in found else not decides
        case ast.Call(func=ast.Name("isinstance"), args=[one, kind]):
            value, known_kind = known(one), known(kind)
            return isinstance(value, known_kind) if value is not None and isinstance(known_kind, type) else None
        case _:
            try:
                return None if (value := known(test)) is None else bool(value)
            except Exception:  # of a tensor of several numbers
                return None


def _tests_before_break(
    body: Iterable[ast.stmt], known: Known, counted: Collection[str] | None = None
) -> Iterator[tuple[ast.expr, Collection[str] | None]]:
    """Yield the tests before each `break`: with None where they are made in each round of a loop, and with the names that go up beside them where
    they are made in some: `if is_step: step += 1; if step >= most: break`."""
    for one in body:
        match one:
            case ast.If(test=test, body=then, orelse=otherwise):
                if any(isinstance(last, ast.Break) for last in then):
                    yield test, counted
                truth = is_true(test, known)
                if truth is not None:
                    yield from _tests_before_break(then if truth else otherwise, known, counted)
                for branch in (then, otherwise) if truth is None else ():
                    added = {_dotted(inner.target) for inner in branch if isinstance(inner, ast.AugAssign)}
                    yield from _tests_before_break(branch, known, added)
            case ast.With(body=inner) | ast.Try(body=inner):
                yield from _tests_before_break(inner, known, counted)


def _deciding(test: ast.expr, known: Known, *, ends: bool) -> Iterator[ast.Compare]:
    """Yield the comparisons with something that goes up, each of which alone gives a test the value at which a loop ends: parts of an `or` before a
    `break` and of an `and` in the head of a `while`; of the other one the only part that is not known to have that value."""
    match test:
        case ast.UnaryOp(op=ast.Not(), operand=operand):
            yield from _deciding(operand, known, ends=not ends)
        case ast.BoolOp(op=op, values=values):
            one_is_enough = isinstance(op, ast.Or) is ends
            others = [one for one in values if is_true(one, known) is not ends]
            for one in values if one_is_enough else others if len(others) == 1 else []:
                yield from _deciding(one, known, ends=ends)
        case ast.Compare(ops=[ast.Gt() | ast.GtE() | ast.Eq()]) if ends:
            yield test
        case ast.Compare(ops=[ast.Lt() | ast.LtE()]) if not ends:
            yield test


def rounds_before(loop: ast.For, end: float, test: ast.Compare, line: int) -> int:
    """Return in how many rounds of a loop a line in it runs, where the loop ends at a comparison of its own counter with a number: in one more
    where the comparison comes after the line."""
    added = [test.left.right] if isinstance(test.left, ast.BinOp) else []  # `i + 1 >= most`
    for call in (one for one in ast.walk(loop.iter) if isinstance(one, ast.Call)):
        name = ast.unparse(call.func).rpartition(".")[2]
        added += [word.value for word in call.keywords if word.arg == "start"]
        added += call.args[1:2] if name == "enumerate" else call.args[:-1][:1] if name in ("range", "trange") else []
    first = sum(one.value for one in added if isinstance(one, ast.Constant) and isinstance(one.value, int))
    return max(1, int(end) - first + isinstance(test.ops[0], ast.Gt) + (test.lineno > line))


def _own_statements(loop: Loop) -> Iterator[ast.AST]:
    """Yield what is in a loop, but for what is in loops within it, whose `break` is theirs."""
    pending: list[ast.AST] = [*loop.body]
    while pending:
        yield (one := pending.pop(0))
        if not isinstance(one, (ast.For, ast.While, *_FUNCTIONS, ast.ClassDef)):
            pending += ast.iter_child_nodes(one)


def counted_in(loop: Loop, name: str) -> tuple[Loop, bool, ast.expr] | None:
    """Return the loop in which a name is counted up, whether only in some of its rounds, and by what; None where it is not."""
    for one in _own_statements(loop):
        if isinstance(one, ast.For | ast.While) and (found := counted_in(one, name)) is not None:
            return found
    for statement in loop.body:
        for one in ast.walk(statement):
            if isinstance(one, ast.AugAssign) and isinstance(one.op, ast.Add) and _dotted(one.target) == name:
                return loop, one is not statement, one.value
    return None


def changed_by(loops: Sequence[Loop], tree: ast.Module) -> set[str]:
    """Return what loops give values to, and the attributes to which functions of their file do that they call. Of a loop over words it is the
    same whenever it trains."""
    defined = {one.name: one.body for one in ast.walk(tree) if isinstance(one, _FUNCTIONS)}
    words = {name for loop in loops if isinstance(loop, ast.For) and is_over_words(loop) for name in targets_of(loop)}
    found, pending = assigned(loops) - words, list[ast.AST](loops)
    while pending:
        calls = (one for one in ast.walk(pending.pop()) if isinstance(one, ast.Call))
        called = {getattr(one.func, "attr", getattr(one.func, "id", "")) for one in calls} & defined.keys()
        bodies = [defined.pop(name) for name in called]
        found |= {name for body in bodies for name in assigned(body) if "." in name}
        pending += itertools.chain.from_iterable(bodies)
    return found


def handed_on(tree: ast.Module, at: Position, function: ast.AST, changing: Collection[str]) -> set[str]:
    """Return the names of a function that may stand for something else in another of its calls from a place: attributes, arguments that are made of
    what does there, and what the function makes of these. changing: the names of the place that do."""
    if not isinstance(function, _FUNCTIONS):
        return {*changing}
    arguments = [one.arg for one in (*function.args.posonlyargs, *function.args.args, *function.args.kwonlyargs)]
    own = {*arguments, *assigned(function.body)}
    found = {name for name in changing if "." in name or name not in own}
    by_place = [one for one in arguments if one not in ("self", "cls")]
    for call in (one for level in levels_of(tree, at)[-1:] for one in ast.walk(level.statement)):
        if isinstance(call, ast.Call) and position_of(call) == at:
            given = [*zip(by_place, call.args, strict=False), *((word.arg, word.value) for word in call.keywords)]
            found |= {name for name, value in given if name and _read(value) & {*changing}}
    for one in walk_own(function):
        if isinstance(one, ast.Assign) and _read(one.value) & found:
            found |= assigned([one])
    return found


def is_set_in(loop: Loop, name: str) -> bool:
    """True if a name is given a value anew within a loop: what counts there begins again."""
    return any(
        isinstance(one, ast.Assign) and name in {n for t in one.targets for n in _whole(t)} for one in ast.walk(loop)
    )
