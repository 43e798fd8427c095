"""Whether something else was at work while steps were timed: other processes, the host of a virtual machine, a falling
clock.

Counters of the kernel, and of NVML for a GPU, are read at the beginning and the end of every stretch of timed steps;
what lies between two stretches counts nothing. `disturbance` says whether a timing can be trusted. Loads no torch.
"""

from __future__ import annotations

import contextlib
import math
import os
import time
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

# Above these shares a timing is disturbed; `disturbance` says of what. A trial alone on two CPUs reads up to 0.14, 0.01 and
# 0.10 (its compiler's processes, the cluster's own); beside one other program it reads 0.8, 0 and 0.9.
MOST_WAITED, MOST_STOLEN, MOST_OTHERS = 0.25, 0.03, 0.25
# Below this share of its highest value the clock has fallen.
LEAST_CLOCK_RATIO = 0.93
# The kernel counts CPU time in ticks of 10 ms: of fewer CPU seconds a share would be a few ticks.
LEAST_CPU_SECONDS = 1.0


@dataclass(frozen=True)
class CpuSeconds:
    """Seconds since some moment in the past, or between two moments. NaN: this kernel does not tell."""

    wall: float = 0.0
    busy: float = 0.0
    """That the CPUs which this process may use worked, for whatever process."""
    stolen: float = 0.0
    """That they had work, and the host of this virtual machine worked for another one."""
    own: float = 0.0
    """That they worked for this process, and for children of it that have ended."""
    waited: float = 0.0
    """That the calling thread had work, and other threads had the CPUs."""

    def plus(self, begin: CpuSeconds, end: CpuSeconds) -> CpuSeconds:
        """Return these seconds and those from `begin` to `end`."""
        triples = zip(vars(self).values(), vars(begin).values(), vars(end).values(), strict=True)
        return CpuSeconds(*(before + last - first for before, first, last in triples))


class LoadMeter:
    """Sums up what the machine did in every stretch from a `start` to the next `stop`. One thread makes all calls: the
    one that trains."""

    def __init__(self, gpu: str | None = None) -> None:
        """gpu: the UUID of the GPU that steps run on; None: they run on the CPU."""
        self._gpu = _Gpu(gpu) if gpu else None
        self._began: CpuSeconds | None = None
        self.seconds = CpuSeconds()
        """Of all stretches together."""
        self._hertz: list[float] = []

    def start(self) -> None:
        self._began = read_cpu_seconds()

    def stop(self) -> None:
        if self._began is None:
            return
        self.seconds = self.seconds.plus(self._began, read_cpu_seconds())
        self._began = None

    def look(self) -> None:
        """Read the clock, and a GPU's state, while the device is at work."""
        hertz = self._gpu.read() if self._gpu else cpu_hertz()
        if hertz:  # the lowest and the highest are enough, however long the run
            self._hertz = [min([*self._hertz, hertz]), max([*self._hertz, hertz])]

    def metrics(self) -> dict[str, float]:
        """Return what `disturbance` reads. A figure that this machine does not tell has no key."""
        found = cpu_shares(self.seconds, len(os.sched_getaffinity(0)))
        if self._hertz:
            lowest, highest = self._hertz
            # A GPU at its power limit always clocks lower.
            ratio = "clock_ratio" if self._gpu is None else "gpu_clock_ratio"
            found |= {"clock_hertz": lowest, ratio: lowest / highest}
        return found | (self._gpu.found if self._gpu else {})


def cpu_shares(seconds: CpuSeconds, num_cpus: int) -> dict[str, float]:
    """Return {other_cpu_share, stolen_cpu_share} of all that so many CPUs could do, and {cpu_wait_share} of the time
    that passed; empty for a time too short to tell."""
    capacity = seconds.wall * num_cpus
    if capacity < LEAST_CPU_SECONDS:
        return {}
    found = {
        "other_cpu_share": max(0.0, seconds.busy - seconds.own) / capacity,
        "stolen_cpu_share": seconds.stolen / capacity,
        "cpu_wait_share": seconds.waited / seconds.wall,
    }
    return {key: value for key, value in found.items() if not math.isnan(value)}


def disturbance(metrics: Mapping[str, float | None], lanes_share: float = 0.0) -> str | None:
    """Return, in a sentence, what disturbed the timed steps of these metrics; None if nothing is known that did.

    Thresholds: the thread that trains waited more than a quarter of the time for a CPU; a virtual machine's host kept more
    than 3 % of the CPUs from it; other processes took more than a quarter of the CPUs, unless a GPU trained; the CPUs' clock fell by more than 7 %,
    or a GPU was slowed for its heat or power supply; another process was on the GPU. lanes_share: the share of the CPUs that
    the study's other lanes and ranks may take.
    """
    told = {key: value for key, value in metrics.items() if value is not None}
    reasons = [
        (told.get("cpu_wait_share", 0) > MOST_WAITED, "it waited {cpu_wait_share:.0%} of the time for a CPU"),
        (told.get("stolen_cpu_share", 0) > MOST_STOLEN, "its host gave {stolen_cpu_share:.0%} of the CPUs to others"),
        (
            "gpu_clock_ratio" not in told and told.get("other_cpu_share", 0) > MOST_OTHERS + lanes_share,
            "other processes took {other_cpu_share:.0%} of the CPUs",
        ),
        (told.get("clock_ratio", 1) < LEAST_CLOCK_RATIO, "the clock fell to {clock_ratio:.0%} of its highest"),
        (told.get("gpu_slowed", 0) > 0, "the GPU slowed itself down for its heat or power supply"),
        (told.get("other_gpu_processes", 0) > 0, "other processes used the GPU ({other_gpu_processes:.0f})"),
    ]
    return "; ".join(text.format(**told) for holds, text in reasons if holds) or None


# What the kernel tells


def read_cpu_seconds() -> CpuSeconds:
    """Return the counters of the kernel as they are now."""
    busy, stolen = busy_and_stolen(Path("/proc/stat").read_text(), os.sched_getaffinity(0))
    return CpuSeconds(time.perf_counter(), busy, stolen, own=sum(os.times()[:4]), waited=_waited_seconds())


def busy_and_stolen(stat: str, cpus: Iterable[int]) -> tuple[float, float]:
    """Return both from the text of /proc/stat, whose columns are user, nice, system, idle, iowait, irq, softirq and
    steal."""
    names = {f"cpu{number}" for number in cpus}
    rows = [line.split() for line in stat.splitlines() if line.partition(" ")[0] in names]
    ticks = [[int(tick) for tick in row[1:9]] for row in rows]
    busy = sum(sum(row[:3]) + sum(row[5:7]) for row in ticks)
    per_second = os.sysconf("SC_CLK_TCK")
    return busy / per_second, sum(row[7] for row in ticks) / per_second


def _waited_seconds() -> float:
    try:
        return int(Path("/proc/thread-self/schedstat").read_text().split()[1]) / 1e9
    except FileNotFoundError:  # a kernel without CONFIG_SCHED_INFO
        return math.nan


def cpu_hertz() -> float | None:
    """Return the clock of the fastest CPU that this process may use; None where the kernel does not tell it."""
    found = []
    for number in os.sched_getaffinity(0):
        with contextlib.suppress(OSError):
            text = Path(f"/sys/devices/system/cpu/cpu{number}/cpufreq/scaling_cur_freq").read_text()
            found.append(int(text) * 1000.0)
    return max(found, default=None)


# What NVML tells of a GPU


def _num_others(running: Collection[int]) -> int:
    """Return how many of these processes are neither this one nor one that waits for it: the study's driver stays on a GPU on which it has
    built the model. A container may number processes in another way than NVML does; one of them is this one then."""
    own = number = os.getpid()
    if own not in running:
        return max(0, len(running) - 1)
    waiting = set[int]()
    while number:
        waiting.add(number)
        number = _parent_of(number)
    return len(set(running) - waiting)


def _parent_of(process_id: int) -> int:
    """Return 0 where it has none, or has ended."""
    try:
        return int(Path(f"/proc/{process_id}/stat").read_text(errors="replace").rpartition(")")[2].split()[1])
    except OSError:
        return 0


class _Gpu:
    """A GPU's clock, whether it slows itself down, and who else is on it. What the driver does not answer is left
    out: it refuses some of it on a share of a GPU, or without permission."""

    def __init__(self, uuid: str) -> None:
        self._uuid = uuid
        self.found: dict[str, float] = {}
        self._reasons = 0

    def read(self) -> float | None:
        """Take in the GPU's state, and return its clock in Hz."""
        import pynvml

        # Each question by itself: a slice of a GPU has no power of its own.
        unanswered = contextlib.suppress(pynvml.NVMLError)
        with unanswered:
            pynvml.nvmlInit()
            handle = pynvml.nvmlDeviceGetHandleByUUID(self._uuid)
            with unanswered:
                reasons = pynvml.nvmlDeviceGetCurrentClocksThrottleReasons(handle)
                self._reasons |= reasons
                self.found["gpu_throttle_reasons"] = float(self._reasons)  # NVML's bits, the power limit's among them
                self._note("gpu_slowed", float(self._slowdowns(pynvml) & reasons != 0))
            with unanswered:
                running = [process.pid for process in pynvml.nvmlDeviceGetComputeRunningProcesses(handle)]
                self._note("other_gpu_processes", float(_num_others(running)))
            with unanswered:
                self._note("gpu_watts", pynvml.nvmlDeviceGetPowerUsage(handle) / 1000)
            return pynvml.nvmlDeviceGetClockInfo(handle, pynvml.NVML_CLOCK_SM) * 1e6
        return None

    def _note(self, key: str, value: float) -> None:
        self.found[key] = max(value, self.found.get(key, 0.0))

    @staticmethod
    def _slowdowns(pynvml: Any) -> int:
        """Return the bits of all slow-downs but the one for its power limit, at which a busy GPU always is."""
        return (
            pynvml.nvmlClocksThrottleReasonHwSlowdown
            | pynvml.nvmlClocksThrottleReasonSwThermalSlowdown
            | pynvml.nvmlClocksThrottleReasonHwThermalSlowdown
            | pynvml.nvmlClocksThrottleReasonHwPowerBrakeSlowdown
        )
