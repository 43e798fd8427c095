"""Where a script's batches come from: a DataLoader, or a call that returns the next one, whose rows are samples."""

from __future__ import annotations

import ast
import copy
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import (
    DataLoader,
    Dataset,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    SubsetRandomSampler,
)

from batchscout.trainers.sources.held_out import held_out, of_places
from batchscout.trainers.sources.sampling import places_of, sampler_of
from batchscout.trainers.sources.settings import num_samples_of
from batchscout.trainers.sources.watch.statements import compiled

_TESTS = ("test", "te")
_VALIDATES = (
    "val",
    "vali",
    "valid",
    "validation",
    "eval",
    "evaluation",
    "dev",
    "heldout",
    "holdout",
    "va",
    "vl",
    *_TESTS,
)
"""What validation data are called, the likeliest first."""
_TRAINS = ("train", "training", "trn")
_IN_A_NAME = re.compile("train(ing)?|trn|tr(?=_|$)")
"""What training data are called, within a name."""


@dataclass(frozen=True)
class FromLoader:
    """A DataLoader yields them."""

    loader: DataLoader[Any]


@dataclass(frozen=True)
class FromCall:
    """A call in the script returns the next one, or what it goes through."""

    text: str
    """The call, as the script has it."""
    batches: Callable[[], Iterator[Any]]
    """Begins them, in no end."""
    validation: Callable[[], Iterator[Any]] | None
    """The same of the call for validation data; None where it has no word in it for that."""
    validation_text: str = ""


@dataclass(frozen=True)
class FromRows:
    """The script takes rows of these, tensors, arrays or lists of one length, itself: some, or all in each step."""

    tables: tuple[Any, ...]
    names: tuple[str, ...]
    validation: tuple[Any, ...] | None
    """Those of validation data; None where none are called alike."""
    validation_names: tuple[str, ...] = ()


Source = FromLoader | FromCall | FromRows


@dataclass(frozen=True)
class Batches:
    """Where they come from, and the first that was trained on."""

    source: Source
    first: Any


def call_source(call: ast.Call, names: Mapping[str, Any]) -> FromCall:
    """Return what calls it again and again. names: what the names in it stand for."""
    return _source(call, lambda node: _one_by_one(_evaluation(node, names)), names)


def iterable_source(over: ast.expr, names: Mapping[str, Any]) -> FromCall:
    """Return what goes through it again and again. names: what the names in it stand for."""
    return _source(over, lambda node: _round_and_round(_evaluation(node, names)), names)


def _evaluation(node: ast.expr, names: Mapping[str, Any]) -> Callable[[], Any]:
    code = compiled(node)
    return lambda: eval(code, dict(names))  # the script's own expression


def _one_by_one(next_batch: Callable[[], Any]) -> Callable[[], Iterator[Any]]:
    def batches() -> Iterator[Any]:
        while True:
            yield next_batch()

    return batches


def _round_and_round(batches_again: Callable[[], Any]) -> Callable[[], Iterator[Any]]:
    """Return what begins them, the first one again after the last."""

    def batches() -> Iterator[Any]:
        is_empty = False
        while not is_empty:
            is_empty, through = True, _apart(batches_again())
            goes_on = True
            while goes_on:
                goes_on = False
                for batch in through:
                    is_empty, goes_on = False, isinstance(through, Iterator)  # some begin again by themselves
                    yield batch

    return batches


def _apart(through: Any) -> Any:
    """Return what is gone through, and of an object that goes on where it was a copy, which others do not move."""
    return copy.copy(through) if isinstance(through, Iterator) and hasattr(through, "__dict__") else through


def _source(
    node: ast.expr, calls: Callable[[ast.expr], Callable[[], Iterator[Any]]], names: Mapping[str, Any]
) -> FromCall:
    other = _validating(node, calls, names)
    return FromCall(
        ast.unparse(node), calls(node), other and calls(other), ast.unparse(other) if other is not None else ""
    )


def _validating(
    call: ast.expr, calls: Callable[[ast.expr], Callable[[], Iterator[Any]]], names: Mapping[str, Any]
) -> ast.expr | None:
    """Return the same call with a word or a name for validation in place of the one for training: the first that gives batches of that
    kind."""
    wanted = _shapes(next(calls(call)(), None))
    for word in _VALIDATES:
        other = ast.parse(ast.unparse(call), mode="eval").body
        renamed = [_renamed(one, word, names) for one in ast.walk(other)]
        if not any(renamed) or any(_is_of_training(one, names) for one in ast.walk(other)):
            continue
        try:
            if _shapes(next(calls(other)(), None)) == wanted:
                return other
        except Exception:  # of the script: it does not know that word
            continue
    return None


def _renamed(node: ast.AST, word: str, names: Mapping[str, Any]) -> bool:
    """Say `val` where it says `train`; return whether it did."""
    if isinstance(node, ast.Constant) and node.value in _TRAINS:
        node.value = word
        return True
    if isinstance(node, ast.Name) and (other := _IN_A_NAME.sub(word, node.id)) != node.id and other in names:
        node.id = other
        return True
    return False


def _is_of_training(node: ast.AST, names: Mapping[str, Any]) -> bool:
    """True of a table of training data: its rows are not those of tables of validation data beside it."""
    return isinstance(node, ast.Name) and _IN_A_NAME.search(node.id) is not None and is_table(names.get(node.id))


def _shapes(batch: Any) -> Any:
    if isinstance(batch, Tensor):
        return (batch.dtype, tuple(batch.shape[1:]))
    if isinstance(batch, Mapping):
        return {name: _shapes(part) for name, part in batch.items()}
    return tuple(map(_shapes, batch)) if isinstance(batch, list | tuple) else type(batch)


class Rows(IterableDataset[Any]):
    """The rows of batches, one sample after the other."""

    num_ready = 0
    """The samples that come next without anything being read or drawn: the rest of a batch."""

    def __init__(self, batches: Callable[[], Iterator[Any]]) -> None:
        self.batches = batches

    def __iter__(self) -> Iterator[Any]:
        for batch in self.batches():
            self.num_ready = num_rows(batch) or 0
            for row in _rows_in(batch):
                self.num_ready -= 1
                yield row


def num_rows(batch: Any) -> int | None:
    """Return how many rows all tensors in a batch have; None where they have not as many, or something else is in it."""
    if isinstance(batch, Tensor):
        return len(batch) if batch.ndim else None
    if not isinstance(batch, Mapping | list | tuple):
        return None
    numbers = set(map(num_rows, batch.values() if isinstance(batch, Mapping) else batch))
    return numbers.pop() if len(numbers) == 1 else None


def _rows_in(batch: Any) -> Iterator[Any]:
    if isinstance(batch, Mapping):
        return (dict(zip(batch, row, strict=True)) for row in zip(*map(_rows_in, batch.values()), strict=True))
    return iter(batch.cpu()) if isinstance(batch, Tensor) else zip(*map(_rows_in, batch), strict=True)


def loaders_of(source: Source, validation: DataLoader[Any] | None) -> tuple[Any, Any]:
    """Return what a study trains on and what it evaluates on. validation: the script's own loader for that, if it was seen."""
    match source:
        case FromLoader(loader):
            train = _each_once(loader)
            return (train, _each_once(validation)) if validation is not None else held_out(train)
        case FromCall():
            return Rows(source.batches), Rows(source.validation or source.batches)
        case FromRows(tables, _, apart):
            train = _loader_of_rows(tables)
            return (train, _loader_of_rows(apart)) if apart is not None else held_out(train)


def is_table(value: Any) -> bool:
    """True of what a script may take rows of: a tensor or array of numbers, or a list of what a sample may be."""
    if isinstance(value, Tensor):
        return value.ndim > 0 and len(value) > 1 and not value.requires_grad
    if isinstance(value, np.ndarray):
        return value.ndim > 0 and len(value) > 1 and value.dtype.kind in "biuf"
    return type(value) is list and len(value) > 1 and isinstance(value[0], _SAMPLES)


_SAMPLES = (str, int, float, list, tuple, dict, Tensor, np.ndarray)


def alike(one: Any, other: Any) -> bool:
    """True if rows of both are of one kind."""
    if isinstance(one, Tensor | np.ndarray) and type(one) is type(other):
        return one.dtype == other.dtype and one.shape[1:] == other.shape[1:]
    return type(one) is type(other)


def names_apart(names: Sequence[str]) -> Iterator[list[str]]:
    """Yield what tables of validation data may be called, beside those of training data, the likeliest first."""
    for word in _VALIDATES:
        in_its_place = [_IN_A_NAME.sub(word, one) for one in names]
        before = [re.sub(r"(\w+)$", rf"{word}_\1", one) for one in names]
        yield from (one for one in (in_its_place, [f"{one}_{word}" for one in names], before) if one != list(names))


def rows_of(table: Any, rows: list[int]) -> Any:
    """Return these rows, as a batch holds them: of numbers a tensor."""
    if isinstance(table, list):
        return [table[one] for one in rows]
    return (table if isinstance(table, Tensor) else torch.from_numpy(table))[rows]


class _Table(Dataset[Any]):
    """Tables of one length, whose rows are the samples."""

    def __init__(self, tables: tuple[Any, ...]) -> None:
        self.tables = [torch.from_numpy(one) if isinstance(one, np.ndarray) else one for one in tables]

    def __len__(self) -> int:
        return len(self.tables[0])

    def __getitem__(self, place: int) -> tuple[Any, ...]:
        rows = (one[place] for one in self.tables)
        return tuple(row.cpu() if isinstance(row, Tensor) else row for row in rows)


def _loader_of_rows(tables: tuple[Any, ...]) -> DataLoader[Any]:
    def collate(samples: Sequence[tuple[Any, ...]]) -> tuple[Any, ...]:
        columns = zip(tables, zip(*samples, strict=True), strict=True)
        return tuple(list(column) if isinstance(table, list) else torch.stack(column) for table, column in columns)

    return DataLoader(_Table(tables), collate_fn=collate)


def num_samples_in_source(source: Source) -> int | None:
    """Return the samples of a pass over the data; None where there is no such thing."""
    match source:
        case FromLoader(loader):
            return num_samples_in_pass(loader)
        case FromRows(tables):
            return len(tables[0])
        case FromCall():
            return None


def draws_at_will(loader: DataLoader[Any]) -> bool:
    """True if it draws samples alike, but some of them several times in a pass, or not at all."""
    sampler = sampler_of(loader)
    return isinstance(sampler, RandomSampler) and (
        sampler.replacement or sampler.num_samples != len(sampler.data_source)
    )


def num_samples_in_pass(loader: DataLoader[Any]) -> int | None:
    """Return how many samples a loader goes through in a pass; None of a stream."""
    sampler = sampler_of(loader)
    return len(sampler) if isinstance(sampler, SubsetRandomSampler | RandomSampler) else num_samples_of(loader.dataset)


def _each_once(loader: DataLoader[Any]) -> DataLoader[Any]:
    """Return a loader that takes each of its samples once, and those of no other part of its set; what it does otherwise is for others
    to refuse."""
    is_otherwise = draws_at_will(loader) or isinstance(sampler_of(loader), SubsetRandomSampler)
    return of_places(loader, _places(loader)) if is_otherwise else loader


def _places(loader: DataLoader[Any]) -> Sequence[int]:
    return range(num_samples_of(loader.dataset) or 0) if draws_at_will(loader) else places_of(loader)


def with_plain_batches(loader: DataLoader[Any]) -> DataLoader[Any]:
    """Return the loader with batches that are dictionaries of Python's own."""
    collate = loader.collate_fn
    plain = of_places(loader, _places(loader))
    plain.collate_fn = lambda samples: dict(collate(samples))
    return plain


def validation_loader(
    train: DataLoader[Any], made: list[DataLoader[Any]], named: Mapping[str, Any]
) -> DataLoader[Any] | None:
    """Return the script's loader of validation data: by its name, or as the only other one that has no name and is not shuffled.

    made: the loaders that the script made. named: what the names around its loop stand for.
    """
    others = [one for one in made if one is not train and (one.dataset is not train.dataset or _is_apart(one, train))]
    by_name = {
        word: within(value)
        for name, value in named.items()
        for word in _VALIDATES
        if word in _words(name) and not {*_TRAINS} & _words(name) and any(within(value) is one for one in others)
    }
    has_a_name = {id(within(value)) for value in named.values()}
    in_order = [by_name[word] for word in _VALIDATES if word in by_name]
    nameless = [one for one in others if id(one) not in has_a_name]
    plain = [one for one in nameless if isinstance(sampler_of(one), SequentialSampler) or one.dataset is train.dataset]
    return next(iter([*in_order, *(plain if len(plain) == 1 else [])]), None)


def is_for_tests(name: str) -> bool:
    """Return whether the name is that of test data alone. A setting chosen on them looks better there than it is."""
    return bool({*_TESTS} & _words(name)) and not {*_VALIDATES} - {*_TESTS} & _words(name)


def _words(name: str) -> set[str]:
    """Return the words of a name: of `valLoader2` and `valloader` val and loader."""
    words = [one.lower() for one in re.findall(r"[A-Z]?[a-z]+|[A-Z]+", name)]
    return {part for one in words for part in _JOINED.sub(r"\1 \2", one).split()}


_JOINED = re.compile(f"^({'|'.join((*_TRAINS, *_VALIDATES))})((?:data)?(?:loader|set|iter)|data|dl)$")


def _is_apart(one: DataLoader[Any], other: DataLoader[Any]) -> bool:
    """True if both go through some samples of one set, and none through a sample of the other."""
    both = isinstance(sampler_of(one), SubsetRandomSampler) and isinstance(sampler_of(other), SubsetRandomSampler)
    return both and not {*places_of(one)} & {*places_of(other)}


def within(loader: Any) -> Any:
    """Return the loader in what is around it: accelerate's, or an object of the script's that goes through it."""
    if type(loader).__module__.partition(".")[0] == "accelerate":
        return getattr(loader, "base_dataloader", loader)
    # isinstance would ask an object for its class, and some of torch's warn then.
    if issubclass(type(loader), DataLoader) or not hasattr(type(loader), "__iter__"):
        return loader
    inner = [one for one in getattr(loader, "__dict__", {}).values() if issubclass(type(one), DataLoader)]
    return inner[0] if len(inner) == 1 else loader


def same_numbers(one: Any, other: Any) -> bool:
    """True if both hold the same numbers, on whatever device."""
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        return one.shape == other.shape and torch.equal(one.detach().cpu(), other.detach().cpu())
    if isinstance(one, Mapping) and isinstance(other, Mapping):
        return one.keys() == other.keys() and all(same_numbers(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple) and isinstance(other, list | tuple):
        return len(one) == len(other) and all(map(same_numbers, one, other))
    return one is other
