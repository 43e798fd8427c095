"""The learning rate that a script's own statements set, without a schedule of torch's: where they are, and what they set over a whole run."""

from __future__ import annotations

import ast
import builtins
import contextlib
import inspect
import io
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import CodeType
from typing import Any

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from batchscout.trainers.sources.schedules import is_alike, spread
from batchscout.trainers.sources.watch.length import changing_at, rounds_of
from batchscout.trainers.sources.watch.observer import Place, Seen, value_of
from batchscout.trainers.sources.watch.statements import (
    Level,
    Loop,
    Position,
    added_to,
    assigned,
    levels_of,
    parsed,
    position_of,
    range_of,
    wanted_before,
)

_SAME = 1e-6
_MOST_TIMES = 100_000
"""Statements that would have to be run more often, each time after the one before, are not followed: each takes some microseconds."""
_WITHOUT_EFFECT = ("builtins", "math", "numpy")
"""Modules whose functions may be called again, but for those of the first that read or write."""
_WITH_EFFECT = ("next", "open", "input", "exec", "eval", "setattr", "delattr")
_VALUES = (list, tuple, dict, str, int, float)
_DISPLAYS = (
    ast.Dict,
    ast.List,
    ast.Tuple,
    ast.Set,
    ast.DictComp,
    ast.ListComp,
    ast.SetComp,
    ast.Constant,
    ast.JoinedStr,
)
_OF_VALUES = ("get", "index", "count", "item", "keys", "values", "items", "format", "join")
"""Methods of lists, dictionaries and numbers that change nothing."""


def is_set_around(place: Place, seen: Seen) -> bool:
    """True if a loop of the run around a place sets a rate, itself or in a function that it calls, or calls a library's object that holds the optimizer and is
    no schedule of torch's, which may set it."""
    loops = seen.loops_of(place) if place.is_the_scripts else []
    return bool(loops) and _sets_rate(loops[-1], place, seen.steps[0].optimizer, set())


def _sets_rate(node: ast.AST, place: Place, optimizer: Optimizer, known: set[Any]) -> bool:
    """known: the code of the functions that were looked into."""
    inside = list(ast.walk(node))
    loops = [one for one in inside if isinstance(one, ast.For | ast.comprehension)]
    return any(
        any(_is_group(owner, loops, place, optimizer) for owner in _whose_rate(one))
        or (isinstance(one, ast.Call) and _call_sets_rate(one, place, optimizer, known))
        for one in inside
    )


def _whose_rate(node: ast.AST) -> Iterator[ast.expr]:
    """Yield whose rate a node sets, `group["lr"] = ...` or `group.update(lr=...)`. What a script logs is called so, too: `metrics["lr"]`."""
    targets = node.targets if isinstance(node, ast.Assign) else [node.target] if isinstance(node, ast.AugAssign) else []
    for one in targets:
        if isinstance(one, ast.Subscript) and ast.unparse(one.slice) == "'lr'":
            yield one.value
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "update":
        yield from (node.func.value for given in node.keywords if given.arg == "lr")


def _is_group(
    owner: ast.expr, loops: Sequence[ast.For | ast.comprehension], place: Place, optimizer: Optimizer
) -> bool:
    """True of a group of the optimizer: by its name or its value, or as one of those that a loop goes through."""
    text, groups = ast.unparse(owner), optimizer.param_groups
    if "param_groups" in text or re.fullmatch(r".*group|pg|g", text) is not None:
        return True

    def is_one(value: Any) -> bool:
        return any(value is one for one in groups)

    given_by = (one.iter for one in loops if text in {getattr(part, "id", None) for part in ast.walk(one.target)})
    parts = [part for over in given_by for part in ast.walk(over) if isinstance(part, ast.Name | ast.Attribute)]
    lists = [values for part in parts if isinstance(values := value_of(part, place), list | tuple)]
    has_the_name = any("groups" in ast.unparse(part) for part in parts)
    return has_the_name or is_one(value_of(owner, place)) or any(is_one(one) for values in lists for one in values)


_ONLY_TELLS = re.compile("_*(get|save|load|state|zero|print|log|backward)")
"""Of the methods of a library's object, by their names: they leave the rate as it is."""


def _call_sets_rate(call: ast.Call, place: Place, optimizer: Optimizer, known: set[Any]) -> bool:
    owner, _, name = ast.unparse(call.func).rpartition(".")
    try:
        of = place.get(owner) if owner else None
        called: Any = inspect.unwrap(value_of(call.func, place))
        code = getattr(called, "__code__", None)
    except Exception:  # of the script's own objects, whose attributes may be computed
        return False
    takes_it = any(isinstance(one, ast.Name) and place.get(one.id) is optimizer for one in call.args)
    is_a_librarys = code is not None and "site-packages" in code.co_filename
    if is_a_librarys and not _ONLY_TELLS.match(name) and _holds(of, optimizer):
        return True
    if code is None and takes_it and not isinstance(call.func, ast.Name | ast.Attribute):
        return True  # `table[name](optimizer)`: it may
    if code is None or code in known or (is_a_librarys and not takes_it):
        return False
    known.add(code)
    found = function_of(code)
    return found is not None and _sets_rate(found, inside_of(place, called, of), optimizer, known)


def inside_of(place: Place, called: Any, owner: Any) -> Place:
    """Return the place within a function, whose arguments are not known. owner: whose method it is."""
    local = {"self": owner}
    return replace(place, file=called.__code__.co_filename, local=local, global_=called.__globals__)


def _holds(owner: Any, optimizer: Optimizer) -> bool:
    """True of an object that has the optimizer, and is neither a schedule of torch's, which is followed, nor one of its own kind."""
    if isinstance(owner, Optimizer | LRScheduler) or type(owner).__module__.startswith(("torch.", "accelerate.")):
        return False
    return any(value is optimizer for value in getattr(owner, "__dict__", {}).values())


def function_of(code: CodeType) -> ast.AST | None:
    """Return the syntax tree of a function; None where its file is not there, or it has no name."""
    if not Path(code.co_filename).is_file():
        return None
    inside = ast.walk(parsed(code.co_filename))
    functions = (
        one
        for one in inside
        if (isinstance(one, ast.FunctionDef) and one.name == code.co_name)
        or (isinstance(one, ast.Lambda) and code.co_name == "<lambda>")
    )
    return min(functions, key=lambda one: abs(one.lineno - code.co_firstlineno), default=None)


@dataclass(frozen=True)
class Part:
    """A body on the way to backward."""

    level: Level
    place: Place
    ring: int
    """The number of loops within the one in whose rounds it is run: 0 goes round with each batch, or step, and 1 with each pass."""


@dataclass(frozen=True)
class _Setting:
    """Statements that set the rate in each round of a loop, and make what they read for that."""

    statements: list[ast.stmt]
    part: Part
    is_after: bool
    """Of backward: they set the rate of the next round."""
    reads: set[str]


@dataclass(frozen=True)
class _Counter:
    """A name that counts."""

    by: str
    """One of _counts."""
    first: float
    """Its value in the first call of backward."""
    each: float
    at: Position
    """Where it goes up; (0, 0) where that is in the head of a loop, or of another function."""

    def value(self, counts: Mapping[str, int], setting: _Setting) -> float:
        """Return its value where the statements are run."""
        value, backward = self.first + self.each * counts[self.by], setting.part.place.position
        last = position_of(setting.statements[-1])
        if setting.is_after:
            return value + self.each if backward < self.at < last else value
        return value - self.each if last < self.at < backward else value


def rates_by_hand(seen: Seen, num_steps: int, steps_per_pass: float | None) -> list[float] | None:
    """Return the rates that the script's own statements set over the run: they are run again, with what they count. None where they read
    what is not counted, would do more than set the rate, or do not give the rates that were seen."""
    parts, each = parts_of(seen), _micro_batches(seen)
    per_pass = steps_of_pass(parts, steps_per_pass, seen)
    if seen.together:
        return None
    num_steps = in_whole_steps(num_steps, per_pass, steps_per_pass)
    steps = [0, 1, *spread(num_steps)]
    rates = _rates_apart(seen, parts, steps, per_pass, each) or _rates_in_turn(seen, parts, steps, per_pass, each)
    seen_so = rates is not None and all(
        math.isclose(one, other, rel_tol=_SAME)
        for step, group in zip(seen.steps, rates, strict=False)
        for one, other in zip(step.rates, group, strict=True)
    )
    if rates is None or not seen_so:
        return None
    first, *others = zip(*rates[2:], strict=True)
    return list(first) if all(is_alike(first, other) for other in others) else None


def _rates_apart(
    seen: Seen, parts: Sequence[Part], steps: Sequence[int], per_pass: int | None, each: int
) -> list[list[float]] | None:
    """Return the rates of the groups in some steps, from statements that need nothing of the step before."""
    setting = _the_setting(seen, parts, per_pass, in_turn=False)
    if setting is None:
        return None
    counters = {name: one for name, one in _counters(parts, setting, per_pass) if name in setting.reads}
    if not _is_known(setting, parts, set(counters), seen):
        return None
    counts = (_counts(step, setting, per_pass, each) for step in steps)
    return _rates_set(setting, [counts and _values(counters, counts, setting) for counts in counts], seen)


def _rates_in_turn(
    seen: Seen, parts: Sequence[Part], steps: Sequence[int], per_pass: int | None, each: int
) -> list[list[float]] | None:
    """Return the same from statements that go on from the rate of the time before, `lr = 0.9 * lr`: they are run as often as the script does."""
    setting = _the_setting(seen, parts, per_pass, in_turn=True)
    if setting is None or (each > 1 and not setting.part.ring):
        return None
    between = (per_pass or 1) if setting.part.ring else 1
    times = steps[-1] // between
    counters = {name: one for name, one in _counters(parts, setting, per_pass) if name in setting.reads}
    made = {name for name in setting.reads if _is_made_by(setting, name, parts)}
    if times > _MOST_TIMES or not _is_known(setting, parts, {*counters, *made}, seen):
        return None
    # What comes before backward was run once when its names were noted.
    counts = (_counts(time * between, setting, per_pass, each) for time in range(1, times + 1))
    values = [None, *(counts and _values(counters, counts, setting) for counts in counts)]
    rates = _rates_set(setting, values, seen, in_turn=True)
    return rates and [rates[step // between] for step in steps]


def _the_setting(seen: Seen, parts: Sequence[Part], per_pass: int | None, *, in_turn: bool) -> _Setting | None:
    """Return the statements that set the rate; None where there are others elsewhere, or they are run in rounds of unknown length."""
    settings = [one for part in parts for one in _settings(part, parts, seen, in_turn=in_turn)]
    if len(settings) != 1 or settings[0].part.ring > (per_pass is not None):
        return None
    return settings[0]


def _is_known(setting: _Setting, parts: Sequence[Part], known: set[str], seen: Seen) -> bool:
    """True if the statements can be run again. known: names whose values are known in each round."""
    place = setting.part.place
    unknown = (_changing(parts, place) & setting.reads) - known
    return all(_is_of_groups(name, place, seen) for name in unknown) and all(
        _is_repeatable(one, place, parts, set()) for one in setting.statements
    )


def _values(counters: Mapping[str, _Counter], counts: Mapping[str, int], setting: _Setting) -> dict[str, float]:
    return {name: one.value(counts, setting) for name, one in counters.items()}


def _is_made_by(setting: _Setting, name: str, parts: Sequence[Part]) -> bool:
    """True of a name that nothing in the loops but these statements gives a value, in the function of the outermost loop: it keeps it until they are run
    again."""
    loops = [one.level.owner for one in parts if isinstance(one.level.owner, Loop)]
    stored = _stores(name, loops)
    return parts[-1].place is setting.part.place and bool(stored) and stored <= _stores(name, setting.statements)


def parts_of(seen: Seen) -> list[Part]:
    """Return the bodies on the way to backward that are run again and again, the innermost first."""
    parts, ring = list[Part](), 0
    for place in seen.backward.places:
        for level in reversed(levels_of(parsed(place.file), place.position)):
            parts.append(Part(level, place, ring))
            if isinstance(level.owner, Loop) and seen.begins_anew(level.owner, place):
                return [one for one in parts if one.ring < ring]
            ring += isinstance(level.owner, Loop) and not _is_within_a_round(level.owner, place, ring, seen)
    return [one for one in parts if one.ring < ring]


def _is_within_a_round(loop: Loop, place: Place, ring: int, seen: Seen) -> bool:
    """True of a loop over the micro-batches of a step, and of `for phase in ["train", "val"]`."""
    of_words = isinstance(loop, ast.For) and isinstance(loop.iter, ast.List | ast.Tuple)
    return of_words or (not ring and _is_of_step(loop, place, seen))


def _is_of_step(loop: Loop, place: Place, seen: Seen) -> bool:
    return rounds_of(loop, place, None) == seen.steps[-1].num_backwards


def _micro_batches(seen: Seen) -> int:
    """Return the micro-batches of a step that loops count; 1 where a loop has all of a step."""
    innermost = next(((loop, place) for place in seen.backward.places for loop in place.loops), None)
    return 1 if innermost and _is_of_step(*innermost, seen) else max(1, seen.steps[-1].num_backwards)


def _settings(part: Part, parts: Sequence[Part], seen: Seen, *, in_turn: bool) -> Iterator[_Setting]:
    """Yield the statements of a body that set the rate, before backward and after it. None of those that change more is among them, so that
    what they make is read as it is. in_turn: those that go on from the time before, `lr *= 0.9`, are among them; what counts is not."""
    body, at, optimizer = part.level.body, part.level.place, seen.steps[0].optimizer
    for statements, is_after in ((body[:at], False), (body[at + 1 :], True)):
        kept, wanted, sets = list[ast.stmt](), set[str](), False
        for one in reversed(statements):
            sets_rate = _sets_rate(one, part.place, optimizer, set())
            is_left_out = isinstance(one, ast.AugAssign) and (not in_turn or _constant_added(one))
            makes = assigned([one]) & wanted and not is_left_out
            if sets_rate or (makes and _is_repeatable(one, part.place, parts, set())):
                kept, wanted, sets = [one, *kept], wanted_before(one, wanted), sets or sets_rate
        if sets:
            yield _Setting(kept, part, is_after, wanted)


def steps_of_pass(parts: Sequence[Part], steps_per_pass: float | None, seen: Seen) -> int | None:
    """Return the optimizer steps of each round of the second loop; None where that is not known. steps_per_pass: those of a pass over the data."""
    loops = [(one.level.owner, one.place) for one in parts if one.ring == 0 and isinstance(one.level.owner, Loop)]
    if not loops or all(one.ring == 0 for one in parts):
        return None
    each, (loop, place) = _micro_batches(seen), loops[-1]
    of_data = math.ceil(steps_per_pass * each) if steps_per_pass else None
    batches = rounds_of(loop, place, of_data, changing_at(place, seen))
    return max(1, math.ceil(batches / each)) if batches else None


def in_whole_steps(num_steps: int, per_pass: int | None, steps_per_pass: float | None) -> int:
    """Return the optimizer steps of a run, from its samples in steps of a full batch: of a pass over the data the last batch may be smaller."""
    if per_pass is None or steps_per_pass is None or not 0 <= per_pass - steps_per_pass < 1:
        return num_steps
    passes = round(num_steps / steps_per_pass)
    return max(2, passes * per_pass) if math.ceil(passes * steps_per_pass - 1e-6) == num_steps else num_steps


def _counters(parts: Sequence[Part], setting: _Setting, per_pass: int | None) -> Iterator[tuple[str, _Counter]]:
    """Yield the names that go up evenly, as the place of the statements knows them."""
    place = setting.part.place
    for part in parts:
        for name, by, each, at in _counted(part, is_only_loop=all(one.ring == 0 for one in parts)):
            first = place.get(name)
            is_own = name in assigned(levels_of(parsed(place.file), place.position)[0].body)
            is_there = part.place is place or (first == part.place.get(name) and not is_own)
            is_known = per_pass is not None or by in ("steps", "batches")
            if (
                name.isidentifier()
                and is_there
                and is_known
                and isinstance(first, int | float)
                and not _is_set_otherwise(name, parts)
            ):
                yield name, _Counter(by, first, each, at if part.place is place else (0, 0))


def _counted(part: Part, *, is_only_loop: bool) -> Iterator[tuple[str, str, float, Position]]:
    """Yield what counts in a body or at the head of its loop: the name, what it counts, by how much, and its place."""
    loop = part.level.owner
    if isinstance(loop, ast.For) and part.ring < 2:
        by = "passes" if part.ring else "batches" if is_only_loop else "batches of a pass"
        call = range_of(loop)
        if isinstance(loop.target, ast.Name) and call is not None and ast.unparse(call.func).endswith("range"):
            each = value_of(call.args[2], part.place) if len(call.args) == 3 else 1
            yield loop.target.id, by, each if isinstance(each, int) else math.nan, (0, 0)
        elif isinstance(loop.target, ast.Tuple) and "enumerate(" in ast.unparse(loop.iter):
            yield ast.unparse(loop.target.elts[0]), by, 1, (0, 0)
    for statement in part.level.body if part.ring < 2 else ():
        guarded = isinstance(statement, ast.If) and ".step(" in ast.unparse(statement)
        for one in statement.body if isinstance(statement, ast.If) and guarded else [statement]:
            if isinstance(one, ast.AugAssign) and (added := _constant_added(one)):
                by = "passes" if part.ring else "steps" if guarded else "batches"
                each = added.value
                yield ast.unparse(one.target), by, each if isinstance(each, int | float) else math.nan, position_of(one)


def _constant_added(one: ast.AugAssign) -> ast.Constant | None:
    return one.value if isinstance(one.op, ast.Add) and isinstance(one.value, ast.Constant) else None


def _is_set_otherwise(name: str, parts: Sequence[Part]) -> bool:
    """True of a name that loops change at several places: one that is set back."""
    return len(_stores(name, [one.level.owner for one in parts if isinstance(one.level.owner, Loop)])) > 1


def _stores(name: str, nodes: Sequence[ast.AST]) -> set[Position]:
    return {
        (one.lineno, one.col_offset)
        for node in nodes
        for one in ast.walk(node)
        if isinstance(one, ast.Name | ast.Attribute) and isinstance(one.ctx, ast.Store) and ast.unparse(one) == name
    }


def _parameters(place: Place) -> set[str]:
    """Return the arguments of the function that a place is in."""
    found = levels_of(parsed(place.file), place.position)[0].owner
    return (
        {one.arg for one in ast.walk(found) if isinstance(one, ast.arg)}
        if isinstance(found, ast.FunctionDef)
        else set()
    )


def _changing(parts: Sequence[Part], place: Place) -> set[str]:
    """Return the names that may have another value in another round, in a place."""
    if parts[-1].place is place:
        return _changed_in([one.level.owner for one in parts if one.place is place])
    body = levels_of(parsed(place.file), place.position)[0].body  # of a function that is called in each round
    numbers = {one for one in _parameters(place) if isinstance(place.get(one), int | float)}
    return _changed_in([*body, *(one.level.owner for one in parts if one.place is not place)]) | numbers


def _changed_in(nodes: Sequence[ast.AST]) -> set[str]:
    return assigned(nodes).union(*map(added_to, nodes))


def _is_of_groups(name: str, place: Place, seen: Seen) -> bool:
    """True of what stands for the optimizer's groups, or one of them."""
    groups = seen.steps[0].optimizer.param_groups
    return any(place.get(name) is one for one in (groups, *groups))


def _is_repeatable(node: ast.AST, place: Place, parts: Sequence[Part], known: set[Any]) -> bool:
    """True if a node that is run again gives the same, and changes nothing but the rate. known: the code of the functions that were looked into."""
    tree, ours = parsed(place.file), {"__init__", *(one.place.function for one in parts)}
    functions = [one for one in ast.walk(tree) if isinstance(one, ast.FunctionDef) and one.name not in ours]
    stored = assigned([*functions, *(one.level.owner for one in parts if isinstance(one.level.owner, Loop))])
    kept = {name.rpartition(".")[2] for name in stored if "." in name} - {"param_groups"}
    for one in ast.walk(node):
        if isinstance(one, ast.Global | ast.Nonlocal | ast.Yield | ast.Await | ast.Import | ast.ImportFrom | ast.With):
            return False
        if isinstance(one, ast.Attribute) and (isinstance(one.ctx, ast.Store) or one.attr in kept):
            return False
        if isinstance(one, ast.Call) and not _call_is_repeatable(one, node, place, parts, known):
            return False
    return True


def _is_written_out(node: ast.expr, within: ast.AST) -> bool:
    """True of a dictionary, a list or a text that is written out, or a name that is given nothing else."""
    if not isinstance(node, ast.Name):
        return _is_display(node)
    inside = list(ast.walk(within))
    stores = [
        one for one in inside if isinstance(one, ast.Name) and isinstance(one.ctx, ast.Store) and one.id == node.id
    ]
    given = [one for one in inside if isinstance(one, ast.Assign) and any(target in stores for target in one.targets)]
    return len(given) == len(stores) > 0 and all(_is_display(one.value) for one in given)


def _is_display(node: ast.expr) -> bool:
    return (
        all(map(_is_display, (node.body, node.orelse))) if isinstance(node, ast.IfExp) else isinstance(node, _DISPLAYS)
    )


def _call_is_repeatable(call: ast.Call, within: ast.AST, place: Place, parts: Sequence[Part], known: set[Any]) -> bool:
    name = ast.unparse(call.func).rpartition(".")[2]
    if isinstance(call.func, ast.Attribute) and (
        isinstance(value_of(call.func.value, place), _VALUES) or _is_written_out(call.func.value, within)
    ):
        return name in _OF_VALUES
    called = value_of(call.func, place) or getattr(builtins, name, None)
    if (getattr(called, "__module__", None) or type(called).__module__).split(".")[0] in _WITHOUT_EFFECT:
        return called is not None and name not in _WITH_EFFECT
    code = getattr(called, "__code__", None)
    if code is None or code in known:
        return code is not None
    known.add(code)
    changing = {name for one in parts for name in _changing(parts, one.place)}
    found, inside = function_of(code), inside_of(place, called, getattr(called, "__self__", None))
    if found is None or "site-packages" in code.co_filename:
        return False
    read = {one.id for one in ast.walk(found) if isinstance(one, ast.Name)} - {*code.co_varnames, *code.co_cellvars}
    return not changing & read and _is_repeatable(found, inside, parts, known)


def _counts(step: int, setting: _Setting, per_pass: int | None, each: int) -> dict[str, int] | None:
    """Return what was counted since the first call of backward when the rate of a step was set; None where that was before."""
    if setting.part.ring:
        assert per_pass is not None
        step -= step % per_pass
    if (step := step - setting.is_after) < 0:
        return None
    passes = step // per_pass if per_pass else 0
    in_step = 0 if setting.part.ring and not setting.is_after else each - 1
    in_pass = step - passes * (per_pass or 0)
    batches = {"batches": step * each + in_step, "batches of a pass": in_pass * each + in_step}
    return {"steps": step, "passes": passes, **batches}


def _rates_set(
    setting: _Setting, values: Sequence[Mapping[str, float] | None], seen: Seen, *, in_turn: bool = False
) -> list[list[float]] | None:
    """Return the rates of the groups after the statements were run, with each of these values of what counts; where there are none, those that
    were seen first. None where the statements set no rate, or fail. They are the script's own, as is the optimizer, whose rates are put back.

    in_turn: each time goes on from what the one before has left.
    """
    groups = seen.steps[0].optimizer.param_groups
    before = [group["lr"] for group in groups]
    code = compile(ast.Module(setting.statements, []), "<the script>", "exec", dont_inherit=True)
    names, rates = setting.part.place.names, list[list[float]]()
    try:
        for group, rate in zip(groups, seen.steps[0].rates, strict=True):
            group["lr"] = rate
        with contextlib.redirect_stdout(io.StringIO()):
            for counted in values:
                if counted is None:
                    rates.append([*seen.steps[0].rates])
                    continue
                if not in_turn:
                    for group in groups:
                        group["lr"] = None  # and not that of another step, where they set none
                inside = names if in_turn else dict(names)
                inside |= counted
                exec(code, inside)
                rates.append([float(group["lr"]) for group in groups])
    # Of a rate that is made from the one before, and of the script, whose other names are not what they were: it is told as unknown.
    except Exception:
        return None
    finally:
        for group, rate in zip(groups, before, strict=True):
            group["lr"] = rate
    return rates
