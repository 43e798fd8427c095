"""How a batch gets its names in a script's statements: by a loop over a DataLoader, a call, or rows of tensors."""

from __future__ import annotations

import ast
import copy
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from batchscout.trainers.sources.watch.batches import (
    FromLoader,
    FromRows,
    Source,
    alike,
    call_source,
    is_table,
    iterable_source,
    names_apart,
    num_rows,
    rows_of,
    same_numbers,
)
from batchscout.trainers.sources.watch.handed import handed_on, is_of_numbers
from batchscout.trainers.sources.watch.observer import Place, RandomState, Seen, value_of
from batchscout.trainers.sources.watch.statements import LossCode, assigned_in, is_over_words, targets_of, walk_own

BATCH = "__batch__"
"""The argument of a loss of a batch."""
WITH_BATCHES = "with_batches"
"""What the function of that name below is called in a loss of a batch."""


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
    in_place: Mapping[ast.expr, ast.expr] = field(default_factory=dict)
    """Parts of the statements that are the batch or of it, and what stands there."""

    @property
    def names(self) -> set[str]:
        return {name for one in self.begin for name in names_set(one)}


def bindings(code: LossCode, place: Place, seen: Seen) -> Iterator[Bound]:
    yield from _by_the_loop(code, place, seen)
    yield from _by_next(code, place, seen)
    yield from _by_value(code, place, seen)
    yield from _by_rows(code, place, seen)
    yield from _by_iterable(code, place, seen)
    yield from _by_call(code, place, seen)
    yield from _by_call_within(code, place, seen)
    yield from _by_tensors(code, place, seen)


def _by_the_loop(code: LossCode, place: Place, seen: Seen) -> Iterator[Bound]:
    """`for x, y in loader`: the loop's own names, with what goes around the loader."""
    if not isinstance(code.loop, ast.For) or not roots_of(code.inputs) & targets_of(code.loop):
        return
    for fetched in seen.backward.fetched:
        values = [_item(code.loop.iter, place, fetched.loader, _batch())]
        is_pair = isinstance(code.loop.target, ast.Tuple) and len(code.loop.target.elts) == 2
        if is_pair and isinstance(code.loop.iter, ast.Name):  # made before: `batches = tqdm(enumerate(loader))`
            values.append(ast.Tuple([ast.Constant(0), _batch()], ast.Load()))
        if (changed := _changed_batch(code.loop.iter, place, fetched.loader)) is not None:
            values.append(_item(code.loop.iter, place, fetched.loader, changed))
        for value in values:
            assign = ast.Assign([code.loop.target], value)
            yield Bound((assign,), (), FromLoader(fetched.loader), fetched.batch, fetched.random)


def _item(over: ast.expr, place: Place, loader: DataLoader[Any], batch: ast.expr) -> ast.expr:
    """Return what a loop over this is given for a batch: with enumerate a number, too, with zip the batch at its place."""
    if isinstance(over, ast.Call) and isinstance(over.func, ast.Name) and over.args:
        if over.func.id == "enumerate":
            return ast.Tuple([ast.Constant(0), _item(over.args[0], place, loader, batch)], ast.Load())
        if over.func.id == "zip":
            parts = [
                _item(one, place, loader, batch) if _is_loader(one, place, loader) else ast.Constant(0)
                for one in over.args
            ]
            return ast.Tuple(parts, ast.Load())
        return _item(over.args[0], place, loader, batch) if isinstance(over.args[0], ast.Call) else batch
    return batch


def _changed_batch(over: ast.expr, place: Place, loader: DataLoader[Any]) -> ast.expr | None:
    """Return what makes a batch of the loader what a loop over an object around it is given, which moves or normalizes each; None of a
    loop over the loader itself."""
    while isinstance(over, ast.Call) and over.args:
        over = over.args[0]
    around = place.get(ast.unparse(over))
    names = [name for name, value in getattr(around, "__dict__", {}).items() if value is loader]
    if len(names) != 1 or not hasattr(type(around), "__iter__"):
        return None
    text = f"next(iter({WITH_BATCHES}({ast.unparse(over)}, {names[0]!r}, [{BATCH}])))"
    return ast.parse(text, mode="eval").body


def with_batches(around: Any, name: str, batches: list[Any]) -> Any:
    """Return a copy of an object around a loader that goes through these batches instead. name: its attribute that is the loader."""
    again = copy.copy(around)
    vars(again)[name] = batches
    return again


def _is_loader(node: ast.expr, place: Place, loader: DataLoader[Any]) -> bool:
    name = ast.unparse(node)
    return all(part.isidentifier() for part in name.split(".")) and place.get(name) is loader


def _by_next(code: LossCode, place: Place, seen: Seen) -> Iterator[Bound]:
    """`x, y = next(batches)`: the names of an assignment, in the loop or before its end, of which the batch is the value."""
    for fetched in seen.backward.fetched:
        for one in _calls(code):
            if same_numbers(_now(one.targets[0], place), fetched.batch) or ast.unparse(one.value).startswith("next("):
                assign = ast.Assign(one.targets, _batch())
                yield Bound((assign,), (one,), FromLoader(fetched.loader), fetched.batch, fetched.random)


def _calls(code: LossCode) -> list[ast.Assign]:
    """Return the assignments of a call's value to names that the loss reads, which it makes itself first: within `try`, too."""
    made = (one for statement in code.statements for one in (statement, *walk_own(statement)))
    wanted = roots_of(code.inputs).union(*(names_set(one) for one in made if isinstance(one, ast.stmt)))
    found = [one for one in code.assignments if isinstance(one.value, ast.Call) and names_set(one) & wanted]
    return sorted(found, key=lambda one: one not in code.statements)


def names_set(statement: ast.stmt) -> set[str]:
    if not isinstance(statement, ast.Assign):
        return set()
    return {name for target in statement.targets for name in _names_in(target)}


def _names_in(node: ast.AST) -> set[str]:
    return {one.id for one in ast.walk(node) if isinstance(one, ast.Name)}


def _now(target: ast.expr, place: Place) -> Any:
    if isinstance(target, ast.Tuple | ast.List):
        return [_now(one, place) for one in target.elts]
    return place.get(ast.unparse(target))


def _by_value(code: LossCode, place: Place, seen: Seen) -> Iterator[Bound]:
    """Names that stand for the batch or its parts, as a function's arguments do."""
    made = {name for one in code.statements for name in names_set(one)}
    for fetched in seen.backward.fetched:
        parts = dict(_parts(fetched.batch))
        begin = list[ast.stmt]()
        for name in sorted(roots_of(code.inputs)):
            value = place.get(name)
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


def _by_call(code: LossCode, place: Place, seen: Seen) -> Iterator[Bound]:
    """`x, y = get_batch("train")`: the call, made again for each batch. The batch that was trained on is what the module was called
    with, or what the names still stand for."""
    if seen.backward.fetched or code.loop is None:
        return
    for one in (one for one in _calls(code) if any(one is inner for inner in ast.walk(code.loop))):
        assert isinstance(one.value, ast.Call)
        now = _now(one.targets[0], place)
        if num_rows(now) is None or holds_a_graph(now):
            continue
        if _reads_what_changes(one.value, place, seen) or _prefers_some(one.value, code):
            continue
        trained_on = _as_called(one.targets[0], code, place, seen)
        assign = ast.Assign(one.targets, _batch())
        source = call_source(one.value, place.names)
        yield Bound((assign,), (one,), source, now if trained_on is None else trained_on)


def without_rows(code: LossCode, place: Place, seen: Seen) -> str | None:
    """Return why the batches of a call are none of samples: their tensors have not as many rows; None where there is no such call."""
    for one in _calls(code):
        assert isinstance(one.value, ast.Call)
        now = _now(one.targets[0], place)
        tensors = now if isinstance(now, list) and all(isinstance(part, Tensor) and part.ndim for part in now) else []
        sizes = [str(len(part)) for part in tensors]
        is_of_others = holds_a_graph(now) or _reads_what_changes(one.value, place, seen)
        if len(set(sizes)) > 1 and not is_of_others and code.loop is not None:
            return (
                f"its batches come from {ast.unparse(one.value)}, whose tensors have {' and '.join(sizes)} rows, and a study takes their rows "
                "as the samples: return tensors with the samples in their first dimension, and make what is the same for all samples, as times "
                "are, outside of the call"
            )
    return None


def _reads_what_changes(call: ast.Call, place: Place, seen: Seen) -> bool:
    """True if a call made again would read what a loop has set since: it would return the same batch for ever."""
    names = _names_in(call) & changing_at(place, seen)
    return any(isinstance(place.get(name), int | float | str | list | Tensor | np.ndarray) for name in names)


def _by_iterable(code: LossCode, place: Place, seen: Seen) -> Iterator[Bound]:
    """`for x, y in batches`, of no DataLoader: whatever a loop goes through, again and again."""
    if seen.backward.fetched or not isinstance(code.loop, ast.For):
        return
    over, target = code.loop.iter, code.loop.target
    while isinstance(over, ast.Call) and over.args and ast.unparse(over.func).rpartition(".")[2] in _GOES_THROUGH:
        if ast.unparse(over.func) == "enumerate" and isinstance(target, ast.Tuple):
            target = target.elts[1]
        over = over.args[0]
    batch = _now(target, place)
    if (
        num_rows(batch) is None
        or isinstance(place.get(ast.unparse(over)), Dataset)
        or not _names_in(target) & roots_of(code.inputs)
    ):
        return
    yield Bound((ast.Assign([target], _batch()),), (), iterable_source(over, place.names), batch)


_GOES_THROUGH = ("enumerate", "tqdm", "track", "progress_bar")


def _by_call_within(code: LossCode, place: Place, seen: Seen) -> Iterator[Bound]:
    """`model(*get_batch(data))` and `model(next(batches))`: a call whose value the module is called with."""
    for call in _of_modules(code, place, seen):
        assert seen.called_with is not None
        for number, argument in enumerate(call.args):
            value = argument.value if isinstance(argument, ast.Starred) else argument
            if not isinstance(value, ast.Call):
                continue
            batch = seen.called_with[0][number:] if isinstance(argument, ast.Starred) else seen.called_with[0][number]
            for fetched in seen.backward.fetched:
                yield Bound((), (), FromLoader(fetched.loader), fetched.batch, fetched.random, {value: _batch()})
            if not seen.backward.fetched and num_rows(batch) is not None:
                yield Bound((), (), call_source(value, place.names), batch, in_place={value: _batch()})


def _of_modules(code: LossCode, place: Place, seen: Seen) -> list[ast.Call]:
    """Return the calls of what is trained, where it was called with something."""
    own = walk_own(ast.Module([*code.statements, ast.Expr(code.loss)], []))  # a function in it has names of its own
    calls = [one for one in own if isinstance(one, ast.Call)]
    modules = [id(one) for one in seen.modules.values()]
    return [one for one in calls if seen.called_with and id(place.get(ast.unparse(one.func))) in modules]


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


@dataclass(frozen=True)
class _Part:
    """A part of a table that a script takes as its batch: `X[i : i + 32]`, or `X[rows, :8]`."""

    node: ast.Subscript
    name: str
    """Of the table."""
    table: Any
    rows: tuple[int, ...]
    """Their places in it."""


def _by_rows(code: LossCode, place: Place, seen: Seen) -> Iterator[Bound]:
    """`X[i : i + 32], Y[i : i + 32]`: the same rows of tables that stay as they are."""
    parts = _parts_of_tables(code, place, changing(seen))
    if any(_is_changed(one.name, seen) for one in parts) or any(_prefers_some(one.node.slice, code) for one in parts):
        return
    for size in sorted({len(one.table) for one in parts}, reverse=True):
        ours = [one for one in parts if len(one.table) == size]
        if len({one.rows for one in ours}) > 1:
            continue  # the next word of a text, say: a row alone is no sample
        names = sorted({one.name for one in ours})
        tables = {one.name: one.table for one in ours}
        rows, reached = list(ours[0].rows), _reached(ours[0], code, place)
        if reached is None:
            continue
        of_run = tuple(tables[name] if len(reached) == size else rows_of(tables[name], reached) for name in names)
        source = _rows_of(of_run, names, tables, place)
        batch = tuple(rows_of(tables[name], rows) for name in names)
        yield Bound(
            (), (), source, batch, in_place={one.node: _part_of_batch(one, names.index(one.name)) for one in ours}
        )


def _parts_of_tables(code: LossCode, place: Place, changing: set[str]) -> list[_Part]:
    """Return the parts of tables that the loss is made of, but for those that only say which rows of another are taken."""
    nodes = [
        one
        for part in (*code.statements, code.loss)
        for one in ast.walk(part)
        if isinstance(one, ast.Subscript) and isinstance(one.ctx, ast.Load)
    ]
    found = [part for one in nodes if (part := _part_of_table(one, code, place, changing)) is not None]
    read = [inner for one in found for inner in ast.walk(one.node.slice)]
    names = {one.id for one in read if isinstance(one, ast.Name)}
    of_rows = {one.value for one in code.statements if isinstance(one, ast.Assign) and names_set(one) & names}
    return [one for one in found if one.node not in read and one.node not in of_rows]


def _is_changed(name: str, seen: Seen) -> bool:
    """True if a loop around gives a table other values than its own in another order: `X = X[order]`."""
    for node in (one for loop in seen.backward.all_loops for one in ast.walk(loop)):
        match node:
            case ast.Assign(targets=targets, value=value):
                given = [one for target in targets for one in getattr(target, "elts", [target])]
                values = value.elts if isinstance(value, ast.Tuple) else [value]
                tables = [ast.unparse(one.value) for one in values if isinstance(one, ast.Subscript)]
                if name in map(ast.unparse, given) and (name not in tables or len(tables) < len(values)):
                    return True
            case ast.Call(func=ast.Attribute(value=owner, attr=method)):
                if method.endswith("_") and ast.unparse(owner) == name:
                    return True
    return False


def _prefers_some(index: ast.expr, code: LossCode) -> bool:
    """True if rows are drawn with weights, as a sampler may do that a study refuses."""
    made = [index, *_made_of(index, code)]
    calls = [one for part in made for one in ast.walk(part) if isinstance(one, ast.Call)]
    return any(
        ast.unparse(one.func).rpartition(".")[2] in ("multinomial", "choices")
        or any(word.arg in ("p", "weights") for word in one.keywords)
        for one in calls
    )


def _made_of(index: ast.expr, code: LossCode) -> list[ast.expr]:
    """Return what the names of an index are given as values, and what the loop goes through."""
    names = _names_in(index)
    found = [one.value for one in code.assignments if names_set(one) & names]
    is_the_loops = isinstance(code.loop, ast.For) and targets_of(code.loop) & names
    return [*found, *([code.loop.iter] if is_the_loops and isinstance(code.loop, ast.For) else [])]


def _reached(part: _Part, code: LossCode, place: Place) -> list[int] | None:
    """Return the rows of a table that a pass comes to: those in the list that the index is a part of, or those up to where a loop ends. None
    where they cannot be told."""
    size = len(part.table)
    index = part.node.slice.elts[0] if isinstance(part.node.slice, ast.Tuple) else part.node.slice
    if isinstance(index, ast.Slice):
        loop = code.loop
        if (
            not isinstance(loop, ast.For)
            or not isinstance(loop.iter, ast.Call)
            or "range" not in ast.unparse(loop.iter.func)
        ):
            return None
        ends = [value_of(one, place) for one in loop.iter.args]
        if not ends or not all(isinstance(one, int) for one in ends):
            return None
        end = min(size, len(range(*ends)) * len(part.rows))
        return list(range(end)) if end + len(part.rows) <= size else list(range(size))
    orders = [
        value
        for one in [index, *_made_of(index, code)]
        for inner in ast.walk(one)
        if isinstance(inner, ast.Name | ast.Attribute)
        and is_table(value := place.get(ast.unparse(inner)))
        and len(value) > len(part.rows)
    ]
    for order in orders:
        rows = torch.as_tensor(order).cpu()
        if rows.ndim == 1 and not rows.is_floating_point() and set(part.rows) <= set(rows.tolist()):
            return list(range(size)) if len(rows) == size else sorted(set(rows.tolist()))
    return list(range(size))


def _part_of_table(node: ast.Subscript, code: LossCode, place: Place, changing: set[str]) -> _Part | None:
    name = ast.unparse(node.value)
    table = place.get(name)
    if not is_table(table) or name in code.changed or name.split(".")[0] in code.changed:
        return None
    which = node.slice.elts[0] if isinstance(node.slice, ast.Tuple) else node.slice
    if not _names_in(which) & changing:
        return None  # the same rows in every batch
    rows = _rows(which, place, len(table))
    return _Part(node, name, table, rows) if rows else None


def _rows(which: ast.expr, place: Place, size: int) -> tuple[int, ...]:
    """Return the rows that an index takes of a table of this size; none where it takes a single one, or cannot be told."""
    if isinstance(which, ast.Slice):
        ends = [None if one is None else value_of(one, place) for one in (which.lower, which.upper, which.step)]
        return tuple(range(*slice(*ends).indices(size))) if all(isinstance(one, int | None) for one in ends) else ()
    index = value_of(which, place)
    if isinstance(index, Tensor | np.ndarray | list):
        places = torch.as_tensor(index).cpu()
        if places.ndim == 1 and not (places.is_floating_point() or places.is_complex()):
            return tuple(torch.arange(size)[places].tolist())
    return ()


def _part_of_batch(part: _Part, number: int) -> ast.expr:
    """Return what stands for a part of a table: the rows of the batch, with what else is taken of these."""
    found: ast.expr = ast.Subscript(_batch(), ast.Constant(number), ast.Load())
    if isinstance(part.table, np.ndarray):
        found = ast.parse(f"{ast.unparse(found)}.cpu().numpy()", mode="eval").body
    if isinstance(part.node.slice, ast.Tuple):
        rest = ast.Tuple([ast.Slice(), *part.node.slice.elts[1:]], ast.Load())
        found = ast.Subscript(found, rest, ast.Load())
    return found


def _rows_of(tables: tuple[Any, ...], names: Sequence[str], by_name: Mapping[str, Any], place: Place) -> FromRows:
    """Return the rows of these tables, with those of validation data that are called alike, where there are any."""
    apart = _tables_apart(names, by_name, place)
    return FromRows(tables, tuple(names), tuple(apart.values()) if apart else None, tuple(apart))


def _tables_apart(names: Sequence[str], tables: Mapping[str, Any], place: Place) -> dict[str, Any]:
    """Return the tables of validation data that are called alike, by their names; empty where there are none."""
    for renamed in names_apart(names):
        found = [place.get(name) for name in renamed]
        if all(is_table(one) and alike(one, tables[name]) for one, name in zip(found, names, strict=True)):
            return dict(zip(renamed, found, strict=True)) if len({len(one) for one in found}) == 1 else {}
    return {}


def _by_tensors(code: LossCode, place: Place, seen: Seen) -> Iterator[Bound]:
    """The same tensors in every step: their rows are the samples."""
    values = {name: place.get(name) for name in sorted(roots_of(code.inputs) - code.changed - changing_at(place, seen))}
    tensors = {
        name: value
        for name, value in values.items()
        if isinstance(value, Tensor) and value.ndim and not value.requires_grad
    }
    if any(is_another_later(name, place, seen) for name in tensors):
        return
    sizes = {len(value) for value in tensors.values()}
    if tensors and len(sizes) == 1 and min(sizes) > 1:
        targets = ast.Tuple([ast.Name(name, ast.Store()) for name in tensors], ast.Store())
        source = _rows_of(tuple(tensors.values()), list(tensors), tensors, place)
        yield Bound((ast.Assign([targets], _batch()),), (), source, list(tensors.values()))


def of_several_loaders(code: LossCode, place: Place, seen: Seen) -> str | None:
    """Return why a loss that reads the batches of several loaders cannot be had; None where there is one, or one within another."""
    names, read = set[str]().union(*map(_names_in, (*code.statements, code.loss))), dict[int, set[str]]()
    for fetched in seen.backward.fetched:
        parts = [part for part in _all_parts(fetched.batch) if is_of_numbers(part)]
        found = {name for name in names if any(same_numbers(part, place.get(name)) for part in parts)}
        read[id(fetched.loader)] = read.get(id(fetched.loader), set()) | found
    apart = [own - other for own in read.values() for other in read.values() if own is not other]
    if len(apart) < 2 or not all(apart):
        return None
    each = " and ".join(", ".join(sorted(own)) for own in reversed(read.values()))
    return (
        f"its loss reads the batches of {len(read)} loaders ({each}), and a study trains on those of one; let one loader give all, of a data "
        "set whose samples hold one of each"
    )


def _all_parts(batch: Any) -> Iterator[Any]:
    yield batch
    for part in batch.values() if isinstance(batch, Mapping) else batch if isinstance(batch, list | tuple) else ():
        yield from _all_parts(part)


def fetches(statements: Sequence[ast.stmt], place: Place) -> str | None:
    """Return the call by which statements fetch a batch themselves; None where there is none."""
    calls = (one for statement in statements for one in ast.walk(statement) if isinstance(one, ast.Call))
    for call in (one for one in calls if ast.unparse(one.func) == "next" and one.args):
        of = (
            place.get(ast.unparse(one)) for one in ast.walk(call.args[0]) if isinstance(one, ast.Name | ast.Attribute)
        )
        if any(isinstance(one, Iterator | DataLoader) for one in of):
            return ast.unparse(call)
    return None


def _batch() -> ast.expr:
    return ast.Name(BATCH, ast.Load())


def changing(seen: Seen) -> set[str]:
    """Return what the loops around the loss give values to, in all functions on the way. A loop over words, `for phase in ["train", "val"]`, has the
    same one whenever it trains."""
    loops = seen.backward.all_loops
    targets = {loop: targets_of(loop) for loop in loops if isinstance(loop, ast.For)}
    words = set[str]().union(*(names for loop, names in targets.items() if is_over_words(loop)))
    return set[str]().union(*targets.values(), *map(assigned_in, loops)) - words


def changing_at(place: Place, seen: Seen) -> set[str]:
    """Return the same with what the loops change of the arguments of a place's function."""
    return changing(seen) | handed_on(place, seen)


def is_another_later(name: str, place: Place, seen: Seen) -> bool:
    """True if a name had another value when the place was reached last: that of a function's argument, which no loop around it names."""
    again = next((one for one in seen.places_again if (one.file, one.function) == (place.file, place.function)), None)
    if again is None:
        return False
    value, later = place.get(name), again.get(name)
    return value != later if isinstance(value, int | float | str) else not same_numbers(value, later)


def roots_of(names: frozenset[str]) -> set[str]:
    return {name.split(".")[0] for name in names}


def holds_a_graph(value: Any) -> bool:
    if isinstance(value, Tensor):
        return value.grad_fn is not None
    return isinstance(value, list | tuple) and any(map(holds_a_graph, value))
