"""What a value holds, as texts and bytes that are the same for the same value in another process."""

from __future__ import annotations

import functools
import hashlib
import random
from argparse import Namespace
from collections.abc import Iterable, Iterator, Mapping, Set
from dataclasses import is_dataclass
from enum import Enum
from pathlib import PurePath
from types import FunctionType, MethodType, SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from batchscout.trainers.sources.code_text import PLAIN, is_of_a_library, own_text, reached_from

Part = str | bytes
TELLS_ITSELF = (*PLAIN, range, slice, PurePath, Enum, torch.dtype, torch.device, np.generic)
"""What `repr` tells whole."""
ITEMS_LOOKED_AT = 16
"""Of a data set, spread over it: each has to be read."""
LISTED_LOOKED_AT = 10_000
"""The same of a list, which has them in memory."""
MOST_BYTES = 2**26
"""Of a tensor. Of a larger one, numbers that are spread over it are taken."""


def contents(value: Any) -> Iterator[Part]:
    """Yield what tells the value from another: of code its text and the values that it refers to, of a module its classes and
    attributes, and not its weights, of a data set its length and some of its items. Of libraries' own objects little is told."""
    yield from _Contents().of(value)


def items(samples: Any) -> Iterator[Part]:
    """Yield what tells the items of a data set from those of another: how many there are, and some of them. Raises what reading them
    does."""
    yield from _Contents().of_items(samples)


def item(samples: Any, index: int) -> Iterator[Part]:
    """Yield what tells an item of a data set from others, and leave the generators as they were. Raises what reading it does."""
    try:
        read = _read_with_the_same_random_numbers(samples, index)
    except Exception as error:
        error.add_note(f"at sample {index}")
        raise
    yield from _Contents().of(read)


def built(module: nn.Module) -> Iterator[Part]:
    """Yield what a module has been made of, whatever its code read for that (a file, the environment): its attributes, and the sizes of its
    weights. Its code is told by itself, and weights are random."""
    yield from _Contents().of_parts(module)
    for name, tensor in module.state_dict().items():
        yield f"{name} {tensor.dtype} {tuple(tensor.shape)}" if isinstance(tensor, Tensor) else name


def weights(module: nn.Module) -> Iterator[Part]:
    """Yield the weights and buffers of a module."""
    for name, tensor in module.state_dict().items():
        yield name
        yield from _of_tensor(tensor) if isinstance(tensor, Tensor) else (repr(tensor),)


def digest_of(parts: Iterable[Part]) -> str:
    digest = hashlib.sha256()
    for part in parts:
        raw = part if isinstance(part, bytes) else part.encode()
        digest.update(len(raw).to_bytes(8, "big") + raw)
    return digest.hexdigest()[:16]


class _Contents:
    """Goes through a value once: what holds itself, or is held twice, is told where it is met first."""

    def __init__(self) -> None:
        self._met: dict[int, Any] = {}
        """By their ids, which must not be given to others meanwhile."""

    def of(self, value: Any) -> Iterator[Part]:
        if isinstance(value, TELLS_ITSELF):
            yield repr(value)
            return
        yield f"{type(value).__module__}.{type(value).__name__}"  # not where it stands: what is pickled forgets that
        if id(value) not in self._met:
            self._met[id(value)] = value
            yield from self._inside(value)

    def _inside(self, value: Any) -> Iterator[Part]:
        match value:
            case Tensor():
                yield from _of_tensor(value)
            case functools.partial():
                yield from self._each([value.func, *value.args, value.keywords])
            case MethodType():
                yield from self._each([value.__func__, value.__self__])
            case type() | FunctionType():
                yield from self._of_code(value)
            case nn.Module():
                yield from self._of_code(type(value))
                yield from self.of_parts(value)
            case DataLoader():
                yield from self._each([value.dataset, value.batch_size, value.collate_fn])
            case Mapping():
                yield from self._each(part for pair in value.items() for part in pair)
            case Set():
                yield from sorted(map(repr, value))
            case _ if hasattr(value, "__array__") or hasattr(value, "__array_interface__"):  # pictures and tables, too
                yield from self._of_array(np.asarray(value))
            case list() | tuple():
                yield from self.of_items(value)
            case _ if hasattr(value, "__len__") and hasattr(value, "__getitem__"):
                if getattr(value, "content_hash", None) is None:
                    yield from self._of_code(type(value))
                try:
                    yield from self.of_items(value)
                except Exception as error:  # of the user's set: the first pass will tell where, and what to do
                    yield type(error).__name__
            case SimpleNamespace() | Namespace():
                yield from self._of_attributes(value)
            case _ if is_dataclass(value) or not is_of_a_library(type(value)):
                yield from self._of_code(type(value))
                yield from self._of_attributes(value)
            case _ if callable(getattr(value, "to_dict", None)):  # as settings of transformers have it
                yield from self.of(value.to_dict())
            case _:
                pass

    def _each(self, values: Iterable[Any]) -> Iterator[Part]:
        for value in values:
            yield from self.of(value)

    def _of_code(self, code: Any) -> Iterator[Part]:
        if is_of_a_library(code):
            yield f"{code.__module__}.{code.__qualname__}"
            return
        codes, values = reached_from(code)
        yield from map(own_text, codes)
        yield from self._each(values)

    def of_parts(self, module: nn.Module) -> Iterator[Part]:
        for name, part in module.named_modules():
            yield f"{name} {type(part).__module__}.{type(part).__name__}"
            yield from self._of_attributes(part, but=("training",))

    def _of_attributes(self, value: object, but: tuple[str, ...] = ()) -> Iterator[Part]:
        """Tell public attributes, and private ones of the user's own class that are numbers or texts: other private ones may differ between
        processes."""
        names = {*getattr(value, "__dict__", ()), *getattr(value, "__slots__", ())} - set(but)
        is_own = not is_of_a_library(type(value))
        for name in sorted(name for name in names if hasattr(value, name)):
            if not name.startswith("_") or (is_own and isinstance(getattr(value, name), PLAIN)):
                yield name
                yield from self.of(getattr(value, name))

    def _of_array(self, array: np.ndarray) -> Iterator[Part]:
        yield f"{array.dtype} {array.shape}"
        numbers = array.reshape(-1)
        numbers = numbers[:: max(1, -(-numbers.nbytes // MOST_BYTES))]
        yield from self.of_items(numbers.tolist()) if array.dtype.hasobject else (numbers.tobytes(),)

    def of_items(self, items: Any) -> Iterator[Part]:
        yield str(len(items))
        if (told := getattr(items, "content_hash", None)) is not None:
            yield str(told)
            return
        is_listed = isinstance(items, list | tuple)
        looked_at = min(LISTED_LOOKED_AT if is_listed else ITEMS_LOOKED_AT, len(items))
        read = items.__getitem__ if is_listed else functools.partial(_read_with_the_same_random_numbers, items)
        for index in (place * len(items) // looked_at for place in range(looked_at)):
            try:
                item = read(index)
            except Exception as error:
                error.add_note(f"at sample {index}")
                raise
            yield from self.of(item)


def _of_tensor(tensor: Tensor) -> Iterator[Part]:
    yield f"{tensor.dtype} {tuple(tensor.shape)}"
    if tensor.layout is not torch.strided:
        entries = tensor.detach().to_sparse_coo().coalesce()
        yield from (*_of_tensor(entries.indices()), *_of_tensor(entries.values()))
        return
    if tensor.is_meta:
        return
    numbers = tensor.detach().cpu().reshape(-1)
    numbers = numbers[:: max(1, -(-numbers.nbytes // MOST_BYTES))].contiguous()
    yield numbers.view(torch.uint8).numpy().tobytes()


def _read_with_the_same_random_numbers(items: Any, index: int) -> Any:
    """Return an item, which may be changed at random when it is read, and leave the generators as they were."""
    of_python, of_numpy = random.getstate(), np.random.get_state()
    with torch.random.fork_rng(devices=[]):
        try:
            torch.default_generator.manual_seed(0)  # torch.manual_seed takes a stack for every kind of device there is
            random.seed(0)
            np.random.seed(0)
            return items[index]
        finally:
            random.setstate(of_python)
            np.random.set_state(of_numpy)
