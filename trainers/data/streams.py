"""Streams: sets that can only be read from their beginning, such as torch's IterableDataset and a streamed one of the library datasets.

A stream's samples are numbered as they come, and every rank reads all of them and takes its own: so each split of an effective batch
sees the same samples in the same order. What a stream draws at random is decided by the number of the sample that it makes.
"""

from __future__ import annotations

import copy
import itertools
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from torch.utils._pytree import tree_leaves
from torch.utils.data import IterableDataset

from batchscout.trainers.data.draws import draw_from, drawing_apart, drawing_from, seed_of

SECONDS_BETWEEN_STATES = 1.0
"""How often a stream is asked for its state: it may hold a buffer of samples. What lies behind the last one is read again."""
SKIPPED_AT_ONCE = 64
"""So many samples at most are held while a stream is brought back to its place."""
NUM_COMPARED = 16
"""So many of the first samples are looked at for whether they differ in length."""
NOT_WHOLE = ("BufferShuffledExamplesIterable",)
"""Parts of a stream of the library datasets whose state leaves out the samples that they hold."""
TOLD = ("seq_len", "vocab_size", "content_hash", "collate_fn")
"""What a set may have beside its samples."""


class StreamEnded(ValueError):
    """A stream has no more samples, and cannot begin again. The message is in the user's words."""


@dataclass(frozen=True)
class Place:
    """Where a stream is, in plain values."""

    number: int
    """The samples read so far, over all passes."""
    passes: int
    """The passes that have come to their end."""
    taken: int
    """The samples read of the pass it is in."""
    state: Any = None
    """The stream's own; None where it has none, and begins the pass anew."""


class Stream:
    """A stream and how its samples become a batch. It is never read itself, but shallow copies of it, one after the other."""

    def __init__(self, samples: Any, where: str, loader: Any = None) -> None:
        """where: the stream, in words. loader: the DataLoader that reads it, if there is one. Raises ValueError where its samples could
        not be taken in one order."""
        self.samples, self.where, self.loader = samples, where, loader
        _refuse_what_has_no_one_order(samples, where)
        if loader is not None:
            self.collate_fn = loader.collate_fn
        tell_alike(self, samples, [name for name in TOLD if not hasattr(self, name)])
        self._first = Kept(self)
        self._is_all = False

    def first(self, count: int) -> Kept:
        """Return the first `count` samples, or all where there are fewer. They are read once, and kept."""
        if len(self._first) < count and not self._is_all:
            self._first = Kept(self, self.anew(count))
            self._is_all = len(self._first) < count
        return Kept(self, self._first[:count])

    def anew(self, count: int) -> list[Any]:
        """Read the first `count` samples once more."""
        with drawing_from(seed_of(0)):
            return list(itertools.islice(iter(self.begun(0)), count))

    def begun(self, number_of_pass: int) -> Any:
        """Return the samples of a pass, from its beginning on."""
        samples = copy.copy(self.samples)
        if hasattr(samples, "set_epoch"):
            samples.set_epoch(number_of_pass)
        return samples


class Kept(list[Any]):
    """Samples of a stream, in memory."""

    def __init__(self, stream: Stream, samples: Any = ()) -> None:
        super().__init__(samples)
        tell_alike(self, stream, TOLD)


def tell_alike(samples: Any, of: Any, names: Iterable[str]) -> None:
    """Have a set that is made of another tell what that tells of itself under these names."""
    for name in names:
        if hasattr(of, name):
            setattr(samples, name, getattr(of, name))


class StreamReader:
    """Reads a stream from a sample number on, pass after pass."""

    def __init__(self, stream: Stream, begin: int, place: Place | None, seed: int) -> None:
        """place: where the stream can be picked up, at `begin` or before; None: at its beginning. seed: the run's."""
        assert place is None or place.number <= begin
        self.stream, self._seed = stream, seed
        self.passes = place.passes if place else 0
        self._samples, self._state_is_due = stream.begun(self.passes), 0.0
        if place is not None and place.state is not None:
            self._samples.load_state_dict(place.state)
            self.number, self._taken = place.number, place.taken
        else:
            self.number, self._taken = (place.number - place.taken if place else 0), 0
        self._read: dict[int, Any] = {}
        with drawing_from(seed_of(self._seed, -1 - self.passes)):
            self._iterator = iter(self._samples)
        while self.number < begin:
            self._read_up_to(min(begin, self.number + SKIPPED_AT_ONCE))
            self._read.clear()

    def take(self, numbers: Sequence[int], keep_from: int) -> list[Any]:
        """Return the samples of these numbers. None below `keep_from` is asked for again."""
        self._read_up_to(max(numbers) + 1)
        self._read = {number: sample for number, sample in self._read.items() if number >= keep_from}
        return [self._read[number] for number in numbers]

    def place_at(self, number: int) -> Place | None:
        """Read up to that number, and return the place; None where it has been told a moment ago."""
        self._read_up_to(number)
        if time.monotonic() < self._state_is_due:
            return None
        place = Place(self.number, self.passes, self._taken, self._state())
        self._state_is_due = time.monotonic() + SECONDS_BETWEEN_STATES
        return place

    def _read_up_to(self, number: int) -> None:
        if number <= self.number:
            return
        with drawing_apart():
            while self.number < number:
                self._read[self.number] = self._next()
                self.number, self._taken = self.number + 1, self._taken + 1

    def _next(self) -> Any:
        if getattr(self._samples, "num_ready", 0) < 1:  # else nothing is drawn, and to seed takes longer than the rest
            draw_from(seed_of(self._seed, self.number))
        try:
            return next(self._iterator)
        except StopIteration:
            pass
        if not self._taken:
            raise StreamEnded(
                f"{self.stream.where} ended after {self.number:,} samples and has none when it is begun again, and the run takes more; let its "
                f"__iter__ begin anew each time, or set sample_budget to at most {self.number}"
            )
        self.passes, self._taken = self.passes + 1, 0
        self._samples = self.stream.begun(self.passes)
        draw_from(seed_of(self._seed, -1 - self.passes))
        self._iterator = iter(self._samples)
        return self._next()

    def _state(self) -> Any:
        """Return the stream's state, if it has one that brings it back to where it is, in values that a checkpoint may hold."""
        has_state = hasattr(self._samples, "state_dict") and hasattr(self._samples, "load_state_dict")
        if not has_state or not self._taken or _holds_samples(getattr(self._samples, "_ex_iterable", None)):
            return None
        state = copy.deepcopy(self._samples.state_dict())
        return state if _is_plain(state) else None


def is_stream(samples: Any) -> bool:
    """True of a set that can only be read from its beginning."""
    is_map_style = hasattr(samples, "__len__") and hasattr(samples, "__getitem__")
    return isinstance(samples, IterableDataset) or (hasattr(samples, "__iter__") and not is_map_style)


def sizes_of_first(stream: Stream) -> set[int]:
    """Return how many numbers the largest tensor has in each of a stream's first samples."""
    tensors = (
        [leaf for leaf in tree_leaves(sample) if isinstance(leaf, Tensor)] for sample in stream.first(NUM_COMPARED)
    )
    return {max((tensor.numel() for tensor in found), default=1) for found in tensors}


def _refuse_what_has_no_one_order(samples: Any, where: str) -> None:
    if isinstance(samples, Iterator):
        raise ValueError(
            f"{where} is a {type(samples).__name__}, which can be read once, and every run of a study begins anew; return an object whose "
            "__iter__ begins again, such as a torch IterableDataset"
        )
    if getattr(samples, "_distributed", None) is not None:
        raise ValueError(
            f"{where} is split by rank (split_dataset_by_node), and a study cuts each batch for its ranks itself, so that any number of them "
            "sees the same samples; leave the split out"
        )


def _is_plain(state: Any) -> bool:
    if isinstance(state, dict):
        return all(isinstance(key, str | int) and _is_plain(value) for key, value in state.items())
    if isinstance(state, list | tuple):
        return all(map(_is_plain, state))
    return state is None or isinstance(state, str | int | float | bool)


def _holds_samples(part: Any) -> bool:
    """True of a part of a stream of the library datasets whose state leaves out samples that it holds, or that is made of such a part."""
    if part is None:
        return False
    made_of = [getattr(part, "ex_iterable", None), *(getattr(part, "ex_iterables", None) or ())]
    return type(part).__name__ in NOT_WHOLE or any(map(_holds_samples, made_of))
