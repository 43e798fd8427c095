"""How a batch gets its names in a script's statements: by a loop over a DataLoader, a call, or rows of tensors."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from torch.utils.data import DataLoader

from batchscout.trainers.sources.watch.batches import FromLoader, FromTensors, Source, call_source, same_numbers
from batchscout.trainers.sources.watch.observer import Place, RandomState, Seen
from batchscout.trainers.sources.watch.statements import LossCode, targets_of

BATCH = "__batch__"
"""The argument of a loss of a batch."""


@dataclass(frozen=True)
class Bound:
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


def bindings(code: LossCode, place: Place, seen: Seen) -> Iterator[Bound]:
    yield from _by_the_loop(code, place, seen)
    yield from _by_next(code, place, seen)
    yield from _by_value(code, place, seen)
    yield from _by_call(code, place, seen)
    yield from _by_call_within(code, place, seen)
    yield from _by_tensors(code, place)


def _by_the_loop(code: LossCode, place: Place, seen: Seen) -> Iterator[Bound]:
    """`for x, y in loader`: the loop's own names, with what goes around the loader."""
    assert seen.backward is not None
    if not isinstance(code.loop, ast.For) or not roots_of(code.inputs) & targets_of(code.loop):
        return
    for fetched in seen.backward.fetched:
        values = [_item(code.loop.iter, place, fetched.loader)]
        is_pair = isinstance(code.loop.target, ast.Tuple) and len(code.loop.target.elts) == 2
        if is_pair and isinstance(code.loop.iter, ast.Name):  # made before: `batches = tqdm(enumerate(loader))`
            values.append(ast.Tuple([ast.Constant(0), ast.Name(BATCH, ast.Load())], ast.Load()))
        for value in values:
            assign = ast.Assign([code.loop.target], value)
            yield Bound((assign,), (), FromLoader(fetched.loader), fetched.batch, fetched.random)


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
        return _item(over.args[0], place, loader) if isinstance(over.args[0], ast.Call) else ast.Name(BATCH, ast.Load())
    return ast.Name(BATCH, ast.Load())


def _is_loader(node: ast.expr, place: Place, loader: DataLoader[Any]) -> bool:
    name = ast.unparse(node)
    return all(part.isidentifier() for part in name.split(".")) and or_none(place, name) is loader


def _by_next(code: LossCode, place: Place, seen: Seen) -> Iterator[Bound]:
    """`x, y = next(batches)`: the names of an assignment, in the loop or before its end, of which the batch is the value."""
    assert seen.backward is not None
    for fetched in seen.backward.fetched:
        for one in _calls(code):
            if same_numbers(_now(one.targets[0], place), fetched.batch) or ast.unparse(one.value).startswith("next("):
                assign = ast.Assign(one.targets, ast.Name(BATCH, ast.Load()))
                yield Bound((assign,), (one,), FromLoader(fetched.loader), fetched.batch, fetched.random)


def _calls(code: LossCode) -> list[ast.Assign]:
    """Return the assignments of a call's value to names that the loss reads, which it makes itself first."""
    wanted = roots_of(code.inputs) | {name for one in code.statements for name in names_set(one)}
    found = [one for one in code.assignments if isinstance(one.value, ast.Call) and names_set(one) & wanted]
    return sorted(found, key=lambda one: one not in code.statements)


def names_set(statement: ast.stmt) -> set[str]:
    if not isinstance(statement, ast.Assign):
        return set()
    names = (one for target in statement.targets for one in ast.walk(target))
    return {one.id for one in names if isinstance(one, ast.Name)}


def _now(target: ast.expr, place: Place) -> Any:
    if isinstance(target, ast.Tuple | ast.List):
        return [_now(one, place) for one in target.elts]
    return or_none(place, ast.unparse(target))


def _by_value(code: LossCode, place: Place, seen: Seen) -> Iterator[Bound]:
    """Names that stand for the batch or its parts, as a function's arguments do."""
    assert seen.backward is not None
    made = {name for one in code.statements for name in names_set(one)}
    for fetched in seen.backward.fetched:
        parts = dict(_parts(fetched.batch))
        begin = list[ast.stmt]()
        for name in sorted(roots_of(code.inputs)):
            value = or_none(place, name)
            path = next((path for path, part in parts.items() if name not in made and same_numbers(part, value)), None)
            if path is not None and is_of_numbers(value):
                begin.append(ast.parse(f"{name} = {BATCH}{path}").body[0])
        if begin:
            yield Bound(tuple(begin), (), FromLoader(fetched.loader), fetched.batch, fetched.random)


def _parts(batch: Any) -> Iterator[tuple[str, Any]]:
    """Yield the batch and what it holds, by the text that leads there."""
    yield "", batch
    if isinstance(batch, Mapping):
        yield from ((f"[{key!r}]", value) for key, value in batch.items())
    elif isinstance(batch, list | tuple):
        yield from ((f"[{number}]", value) for number, value in enumerate(batch))


def is_of_numbers(value: Any) -> bool:
    inner = value.values() if isinstance(value, Mapping) else value if isinstance(value, list | tuple) else ()
    return isinstance(value, Tensor) or any(map(is_of_numbers, inner))


def _by_call(code: LossCode, place: Place, seen: Seen) -> Iterator[Bound]:
    """`x, y = get_batch("train")`: the call, made again for each batch. The batch that was trained on is what the module was called
    with, or what the names still stand for."""
    if (seen.backward is not None and seen.backward.fetched) or code.loop is None:
        return
    for one in (one for one in _calls(code) if any(one is inner for inner in ast.walk(code.loop))):
        assert isinstance(one.value, ast.Call)
        now = _now(one.targets[0], place)
        if not is_of_numbers(now) or holds_a_graph(now):
            continue
        trained_on = _as_called(one.targets[0], code, place, seen)
        assign = ast.Assign(one.targets, ast.Name(BATCH, ast.Load()))
        source = call_source(one.value, {**place.global_, **place.local})
        yield Bound((assign,), (one,), source, now if trained_on is None else trained_on)


def _by_call_within(code: LossCode, place: Place, seen: Seen) -> Iterator[Bound]:
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
                yield Bound((), (), FromLoader(fetched.loader), fetched.batch, fetched.random, value)
            if not seen.backward.fetched and is_of_numbers(batch):
                source = call_source(value, {**place.global_, **place.local})
                yield Bound((), (), source, batch, in_place=value)


def _of_modules(code: LossCode, place: Place, seen: Seen) -> list[ast.Call]:
    """Return the calls of what is trained, where it was called with something."""
    calls = [one for part in (*code.statements, code.loss) for one in ast.walk(part) if isinstance(one, ast.Call)]
    modules = [id(one) for one in seen.modules.values()]
    return [one for one in calls if seen.called_with and id(or_none(place, ast.unparse(one.func))) in modules]


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


def _by_tensors(code: LossCode, place: Place) -> Iterator[Bound]:
    """The same tensors in every step: their rows are the samples."""
    values = {name: or_none(place, name) for name in sorted(roots_of(code.inputs) - code.changed)}
    tensors = {
        name: value
        for name, value in values.items()
        if isinstance(value, Tensor) and value.ndim and not value.requires_grad
    }
    sizes = {len(value) for value in tensors.values()}
    if tensors and len(sizes) == 1 and min(sizes) > 1:
        names = ast.Tuple([ast.Name(name, ast.Store()) for name in tensors], ast.Store())
        assign = ast.Assign([names], ast.Name(BATCH, ast.Load()))
        yield Bound((assign,), (), FromTensors(tuple(tensors.values()), tuple(tensors)), list(tensors.values()))


def roots_of(names: frozenset[str]) -> set[str]:
    return {name.split(".")[0] for name in names}


def or_none(place: Place, name: str) -> Any:
    try:
        return place.value(name)
    except LookupError:
        return None


def holds_a_graph(value: Any) -> bool:
    if isinstance(value, Tensor):
        return value.grad_fn is not None
    return isinstance(value, list | tuple) and any(map(holds_a_graph, value))
