"""A DataLoader's samples and how it batches them: which samples come when, and how many at once, is what a study decides."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

from torch.utils.data import DataLoader, Subset

from batchscout.trainers.data.streams import Stream, is_stream, tell_alike
from batchscout.trainers.data.workers import Workers
from batchscout.trainers.sources.sampling import places_of, refuse_batches_of_its_own, whole_of

KEPT_OF_A_PART = ("seq_len", "vocab_size")
KEPT = (*KEPT_OF_A_PART, "content_hash")
"""What a set may tell of itself."""
TOKENS = ("input_ids", "labels")
"""The columns that say how long a sample is where the study file names none: the first one of any, the second of an encoder-decoder's."""


class Loaded:
    """A map-style set with the collate_fn of its DataLoader."""

    def __init__(self, loader: Any, where: str) -> None:
        """where: the loader, in words. Raises ValueError where the samples could not be taken in the study's order."""
        places, whole = places_of(loader, where), loader.dataset
        is_whole = len(places) == len(whole)
        self.samples = whole if is_whole else Subset(whole, places)
        self.whole, self.places = whole, None if is_whole else places
        self.collate_fn, self.loader = loader.collate_fn, loader
        if hasattr(self.samples, "__getitems__"):
            self.__getitems__ = self.samples.__getitems__
        tell_alike(self, whole, KEPT if is_whole else KEPT_OF_A_PART)
        if (lengths := lengths_told(self)) is not None:
            self.lengths = lengths

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int) -> Any:
        return self.samples[index]


def read_by(loader: Any, where: str) -> Loaded | Stream:
    """Return what a DataLoader reads, with how it batches it. Raises ValueError where a study cannot batch it in its place."""
    refuse_batches_of_its_own(loader, where)
    samples = loader.dataset
    if type(samples).__name__ == "IterableDatasetShard":  # accelerate's, of which each rank takes a part
        samples = samples.dataset
    return Stream(samples, where, loader) if is_stream(samples) else Loaded(loader, where)


def loader_of(samples: Any) -> DataLoader[Any] | None:
    """Return the DataLoader that samples come from, if there is one. A set of the user's own may have a `loader` that is something else,
    as torchvision's folders have."""
    loader = getattr(samples, "loader", None)
    return loader if isinstance(loader, DataLoader) else None


def workers_of(asked: int | None, samples: Any) -> Workers:
    """Return the workers that fetch a run's samples: as many as the study file asks for, or else as many as the DataLoader has that
    they come from. asked: `data.workers`."""
    loader = loader_of(samples)
    number = asked if asked is not None else (loader.num_workers if loader is not None else 0)
    if isinstance(samples, Stream):
        number = min(number, 1)  # the study file may not ask for more, see `samples.load_data`
    if loader is None:
        return Workers(number)
    return Workers(
        number,
        loader.prefetch_factor or 2,
        loader.worker_init_fn,
        loader.multiprocessing_context or "fork",
        loader.timeout,
        whole_of(loader),
    )


def lengths_told(samples: Any, members: Collection[str] = ()) -> Sequence[int] | None:
    """Return how long each sample is, where the set says so, or has lists of numbers in columns; None where all are of one length, or the
    samples alone can tell.

    members: it is the longest of these; empty: of the token ids and, where they are a list, too, as an encoder-decoder's are, the labels.
    """
    if isinstance(samples, Loaded):
        told = lengths_told(samples.whole, members)
        return told if told is None or samples.places is None else [told[place] for place in samples.places]
    if tells_lengths(samples):
        return samples.lengths
    has = getattr(samples, "column_names", None) or ()
    if not hasattr(samples, "with_format") or not {*(members or TOKENS[:1])} <= {*has}:
        return None
    import pyarrow.compute

    table = samples.select_columns([name for name in members or TOKENS if name in has]).with_format("arrow")[:]
    lists = [column for column in table.columns if _is_list(column.type)]
    if len(lists) < len(members or TOKENS[:1]):
        return None
    lengths = [pyarrow.compute.call_function("list_value_length", [column]) for column in lists]
    found = pyarrow.compute.call_function("max_element_wise", lengths).to_pylist()
    return found if len(set(found)) > 1 else None


def tells_lengths(samples: Any) -> bool:
    """True if its `lengths` are a number for each sample: a set may have some of another meaning, such as those of its files."""
    lengths: Any = getattr(samples, "lengths", None)
    if not hasattr(lengths, "__len__") or isinstance(lengths, Mapping) or len(lengths) != len(samples):
        return False
    try:
        return all(float(lengths[place]) >= 0 for place in (0, len(samples) - 1))
    except (TypeError, ValueError, LookupError):
        return False


def _is_list(kind: Any) -> bool:
    from pyarrow import types

    return types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind)
