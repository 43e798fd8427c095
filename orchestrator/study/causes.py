"""Why a trial stands where it stands: the fact that code asks for. The sentence beside it is for people."""

from __future__ import annotations

from enum import StrEnum


class Cause(StrEnum):
    """What put a trial into its state. Its text is the code that a shown reason begins with.

    A full run that was stopped for another cause than these is taken for one that was cut: what it would have come to is read from the rungs that it
    passed or, where it is to reach a target loss, from its last evaluation (estimates/observed.py). DIVERGED says that its learning rate is too
    high, LOW_THROUGHPUT that its batch may be too slow, OUT_OF_MEMORY that it is made again in smaller micro-batches."""

    RUNG = "rung"
    """A verdict at a rung: it waits there, was let past it, or was cut."""
    DIVERGED = "diverged"
    """Its loss rose, jumped, or is no finite number."""
    LOW_THROUGHPUT = "low_throughput"
    """Other trials of the same effective batch process far more tokens per second."""
    THRASHING = "thrashing"
    """It fitted only because the allocator gave memory back and asked again."""
    TOO_SLOW = "too_slow"
    """A step took longer than `max_step_seconds`."""
    OUT_OF_MEMORY = "out_of_memory"
    """What it asked for did not fit into its limit or its device."""
    HOST_MEMORY = "host_memory"
    """The host ran out of memory and ended its process; other programs on the host may have taken most of it."""
    FAILED = "failed"
    """The user's code raised an error, it hung, or it took its processes down again and again."""
    INTERRUPTED = "interrupted"
    """Its machine was taken away, or its processes were told to end."""
    BUDGET = "budget"
    """The study's `budget` was spent."""
    STOPPED = "stopped"
    """It was never started, because all the trials before it had failed."""

    @property
    def code(self) -> str:
        """The word that a shown reason begins with. Out of memory is one word, whether the device's or the host's."""
        return Cause.OUT_OF_MEMORY.value if self is Cause.HOST_MEMORY else self.value
