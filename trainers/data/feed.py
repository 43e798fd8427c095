"""The feed: turns what the steps of a run ask for into batches on the device, fetched ahead of them where there are workers.

What is asked for is a function of the sample number alone, so workers run ahead over steps, phases, pauses and evaluations, and a run
that goes on from a checkpoint takes what the uninterrupted one would have.
"""

from __future__ import annotations

import contextlib
import functools
import multiprocessing
import os
import signal
import threading
import warnings
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset

from batchscout.trainers.data.batches import collated, fetch, move_aside
from batchscout.trainers.data.draws import drawing_apart, drawing_from, seed_of
from batchscout.trainers.data.samples import Samples
from batchscout.trainers.data.streams import Place, Stream, StreamReader
from batchscout.trainers.data.workers import (
    Failure,
    Workers,
    begin_worker,
    codes_of_ended,
    ended_early,
    failure_of,
    named,
    raised_in_a_worker,
)
from batchscout.trainers.device.cgroup import memory_kills
from batchscout.trainers.notices import NoticeKind, give_notice

SECONDS_TO_END = 2.0
"""How long a worker may take to end after the run has noticed that it does."""


@dataclass(frozen=True)
class Ask:
    """What one micro-batch of one rank is made of."""

    indices: list[int]
    """Of the data; of a stream, the sample numbers."""
    step: int
    """The number of the first sample of its step, over all ranks."""
    next_step: int
    """That of the step after it."""
    turn: int
    """Which of the rank's micro-batches of that step it is, from 0."""
    is_last: bool
    """True for the last one."""
    seed: int
    """Decides what the data set draws meanwhile."""


class Delivered(NamedTuple):
    """A batch, as it comes from a worker: a named tuple is one of the things in which torch looks for tensors to pin."""

    batch: Any
    step: int
    turn: int
    passes: int = 0
    """The passes over a stream that have come to their end."""
    place: Place | None = None
    """Where the stream is behind its step, now and then; None of other sets."""
    failure: Failure | None = None


class Feed:
    """The batches of a run, in their order. A step that is asked for out of its turn begins the feed anew there."""

    def __init__(
        self,
        samples: Samples,
        asked_from: Callable[[int], Iterator[Ask]],
        workers: Workers,
        device: torch.device,
        seed: int,
    ) -> None:
        """asked_from: returns what this rank's steps ask for, from the step on that begins at a sample number. seed: the run's."""
        self._samples, self._asked_from, self.workers = samples, asked_from, workers
        self._device, self._seed = device, seed
        self._delivered: Generator[Delivered] | None = None
        self.place: Place | None = None
        """Where a stream can be picked up, not behind the last step that was taken; None: at its beginning."""
        self.passes = 0
        """The passes over a stream that have come to their end."""

    def batch(self, step: int, turn: int) -> Any:
        """Return on the device the batch of a micro-batch of the step whose first sample has this number."""
        found = None if self._delivered is None else next(self._delivered, None)
        if found is None or (found.step, found.turn) != (step, turn):
            assert turn == 0, "a step is taken as a whole"
            self.close()
            self._delivered = self._begun(step)
            found = next(self._delivered)
        self._note(found)
        return move_aside(found.batch, self._device)

    def _note(self, found: Delivered) -> None:
        """Note where a stream is, and tell when it has begun again."""
        self.place = found.place or self.place
        if isinstance(self._samples, Stream) and found.passes > self.passes:
            where = self._samples.where
            text = f"{where} came to its end in the step that began at {found.step:,} samples, and began again"
            give_notice(NoticeKind.REPEATED_STREAM, text)
        self.passes = max(self.passes, found.passes)

    def go_on_from(self, place: Place) -> None:
        """Pick a stream up at this place, or later."""
        self.close()
        self.place, self.passes = place, place.passes

    def close(self) -> None:
        """End the workers. The next batch that is asked for starts others."""
        if self._delivered is not None:
            self._delivered.close()
            self._delivered = None

    def _begun(self, step: int) -> Generator[Delivered]:
        asked = self._asked_from(step)
        if isinstance(self._samples, Stream):
            place = self.place if self.place is not None and self.place.number <= step else None
            source: _Streamed | _Fetched = _Streamed(self._samples, asked, step, place, self._seed)
        else:
            source = _Fetched(self._samples)
        if self.workers.number == 0:
            return source.deliver(asked)
        return _by_workers(source, asked, self.workers, pinned=self._device.type == "cuda")


@contextlib.contextmanager
def feeding(
    samples: Samples, groups: Sequence[list[int]], workers: Workers, device: torch.device
) -> Iterator[Iterator[Any]]:
    """Hand out, one after the other on the device, a batch of each of these groups of samples. What the set draws is the same every
    time. The workers end with the block."""

    def asked_from(_: int) -> Iterator[Ask]:
        """Ask for them as one step of many micro-batches."""
        for turn, indices in enumerate(groups):
            yield Ask(indices, 0, sum(map(len, groups)), turn, turn == len(groups) - 1, seed_of(*indices))

    feed = Feed(samples, asked_from, workers, device, seed=0)
    try:
        yield (feed.batch(0, turn) for turn in range(len(groups)))
    finally:
        feed.close()


class _Fetched(Dataset[Delivered]):
    """A map-style set, of which each worker fetches other batches. Of what raises, the samples that were begun last are to blame."""

    def __init__(self, samples: Any) -> None:
        self._samples = samples

    def deliver(self, asked: Iterable[Ask]) -> Generator[Delivered]:
        for ask in asked:
            begun = [ask.indices]
            try:
                delivered = self._fetched(ask, begun)
            except Exception as error:
                error.add_note(f"at {named(begun[-1])}")
                raise
            yield delivered

    def __getitem__(self, ask: Ask) -> Delivered:
        begun = [ask.indices]
        try:
            return self._fetched(ask, begun)
        except BaseException as error:  # a user's code may raise anything
            return Delivered(None, ask.step, ask.turn, failure=failure_of(error, begun[-1]))

    def _fetched(self, ask: Ask, begun: list[list[int]]) -> Delivered:
        with drawing_from(ask.seed):
            batch = fetch(self._samples, ask.indices, begun.append)
        return Delivered(batch, ask.step, ask.turn)


class _Streamed(IterableDataset[Delivered]):
    """A stream, which one process reads: its samples have one order."""

    def __init__(self, stream: Stream, asked: Iterator[Ask], begin: int, place: Place | None, seed: int) -> None:
        self._asked, self._reader_at = asked, functools.partial(StreamReader, stream, begin, place, seed)

    def deliver(self, asked: Iterable[Ask]) -> Generator[Delivered]:
        reader = self._reader_at()
        for ask in asked:
            yield _of_stream(reader, ask)

    def __iter__(self) -> Iterator[Delivered]:
        # Streams that share themselves out among workers (those of the library datasets do) see that there is nobody to share with.
        torch.utils.data._utils.worker._worker_info = None  # pyright: ignore[reportAttributeAccessIssue]
        reader: StreamReader | None = None
        for ask in self._asked:
            try:
                reader = reader or self._reader_at()
                found = _of_stream(reader, ask)
            except BaseException as error:  # a user's code may raise anything
                failure = failure_of(error, [reader.number if reader else ask.step])
                found = Delivered(None, ask.step, ask.turn, failure=failure)
            yield found


def _of_stream(reader: StreamReader, ask: Ask) -> Delivered:
    samples = reader.take(ask.indices, ask.step)
    with drawing_from(ask.seed):
        batch = collated(reader.stream, samples)
    place = reader.place_at(ask.next_step) if ask.is_last else None
    return Delivered(batch, ask.step, ask.turn, reader.passes, place)


def _by_workers(
    source: _Fetched | _Streamed, asked: Iterator[Ask], workers: Workers, *, pinned: bool
) -> Generator[Delivered]:
    """Yield what workers deliver. They begin here, and end when this generator is closed."""
    kills, before = memory_kills(), set(multiprocessing.active_children())
    loader = DataLoader(
        source,
        batch_size=None,
        sampler=None if isinstance(source, _Streamed) else asked,
        num_workers=workers.number,
        collate_fn=_as_it_is,
        pin_memory=pinned,
        timeout=workers.timeout,
        worker_init_fn=functools.partial(begin_worker, workers=workers, parent=os.getpid()),
        multiprocessing_context=workers.context,
        prefetch_factor=workers.prefetch_factor,
    )
    with drawing_apart(), _own_sigchld(), warnings.catch_warnings():  # it draws a seed for its workers
        # A rank has threads; a worker uses nothing that they may hold, as those of torch's DataLoader elsewhere.
        warnings.filterwarnings("ignore", "This process .* is multi-threaded, use of fork", DeprecationWarning)
        delivered = iter(loader)
    mine = set(multiprocessing.active_children()) - before
    while True:
        lost: Exception | None = None
        try:
            found = next(delivered, None)
        except (RuntimeError, EOFError, OSError) as error:  # the last two in the midst of a batch
            lost, found = error, None
        if lost is not None:
            codes = codes_of_ended(mine, SECONDS_TO_END)
            del delivered
            if not codes:
                raise lost
            raise ended_early(codes[0], workers.number, ran_out=memory_kills() > kills)
        if found is None:
            return
        if found.failure is not None:
            del delivered  # or this frame would keep the workers for as long as the error lives
            raise raised_in_a_worker(found.failure)
        yield found


@contextlib.contextmanager
def _own_sigchld() -> Iterator[None]:
    """Keep this process's handler of SIGCHLD: torch's raises an error wherever the main thread is, when a worker has ended early. That is
    seen all the same when the next batch is waited for."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.getsignal(signal.SIGCHLD)
    try:
        yield
    finally:
        signal.signal(signal.SIGCHLD, before or signal.SIG_DFL)


def _as_it_is(delivered: Any) -> Any:
    return delivered
