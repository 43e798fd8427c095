"""`load_data` opens the two sets that `data.target` names; `SampleSet` is what such a set must offer, unless it is a stream."""

from __future__ import annotations

import inspect
from typing import Any, Protocol

from torch.utils.data import DataLoader, Subset

from batchscout.trainers.config import DataConfig, call_target, target_of
from batchscout.trainers.data.chat import chat
from batchscout.trainers.data.loaders import KEPT, read_by, tells_lengths
from batchscout.trainers.data.packed_rows import Packed
from batchscout.trainers.data.padding import Padded
from batchscout.trainers.data.streams import Stream, is_stream, tell_alike
from batchscout.trainers.data.text import hf, python_stdlib, text
from batchscout.trainers.sources.adapted import loaders_of
from batchscout.trainers.sources.held_out import held_out


class SampleSet(Protocol):
    """A map-style data set. One whose samples differ in length pads them in `__getitems__` or in a `collate_fn` of its own, which
    takes a list of samples and returns the batch, and lists them as `lengths`."""

    def __len__(self) -> int: ...
    def __getitem__(self, index: int, /) -> Any: ...


Samples = SampleSet | Stream

BUILT_IN = {"python_stdlib": python_stdlib, "text": text, "hf": hf, "chat": chat}
"""The data sets that have a name. All are texts, whose tokenizer is named beside them."""
SAMPLES_LOOKED_AT = 16
"""So many of the first samples of a stream are kept at least, for what looks at a few."""


def load_data(config: DataConfig) -> tuple[Samples, Samples]:
    """Return the (train, val) sets that `data.target` names; neither is empty."""
    target = target_of("data", config.target, BUILT_IN, "(train, val)")
    train, val = loaded(call_target("data", target, config.kwargs), config.target)
    if isinstance(train, Stream) and config.workers is not None and config.workers > 1:
        raise ValueError(
            f"data.workers is {config.workers}, and {train.where} is a stream, whose samples have one order: one process reads them; set "
            "data.workers: 1"
        )
    return _as_told(train, "train", config), _as_told(val, "val", config)


def takes_seq_len(config: DataConfig) -> bool:
    """True if the target takes the length of its samples, by its signature or by the arguments that it is given."""
    target = target_of("data", config.target, BUILT_IN, "(train, val)")
    return "seq_len" in {*inspect.signature(target).parameters, *config.kwargs}


def _as_told(samples: Samples, name: str, config: DataConfig) -> Samples:
    """Return the set as `pad` and `pack` say. Raises ValueError for a stream."""
    if not config.pad:
        return samples
    if isinstance(samples, Stream):
        raise ValueError(
            f"data.pad pads samples to the longest of a batch, and {samples.where} is a stream, of whose samples nobody knows the longest; pad or "
            "pack them to one length in the stream, or return a map-style data set"
        )
    padded = Padded(samples, config.pad, f"the {name} set of data.target '{config.target}'")
    return padded if config.pack is None else Packed(padded, config.pack)


def first_of(samples: Samples, count: int) -> SampleSet:
    """Return a set that begins with the first `count` samples: the set itself, or what a stream begins with."""
    return samples.first(count) if isinstance(samples, Stream) else samples


def num_samples(samples: Samples) -> int | None:
    """Return how many samples there are; None of a stream, which does not say."""
    return None if isinstance(samples, Stream) else len(samples)


def loaded(found: Any, target: str) -> tuple[Samples, Samples]:
    """Return the (train, val) sets in what `target` returned. Raises ValueError where there are none."""
    found = loaders_of(found) or found
    if not isinstance(found, tuple | list) or len(found) != 2:
        raise ValueError(f"data.target '{target}' returned a {type(found).__name__}; return a pair (train, val)")
    if found[1] is None and isinstance(found[0], DataLoader):
        _set_in(found[0], "train", target)  # which refuses what a study cannot batch
        found = held_out(found[0])
    train, val = (_set_in(one, name, target) for name, one in zip(("train", "val"), found, strict=True))
    sizes = [len(first_of(samples, 1)) for samples in (train, val)]
    if not all(sizes):
        told = " and ".join(f"{size} {name}" for size, name in zip(sizes, ("train", "val"), strict=True))
        raise ValueError(f"data.target '{target}' returned {told} samples; each needs at least one")
    return train, val


def _set_in(one: Any, name: str, target: str) -> Samples:
    if isinstance(one, DataLoader):
        return read_by(one, f"the {name} DataLoader of data.target '{target}'")
    if is_stream(one):
        return Stream(one, f"the {name} stream of data.target '{target}'")
    if not (hasattr(one, "__len__") and hasattr(one, "__getitem__")):
        raise ValueError(
            f"data.target '{target}' returned a {type(one).__name__} as its {name} set; return a map-style data set, with __len__ and "
            "__getitem__, or a stream, with __iter__"
        )
    if getattr(one, "lengths", None) is None or not len(one) or tells_lengths(one):
        return one
    without_lengths = Subset(one, range(len(one)))
    tell_alike(without_lengths, one, (*KEPT, "collate_fn", "__getitems__"))
    return without_lengths
