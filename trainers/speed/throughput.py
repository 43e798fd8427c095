"""Seconds per step without stalling the device, and what they say: tokens/s, MFU and HFU."""

from __future__ import annotations

import math
import statistics
import time
from collections import deque

import torch

from trainers.config import DevicePeak
from trainers.device.machine_load import LoadMeter
from trainers.speed.flops import Work

# The first step creates optimizer state, DDP rebuilds its buckets in the second, caches settle in the third.
NUM_WARMUP_STEPS = 3
# A run of days says how fast it is now, and reading that stays cheap.
RECENT_STEPS = 1000


class StepClock:
    """Measures how long steps take, and what else the machine did meanwhile. On CUDA it uses events, which are read
    once per interval after one synchronisation."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.begin_load()
        self._unread: list[float] = []
        self._marks: list[torch.cuda.Event] = []
        self._last = 0.0

    def begin_load(self) -> None:
        """Tell from here on what else the machine does."""
        is_gpu = self.device.type == "cuda"
        self.load = LoadMeter(f"GPU-{torch.cuda.get_device_properties(self.device).uuid}" if is_gpu else None)
        self.load.start()

    def start(self) -> None:
        """Begin a run of back-to-back steps; what lies before it (evaluation, saving, waiting) is not timed."""
        self.load.start()
        if self.device.type == "cuda":
            self._marks = [self._mark()]
        else:
            self._last = time.perf_counter()

    def end_of_step(self) -> None:
        if self.device.type == "cuda":
            self._marks.append(self._mark())
            return
        now = time.perf_counter()
        self._unread.append(now - self._last)
        self._last = now

    def read(self) -> list[float]:
        """Return the seconds of every step since the last read, and start again from here."""
        if self.device.type == "cuda":
            self.load.look()  # while the GPU is still at work
            torch.cuda.synchronize(self.device)
            pairs = zip(self._marks, self._marks[1:], strict=False)
            self._unread = [before.elapsed_time(after) / 1000 for before, after in pairs]
        else:
            self.load.look()
        self.load.stop()
        seconds, self._unread = self._unread, []
        self.start()
        return seconds

    @staticmethod
    def _mark() -> torch.cuda.Event:
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event


class Pace:
    """How long this process's steps take, and how much they get done. Medians are over the last RECENT_STEPS."""

    def __init__(self) -> None:
        self._all_seconds = 0.0
        self._num_warm_up = 0
        self._recent: deque[tuple[float, float]] = deque(maxlen=RECENT_STEPS)

    def add(self, seconds: float, amount: float) -> None:
        """Take in a step that took so many seconds and got so much done."""
        self._all_seconds += seconds
        if self._num_warm_up < NUM_WARMUP_STEPS:
            self._num_warm_up += 1
        else:
            self._recent.append((seconds, amount))

    def total_seconds(self) -> float:
        """Return the seconds of all steps."""
        return self._all_seconds

    def timed_seconds(self) -> float:
        """Return the seconds of the steps that medians are taken over."""
        return sum(seconds for seconds, _ in self._recent)

    def median_step_seconds(self) -> float | None:
        """Return the median, or None until there is a step beyond the warm-up."""
        return statistics.median(seconds for seconds, _ in self._recent) if self._recent else None

    def median_rate(self) -> float | None:
        """Return the median of the amount per second, over the same steps."""
        return statistics.median(amount / seconds for seconds, amount in self._recent) if self._recent else None


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
    against; nothing where the FLOPs are not known."""
    if work is None:
        return {}
    found = {
        "mfu": work.model_flops * samples_per_second / peak.flops_per_second,
        "model_flops_per_sample": work.model_flops,
        "assumed_peak_flops": peak.flops_per_second,
        "peak_is_measured": float(peak.source == "measured"),
    }
    if work.hardware_flops is None:
        return found
    return found | {"hfu": work.hardware_flops * samples_per_second / peak.flops_per_second}
