"""Whether steps waited for data, and what then to do: a speed that the data sets says nothing about device or batch."""

from __future__ import annotations

import statistics
from collections.abc import Iterable
from dataclasses import dataclass

from batchscout.orchestrator.study.trial import Trial

INPUT_BOUND = 0.1
"""From this share of a step's time on that is spent waiting for data, trials are input-bound: without the wait they would be a ninth
faster, which is more than sizes that lie close to each other mostly differ by."""


@dataclass(frozen=True)
class InputBound:
    """How trials waited for data."""

    data_wait: float
    """The share of a step's time."""
    workers: int
    """`data.workers` of each rank."""
    is_stream: bool = False
    """True if one process reads the data, whatever the number of workers."""

    def __str__(self) -> str:
        return f"input-bound: {self.data_wait:.0%} of each step waits for data; {self.remedy}, not the batch"

    @property
    def remedy(self) -> str:
        if self.is_stream and self.workers:
            return "make the stream cheaper to read, which one process does, or return a map-style data set, and raise data.workers"
        return f"raise data.workers (now {self.workers})"

    def without_wait(self, rate: float) -> float:
        """Return the most that a rate could be if nothing had to wait."""
        return rate / (1 - self.data_wait)


def input_bound(trials: Iterable[Trial]) -> InputBound | None:
    """Return how these trials waited for data, in the median; None where they hardly did, or none has measured it."""
    told = [(share, trial) for trial in trials if (share := trial.metric("data_wait")) is not None]
    if not told:
        return None
    share, last = statistics.median(share for share, _ in told), told[-1][1]
    if not INPUT_BOUND <= share < 1:
        return None
    return InputBound(share, int(last.metric("data_workers") or 0), last.metric("stream_passes") is not None)
