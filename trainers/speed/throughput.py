"""Seconds per step without stalling the device, and what they say: tokens/s, MFU and HFU."""

from __future__ import annotations

import contextlib
import math
import statistics
import time
from collections import deque
from collections.abc import Iterator
from typing import NamedTuple

import torch

from batchscout.trainers.config import DevicePeak
from batchscout.trainers.device.machine_load import LoadMeter
from batchscout.trainers.speed.flops import Work

# The first step creates optimizer state, DDP rebuilds its buckets in the second, caches settle in the third.
NUM_WARMUP_STEPS = 3
# A run of days says how fast it is now, and reading that stays cheap.
RECENT_STEPS = 1000


class StepTime(NamedTuple):
    """How long a step took."""

    seconds: float
    data_seconds: float
    """Of these, the seconds in which the device had to wait for data."""


class StepClock:
    """Measures how long steps take, how long they wait for data, and what else the machine did meanwhile. On CUDA it uses events, which
    are read once per interval after one synchronisation."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.begin_load()
        self._unread: list[StepTime] = []
        self._marks: list[torch.cuda.Event] = []
        self._waits: list[list[tuple[torch.cuda.Event, torch.cuda.Event]]] = [[]]  # of each step, the last still open
        self._last = self._waited = 0.0

    def begin_load(self) -> None:
        """Tell from here on what else the machine does."""
        is_gpu = self.device.type == "cuda"
        self.load = LoadMeter(f"GPU-{torch.cuda.get_device_properties(self.device).uuid}" if is_gpu else None)
        self.load.start()

    def start(self) -> None:
        """Begin a run of back-to-back steps; what lies before it (evaluation, saving, waiting) is not timed."""
        self.load.start()
        if self.device.type == "cuda":
            self._marks, self._waits = [self._mark()], [[]]
        else:
            self._last, self._waited = time.perf_counter(), 0.0

    @contextlib.contextmanager
    def waiting(self) -> Iterator[None]:
        """Count this block, in which a step waits for a batch. On a GPU: from the end of its earlier work to the batch's arrival, so
        nothing where the host is ahead."""
        if self.device.type == "cuda":
            begin = self._mark()
            yield
            self._waits[-1].append((begin, self._mark()))
            return
        begin_seconds = time.perf_counter()
        yield
        self._waited += time.perf_counter() - begin_seconds

    def end_of_step(self) -> None:
        if self.device.type == "cuda":
            self._marks.append(self._mark())
            self._waits.append([])
            return
        now = time.perf_counter()
        self._unread.append(StepTime(now - self._last, self._waited))
        self._last, self._waited = now, 0.0

    def read(self) -> list[StepTime]:
        """Return the times of every step since the last read, and start again from here."""
        self.load.look()  # while a GPU is still at work
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
            pairs = zip(self._marks, self._marks[1:], strict=False)
            self._unread = [
                StepTime(_seconds(*pair), sum(_seconds(*wait) for wait in waits))
                for pair, waits in zip(pairs, self._waits, strict=False)
            ]
        self.load.stop()
        seconds, self._unread = self._unread, []
        self.start()
        return seconds

    @staticmethod
    def _mark() -> torch.cuda.Event:
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event


def _seconds(before: torch.cuda.Event, after: torch.cuda.Event) -> float:
    return before.elapsed_time(after) / 1000


class Pace:
    """How long this process's steps take, and how much they get done. Medians are over the last RECENT_STEPS."""

    def __init__(self) -> None:
        self._all_seconds = 0.0
        self._num_warm_up = 0
        self._recent: deque[tuple[float, float, float]] = deque(maxlen=RECENT_STEPS)

    def add(self, seconds: float, amount: float, data_seconds: float = 0.0) -> None:
        """Take in a step that took so many seconds and got so much done. data_seconds: how long of it was spent waiting for data."""
        self._all_seconds += seconds
        if self._num_warm_up < NUM_WARMUP_STEPS:
            self._num_warm_up += 1
        else:
            self._recent.append((seconds, amount, data_seconds))

    def total_seconds(self) -> float:
        """Return the seconds of all steps."""
        return self._all_seconds

    def timed_seconds(self) -> float:
        """Return the seconds of the steps that medians are taken over."""
        return sum(seconds for seconds, _, _ in self._recent)

    def data_wait(self) -> float | None:
        """Return the share of their time that the same steps waited for data. It is that of their sum: workers hand over several batches
        at once, and a median would see none of the pauses between."""
        return sum(waited for _, _, waited in self._recent) / self.timed_seconds() if self._recent else None

    def median_step_seconds(self) -> float | None:
        """Return the median, or None until there is a step beyond the warm-up."""
        return statistics.median(seconds for seconds, _, _ in self._recent) if self._recent else None

    def median_rate(self) -> float | None:
        """Return the median of the amount per second, over the same steps."""
        return statistics.median(amount / seconds for seconds, amount, _ in self._recent) if self._recent else None


def steps_to_time(pace: Pace, seconds: float, *, had_statistics: bool) -> int:
    """Return how many steps to take so that those beyond the warm-up last so long; 0 where enough were timed, or none to
    judge by. A quarter more than that takes at this pace: without statistics they are faster.

    had_statistics: true where the steps so far were slowed down by measuring micro-gradients, so that none of them counts.
    """
    step_seconds = pace.median_step_seconds()
    if step_seconds is None or (pace.timed_seconds() >= seconds and not had_statistics):
        return 0
    return NUM_WARMUP_STEPS + math.ceil(1.25 * seconds / step_seconds)


def utilisation(work: Work | None, peak: DevicePeak, samples_per_second: float) -> dict[str, float]:
    """Return {mfu, hfu} of a device that trains on so many samples, the FLOPs of a sample, and the peak they are told
    against; nothing where the FLOPs are not known. More than all of a device says that the peak was mismeasured: it is not told."""
    if work is None:
        return {}
    flops = {"mfu": work.model_flops, "hfu": work.hardware_flops}
    shares = {name: one * samples_per_second / peak.flops_per_second for name, one in flops.items() if one is not None}
    return {name: share for name, share in shares.items() if share <= 1} | {
        "model_flops_per_sample": work.model_flops,
        "assumed_peak_flops": peak.flops_per_second,
        "peak_is_measured": float(peak.source == "measured"),
    }
