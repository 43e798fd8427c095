"""The loss of a batch as a script computes it: its own statements, called again. One that does not give the loss and the gradient that
were seen is not used."""

from __future__ import annotations

import ast
import copy
import itertools
import math
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from batchscout.trainers.sources.watch.batches import FromLoader, FromTensors, Source, call_source, same_numbers
from batchscout.trainers.sources.watch.observer import Backward, Place, RandomState, Seen, unwrapped
from batchscout.trainers.sources.watch.statements import (
    LossCode,
    assigned_in,
    inputs_of,
    loops_around,
    loss_codes,
    parsed,
    targets_of,
)

SAME = 1e-5
"""So far, as a share of what was seen, the replayed loss and gradient may be off."""
LOSS_MODULE = "batchscout_loss_of_a_script"
_BATCH = "__batch__"
_LATER = "__as_it_was__"


@dataclass(frozen=True)
class LossOfBatch:
    """The script's statements between a batch and its loss, as a function of the batch."""

    text: str
    call: Callable[[Any], Tensor]
    factor: float
    """By which the script multiplies it before backward, outside of these statements."""
    source: Source
    first: Any
    """The first batch that was trained on."""
    place: Place
    code: LossCode


@dataclass(frozen=True)
class NotReplayed:
    """Why the loss could not be had from a script's own statements."""

    reason: str


@dataclass(frozen=True)
class _Bound:
    """How a batch gets its names: by these statements, in place of those that are left out."""

    begin: tuple[ast.stmt, ...]
    left_out: tuple[ast.stmt, ...]
    source: Source
    seen: Any
    """The batch that was trained on first."""
    random: RandomState | None = None
    """The generators after it was fetched."""
    in_place: ast.Call | None = None
    """A call within the statements that returns the batch, in whose place it stands."""


def loss_of(seen: Seen) -> LossOfBatch | NotReplayed:
    """Return the loss of a batch. What is tried first is what scripts do most: a loop over a DataLoader, then a call that returns
    batches, then the same tensors in every step."""
    assert seen.backward is not None
    reasons = list[str]()
    for place, code in _codes(seen.backward):
        if carried := _carried(code, place):
            return NotReplayed(carried)  # a wider piece of the script would hide it
        for bound in _bindings(code, place, seen):
            if (frozen := _frozen(code, place, bound, seen)) is not None:
                reasons.insert(0, frozen)  # it says more than what came of trying
                continue
            found = _function(code, place, bound)
            factor = _replayed(found, bound, seen)
            if not isinstance(factor, str):
                return LossOfBatch(found.text, found.call, factor, bound.source, bound.seen, place, code)
            reasons.append(factor)
    return NotReplayed(
        reasons[0] if reasons else "no loop was found that takes a batch, computes its loss and calls backward"
    )


def _codes(backward: Backward) -> Iterator[tuple[Place, LossCode]]:
    """Yield where the loss may be made: the place that calls backward, and those that have handed the loss on to it."""
    for number, place in enumerate(backward.places):
        name = None
        if number:
            name = next((name for name, value in place.local.items() if value is backward.loss), None)
            if name is None:
                continue
        for code in loss_codes(parsed(place.file), place.position, name):
            yield place, code


def _carried(code: LossCode, place: Place) -> str | None:
    """Return what a loss takes over from the batch before; None where there is nothing."""
    given = targets_of(code.loop) if isinstance(code.loop, ast.For) else set()
    for name in sorted(code.inputs & code.changed - given):
        value = place.local.get(name, place.global_.get(name)) if "." not in name else _or_none(place, name)
        if _holds_a_graph(value):
            return (
                f"its loss reads {name}, which the step before has left (a hidden state that is carried on), and a study begins each "
                "batch anew"
            )
    return None


def _frozen(code: LossCode, place: Place, bound: _Bound, seen: Seen) -> str | None:
    """Return what a loss reads that is another in every batch and does not come from it: a study would keep it as it was in the first;
    None where there is nothing."""
    given = {name for one in bound.begin for name in _stored(one)}
    counted = {name for one in bound.begin for name in _given_a_number(one)}
    kept = [one for one in code.statements if not any(inner in bound.left_out for inner in ast.walk(one))]
    read = inputs_of([_with_batch(one, bound.in_place) for one in kept], _expression(code.loss, bound.in_place))
    changing = _changing(seen)
    for name in sorted(read):
        root = name.split(".")[0]
        value = _or_none(place, name)
        is_plain = isinstance(value, int | float | str | Tensor) or _is_of_numbers(value)
        if is_plain and (name in counted or (root not in given and (name in changing or root in changing))):
            return (
                f"its loss reads {name}, which is another in later batches and does not come from the batch, and a study would keep it as it was in "
                "the first; take it out of the loss, or from a DataLoader, or write the loss as package.module:callable (docs/own_model.md)"
            )
    if (twin := _twin(read, place, seen)) is not None:
        return (
            f"its loss reads {twin}, a module of the same shape as the one that is trained, as an average of its weights or a teacher is: a study "
            "would keep it as it was"
        )
    return None


def _given_a_number(statement: ast.stmt) -> set[str]:
    """Return the names that a loop's counter has: of `i, batch = (0, __batch__)`, i."""
    if not isinstance(statement, ast.Assign) or not isinstance(statement.value, ast.Tuple):
        return set()
    pairs = zip(getattr(statement.targets[0], "elts", ()), statement.value.elts, strict=False)
    return {one.id for one, value in pairs if isinstance(one, ast.Name) and isinstance(value, ast.Constant)}


def _changing(seen: Seen) -> set[str]:
    """Return what the loops around the loss give values to, in all functions on the way."""
    assert seen.backward is not None
    loops = [loop for place in seen.backward.places for loop in loops_around(parsed(place.file), place.position)]
    targets = {name for loop in loops if isinstance(loop, ast.For) for name in targets_of(loop)}
    return targets | {name for loop in loops for name in assigned_in(loop)}


def _twin(names: Iterable[str], place: Place, seen: Seen) -> str | None:
    shapes = [[p.shape for p in some] for some in seen.parameters.values()]
    own = {id(part) for parts in seen.parts.values() for part in parts}
    for name in sorted(names):
        value = _or_none(place, name)
        if (
            isinstance(value, nn.Module)
            and id(unwrapped(value)) not in own
            and [p.shape for p in value.parameters()] in shapes
        ):
            return name
    return None


def _or_none(place: Place, name: str) -> Any:
    try:
        return place.value(name)
    except LookupError:
        return None


def _holds_a_graph(value: Any) -> bool:
    if isinstance(value, Tensor):
        return value.grad_fn is not None
    return isinstance(value, list | tuple) and any(map(_holds_a_graph, value))


# From where a batch is


def _bindings(code: LossCode, place: Place, seen: Seen) -> Iterator[_Bound]:
    yield from _by_the_loop(code, place, seen)
    yield from _by_next(code, place, seen)
    yield from _by_value(code, place, seen)
    yield from _by_call(code, place, seen)
    yield from _by_call_within(code, place, seen)
    yield from _by_tensors(code, place)


def _by_the_loop(code: LossCode, place: Place, seen: Seen) -> Iterator[_Bound]:
    """`for x, y in loader`: the loop's own names, with what goes around the loader."""
    assert seen.backward is not None
    if not isinstance(code.loop, ast.For) or not _roots(code.inputs) & targets_of(code.loop):
        return
    for fetched in seen.backward.fetched:
        values = [_item(code.loop.iter, place, fetched.loader)]
        is_pair = isinstance(code.loop.target, ast.Tuple) and len(code.loop.target.elts) == 2
        if is_pair and isinstance(code.loop.iter, ast.Name):  # made before: `batches = tqdm(enumerate(loader))`
            values.append(ast.Tuple([ast.Constant(0), ast.Name(_BATCH, ast.Load())], ast.Load()))
        for value in values:
            assign = ast.Assign([code.loop.target], value)
            yield _Bound((assign,), (), FromLoader(fetched.loader), fetched.batch, fetched.random)


def _item(over: ast.expr, place: Place, loader: DataLoader[Any]) -> ast.expr:
    """Return what a loop over this is given for a batch: with enumerate a number, too, with zip the batch at its place."""
    if isinstance(over, ast.Call) and isinstance(over.func, ast.Name) and over.args:
        if over.func.id == "enumerate":
            return ast.Tuple([ast.Constant(0), _item(over.args[0], place, loader)], ast.Load())
        if over.func.id == "zip":
            parts = [
                _item(one, place, loader) if _is_loader(one, place, loader) else ast.Constant(0) for one in over.args
            ]
            return ast.Tuple(parts, ast.Load())
        return (
            _item(over.args[0], place, loader) if isinstance(over.args[0], ast.Call) else ast.Name(_BATCH, ast.Load())
        )
    return ast.Name(_BATCH, ast.Load())


def _is_loader(node: ast.expr, place: Place, loader: DataLoader[Any]) -> bool:
    name = ast.unparse(node)
    return all(part.isidentifier() for part in name.split(".")) and _or_none(place, name) is loader


def _by_next(code: LossCode, place: Place, seen: Seen) -> Iterator[_Bound]:
    """`x, y = next(batches)`: the names of an assignment, in the loop or before its end, of which the batch is the value."""
    assert seen.backward is not None
    for fetched in seen.backward.fetched:
        for one in _calls(code):
            if same_numbers(_now(one.targets[0], place), fetched.batch) or ast.unparse(one.value).startswith("next("):
                assign = ast.Assign(one.targets, ast.Name(_BATCH, ast.Load()))
                yield _Bound((assign,), (one,), FromLoader(fetched.loader), fetched.batch, fetched.random)


def _calls(code: LossCode) -> list[ast.Assign]:
    """Return the assignments of a call's value to names that the loss reads, which it makes itself first."""
    wanted = _roots(code.inputs) | {name for one in code.statements for name in _stored(one)}
    found = [one for one in code.assignments if isinstance(one.value, ast.Call) and _stored(one) & wanted]
    return sorted(found, key=lambda one: one not in code.statements)


def _stored(statement: ast.stmt) -> set[str]:
    if not isinstance(statement, ast.Assign):
        return set()
    names = (one for target in statement.targets for one in ast.walk(target))
    return {one.id for one in names if isinstance(one, ast.Name)}


def _now(target: ast.expr, place: Place) -> Any:
    if isinstance(target, ast.Tuple | ast.List):
        return [_now(one, place) for one in target.elts]
    return _or_none(place, ast.unparse(target))


def _by_value(code: LossCode, place: Place, seen: Seen) -> Iterator[_Bound]:
    """Names that stand for the batch or its parts, as a function's arguments do."""
    assert seen.backward is not None
    made = {name for one in code.statements for name in _stored(one)}
    for fetched in seen.backward.fetched:
        parts = dict(_parts(fetched.batch))
        begin = list[ast.stmt]()
        for name in sorted(_roots(code.inputs)):
            value = _or_none(place, name)
            path = next((path for path, part in parts.items() if name not in made and same_numbers(part, value)), None)
            if path is not None and _is_of_numbers(value):
                begin.append(ast.parse(f"{name} = {_BATCH}{path}").body[0])
        if begin:
            yield _Bound(tuple(begin), (), FromLoader(fetched.loader), fetched.batch, fetched.random)


def _parts(batch: Any) -> Iterator[tuple[str, Any]]:
    """Yield the batch and what it holds, by the text that leads there."""
    yield "", batch
    if isinstance(batch, Mapping):
        yield from ((f"[{key!r}]", value) for key, value in batch.items())
    elif isinstance(batch, list | tuple):
        yield from ((f"[{number}]", value) for number, value in enumerate(batch))


def _is_of_numbers(value: Any) -> bool:
    inner = value.values() if isinstance(value, Mapping) else value if isinstance(value, list | tuple) else ()
    return isinstance(value, Tensor) or any(map(_is_of_numbers, inner))


def _by_call(code: LossCode, place: Place, seen: Seen) -> Iterator[_Bound]:
    """`x, y = get_batch("train")`: the call, made again for each batch. The batch that was trained on is what the module was called
    with, or what the names still stand for."""
    if (seen.backward is not None and seen.backward.fetched) or code.loop is None:
        return
    for one in (one for one in _calls(code) if any(one is inner for inner in ast.walk(code.loop))):
        assert isinstance(one.value, ast.Call)
        now = _now(one.targets[0], place)
        if not _is_of_numbers(now) or _holds_a_graph(now):
            continue
        trained_on = _as_called(one.targets[0], code, place, seen)
        assign = ast.Assign(one.targets, ast.Name(_BATCH, ast.Load()))
        source = call_source(one.value, {**place.global_, **place.local})
        yield _Bound((assign,), (one,), source, now if trained_on is None else trained_on)


def _by_call_within(code: LossCode, place: Place, seen: Seen) -> Iterator[_Bound]:
    """`model(*get_batch(data))` and `model(next(batches))`: a call whose value the module is called with."""
    assert seen.backward is not None
    for call in _of_modules(code, place, seen):
        assert seen.called_with is not None
        for number, argument in enumerate(call.args):
            value = argument.value if isinstance(argument, ast.Starred) else argument
            if not isinstance(value, ast.Call):
                continue
            batch = seen.called_with[0][number:] if isinstance(argument, ast.Starred) else seen.called_with[0][number]
            for fetched in seen.backward.fetched:
                yield _Bound((), (), FromLoader(fetched.loader), fetched.batch, fetched.random, value)
            if not seen.backward.fetched and _is_of_numbers(batch):
                source = call_source(value, {**place.global_, **place.local})
                yield _Bound((), (), source, batch, in_place=value)


def _of_modules(code: LossCode, place: Place, seen: Seen) -> list[ast.Call]:
    """Return the calls of what is trained, where it was called with something."""
    calls = [one for part in (*code.statements, code.loss) for one in ast.walk(part) if isinstance(one, ast.Call)]
    modules = [id(one) for one in seen.modules.values()]
    return [one for one in calls if seen.called_with and id(_or_none(place, ast.unparse(one.func))) in modules]


def _as_called(target: ast.expr, code: LossCode, place: Place, seen: Seen) -> Any:
    """Return the values of the names as the module was first called with them; None where it was not called with all of them."""
    for call in _of_modules(code, place, seen):
        assert seen.called_with is not None
        args, kwargs = seen.called_with
        told = dict(zip(map(ast.unparse, call.args), args, strict=False))
        told |= {ast.unparse(word.value): kwargs[word.arg] for word in call.keywords if word.arg and word.arg in kwargs}
        names = [ast.unparse(one) for one in (target.elts if isinstance(target, ast.Tuple) else [target])]
        if all(name in told for name in names):
            values = [told[name] for name in names]
            return values if isinstance(target, ast.Tuple) else values[0]
    return None


def _by_tensors(code: LossCode, place: Place) -> Iterator[_Bound]:
    """The same tensors in every step: their rows are the samples."""
    values = {name: _or_none(place, name) for name in sorted(_roots(code.inputs) - code.changed)}
    tensors = {
        name: value
        for name, value in values.items()
        if isinstance(value, Tensor) and value.ndim and not value.requires_grad
    }
    sizes = {len(value) for value in tensors.values()}
    if tensors and len(sizes) == 1 and min(sizes) > 1:
        names = ast.Tuple([ast.Name(name, ast.Store()) for name in tensors], ast.Store())
        assign = ast.Assign([names], ast.Name(_BATCH, ast.Load()))
        yield _Bound((assign,), (), FromTensors(tuple(tensors.values()), tuple(tensors)), list(tensors.values()))


def _roots(names: frozenset[str]) -> set[str]:
    return {name.split(".")[0] for name in names}


# The function, and whether it is right


@dataclass(frozen=True)
class _Made:
    text: str
    call: Callable[[Any], Tensor]


def _function(code: LossCode, place: Place, bound: _Bound) -> _Made:
    """Return the statements as a function of the batch; the other names stand for what they stood for."""
    # Whole, with what is around them: `try: batch = next(batches)`.
    kept = [one for one in code.statements if not any(inner in bound.left_out for inner in ast.walk(one))]
    roots = _roots(code.inputs)
    known = {name: place.local[name] for name in roots if name in place.local}
    stored = {name for one in (*bound.begin, *kept) for node in ast.walk(one) for name in _names_stored(node)}
    given = {name for one in bound.begin for name in _stored(one)}
    again = [
        ast.parse(f"{name} = {_LATER}{name}").body[0] for name in sorted((roots & stored) - given) if name in known
    ]
    body = [*again, *bound.begin, *(_with_batch(one, bound.in_place) for one in (*kept, ast.Return(code.loss)))]
    arguments = ast.arguments([], [ast.arg(_BATCH)], None, [], [], None, [])
    function = ast.FunctionDef("loss_of_batch", arguments, copy.deepcopy(body), [], None)
    module = ast.fix_missing_locations(ast.Module([function], []))
    made = ModuleType(LOSS_MODULE)  # a module, as torch.compile looks for the globals of a function in one
    sys.modules[LOSS_MODULE] = made
    made.__dict__.update(place.global_ | known | {f"{_LATER}{name}": value for name, value in known.items()})
    made.__dict__["__name__"] = LOSS_MODULE
    exec(
        compile(module, f"<the loss of {place.file}>", "exec", dont_inherit=True), made.__dict__
    )  # the script's own statements
    return _Made(ast.unparse(function), made.__dict__["loss_of_batch"])


class _InPlace(ast.NodeTransformer):
    """Puts the batch in the place of a call; all else is copied."""

    def __init__(self, call: ast.Call) -> None:
        self.call = call

    def generic_visit(self, node: ast.AST) -> ast.AST:
        if node is self.call:
            return ast.Name(_BATCH, ast.Load())
        fields = {
            name: [self.visit(one) if isinstance(one, ast.AST) else one for one in value]
            if isinstance(value, list)
            else self.visit(value)
            if isinstance(value, ast.AST)
            else value
            for name, value in ast.iter_fields(node)
        }
        return type(node)(**fields)


def _with_batch(statement: ast.stmt, call: ast.Call | None) -> ast.stmt:
    return statement if call is None else _InPlace(call).visit(statement)


def _expression(loss: ast.expr, call: ast.Call | None) -> ast.expr:
    return loss if call is None else _InPlace(call).visit(loss)


def _names_stored(node: ast.AST) -> Iterator[str]:
    if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
        yield node.id


def _replayed(made: _Made, bound: _Bound, seen: Seen) -> float | str:
    """Return by what the loss of the first batch was multiplied before backward, where a replay gives what was seen; else in what it
    differs."""
    assert seen.backward is not None
    told = list[str]()
    for random in (state for state in (bound.random, seen.backward.random) if state is not None):
        copies, outer = Copies(seen), RandomState.now()
        try:
            copies.put_in_use(seen)
            with torch.enable_grad():
                random.put_back()
                loss = made.call(bound.seen)
                loss.backward()
        except Exception as error:  # of the script's code, under other names than its own
            told.append(f"its statements raised {type(error).__name__}: {error}")
            continue
        finally:
            give_back(seen, copies.number)
            outer.put_back()
        reasons = {factor: _far(loss, copies.modules, seen, factor) for factor in _factors(seen)}
        if (factor := next((one for one, reason in reasons.items() if reason is None), None)) is not None:
            return factor
        told.append(next(filter(None, reasons.values())))
    return told[0]


def _factors(seen: Seen) -> list[float]:
    """Return by what the statements' loss may have been multiplied before backward: a GradScaler's factor, and one divided by the number of
    micro-batches, as accelerate does."""
    assert seen.backward is not None
    scaled_by, count = seen.backward.scaled_by, max(1, seen.steps[0].num_backwards if seen.steps else 1)
    return [scaled_by, *([scaled_by / count] if count > 1 else [])]


def _far(loss: Tensor, copies: Mapping[int, nn.Module], seen: Seen, scale: float) -> str | None:
    assert seen.backward is not None
    ours, theirs = float(loss.detach()) * scale, seen.backward.value
    if not math.isclose(ours, theirs, rel_tol=SAME, abs_tol=SAME * 1e-3):
        return f"replayed, its statements give the loss {ours:.6g}, and {theirs:.6g} was seen"
    pairs = [pair for key, own in seen.parameters.items() for pair in zip(own, copies[key].parameters(), strict=True)]
    off = far = 0.0
    for own, again in pairs:
        wanted = seen.backward.gradients.get(id(own))
        had = again.grad * scale if again.grad is not None else None
        zero = torch.zeros((), device=own.device)
        off += float(((zero if had is None else had) - (zero if wanted is None else wanted)).double().square().sum())
        far += float((zero if wanted is None else wanted).double().square().sum())
    if math.sqrt(off) > SAME * math.sqrt(far) * 10:
        return f"replayed, its statements give a gradient that is off by {math.sqrt(off / far) if far else math.inf:.2g} of the one that was seen"
    return None


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
