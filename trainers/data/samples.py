"""`load_data` opens the two sets that `data.target` names; `SampleSet` is what such a set must offer."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

from torch.utils.data import DataLoader

from trainers.config import DataConfig, call_target, resolve
from trainers.data.chat import chat
from trainers.data.loaders import Loaded
from trainers.data.packed_rows import Packed
from trainers.data.padding import Padded
from trainers.data.text import hf, python_stdlib, text
from trainers.sources.adapted import loaders_of


class SampleSet(Protocol):
    """A map-style data set. One whose samples differ in length pads them in `__getitems__` or in a `collate_fn` of its own, which
    takes a list of samples and returns the batch, and lists them as `lengths`."""

    def __len__(self) -> int: ...
    def __getitem__(self, index: int, /) -> Any: ...


def load_data(config: DataConfig) -> tuple[SampleSet, SampleSet]:
    """Return the (train, val) sets that `data.target` names; neither is empty."""
    train, val = loaded(call_target("data", _target(config.target), config.kwargs), config.target)
    return _as_told(train, "train", config), _as_told(val, "val", config)


def _as_told(samples: SampleSet, name: str, config: DataConfig) -> SampleSet:
    """Return the set as `pad` and `pack` say."""
    if not config.pad:
        return samples
    padded = Padded(samples, config.pad, f"the {name} set of data.target '{config.target}'")
    return padded if config.pack is None else Packed(padded, config.pack)


def _target(name: str) -> Callable[..., Any]:
    built_in: dict[str, Callable[..., Any]] = {"python_stdlib": python_stdlib, "text": text, "hf": hf, "chat": chat}
    if name in built_in:
        return built_in[name]
    if ":" not in name:
        raise ValueError(
            f"data.target '{name}' is not built in; use {', '.join(built_in)} or an import path package.module:callable"
        )
    found = resolve(name)
    if not callable(found):
        raise ValueError(f"data.target '{name}' is a {type(found).__name__}; name a callable that returns (train, val)")
    return found


def loaded(found: Any, target: str) -> tuple[SampleSet, SampleSet]:
    """Return the (train, val) sets in what `target` returned. Raises ValueError where there are none."""
    found = loaders_of(found) or found
    if not isinstance(found, tuple | list) or len(found) != 2:
        raise ValueError(f"data.target '{target}' returned a {type(found).__name__}; return a pair (train, val)")
    found = [
        Loaded(samples, f"the {name} DataLoader of data.target '{target}'")
        if isinstance(samples, DataLoader)
        else samples
        for name, samples in zip(("train", "val"), found, strict=True)
    ]
    for name, samples in zip(("train", "val"), found, strict=True):
        if not (hasattr(samples, "__len__") and hasattr(samples, "__getitem__")):
            raise ValueError(
                f"data.target '{target}' returned a {type(samples).__name__} as its {name} set; "
                "return a map-style data set, with __len__ and __getitem__"
            )
    train, val = found
    if not (len(train) and len(val)):
        raise ValueError(
            f"data.target '{target}' returned {len(train)} train and {len(val)} val samples; each needs at least one"
        )
    return train, val
