"""A busy machine is noticed, and a quiet one is not called busy."""

from __future__ import annotations

import math
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from types import SimpleNamespace
from unittest.mock import Mock

import pytest

from batchscout.trainers.device.machine_load import (
    LEAST_CPU_SECONDS,
    CpuSeconds,
    LoadMeter,
    busy_and_stolen,
    cpu_shares,
    disturbance,
    read_cpu_seconds,
)
from tests.support.processes import next_line

STAT = """cpu  100 0 0 900 0 0 0 0 0 0
cpu0 10 20 30 1000 500 4 6 70 5 0
cpu1 1000 0 0 0 0 0 0 0 0 0
cpu10 9000 0 0 0 0 0 0 9000 0 0
intr 123 4 5
"""


def test_busy_is_all_work_and_no_waiting_on_the_cpus_that_this_process_may_use() -> None:
    assert busy_and_stolen(STAT, [0]) == (0.70, 0.70)
    assert busy_and_stolen(STAT, [0, 1]) == (10.70, 0.70)


def test_shares_are_of_all_that_the_cpus_could_do_and_waiting_is_of_the_time() -> None:
    seconds = CpuSeconds(wall=10.0, busy=12.0, stolen=1.0, own=7.0, waited=2.0)
    assert cpu_shares(seconds, 2) == {"other_cpu_share": 0.25, "stolen_cpu_share": 0.05, "cpu_wait_share": 0.2}


def test_what_the_kernel_does_not_tell_and_a_time_too_short_to_tell_have_no_figures() -> None:
    assert "cpu_wait_share" not in cpu_shares(CpuSeconds(wall=10.0, waited=math.nan), 2)
    assert cpu_shares(CpuSeconds(wall=LEAST_CPU_SECONDS / 4), 2) == {}


def test_what_lies_between_two_stretches_does_not_count() -> None:
    first, second = (CpuSeconds(wall=start, busy=2 * start, own=start) for start in (10.0, 100.0))
    ends = [CpuSeconds(wall=begin.wall + 1, busy=begin.busy + 2, own=begin.own + 1) for begin in (first, second)]
    assert CpuSeconds().plus(first, ends[0]).plus(second, ends[1]) == CpuSeconds(wall=2.0, busy=4.0, own=2.0)


@pytest.mark.parametrize(
    ("metrics", "reason"),
    [
        ({"cpu_wait_share": 0.26}, "it waited 26% of the time for a CPU"),
        ({"stolen_cpu_share": 0.04}, "its host gave 4% of the CPUs to others"),
        ({"other_cpu_share": 0.26}, "other processes took 26% of the CPUs"),
        ({"clock_ratio": 0.9}, "the clock fell to 90% of its highest"),
        ({"gpu_slowed": 1.0}, "the GPU slowed itself down for its heat or power supply"),
        ({"other_gpu_processes": 2.0}, "other processes used the GPU (2)"),
    ],
)
def test_each_disturbance_is_named_with_its_number(metrics: dict[str, float], reason: str) -> None:
    quiet = {"cpu_wait_share": 0.24, "stolen_cpu_share": 0.02, "other_cpu_share": 0.24, "clock_ratio": 0.95}
    assert disturbance(quiet | {"gpu_slowed": 0.0, "other_gpu_processes": 0.0}) is None
    assert disturbance(quiet | metrics) == reason


def test_several_disturbances_are_all_named_and_without_figures_nothing_is_claimed() -> None:
    told = disturbance({"cpu_wait_share": 0.5, "other_cpu_share": 0.5})
    assert told == "it waited 50% of the time for a CPU; other processes took 50% of the CPUs"
    assert disturbance({}) is None
    assert disturbance({"cpu_wait_share": None}) is None


def test_where_a_gpu_trains_what_others_do_on_the_cpus_is_no_disturbance_unless_the_trial_waited() -> None:
    """On a host of eight GPUs the data of seven other runs take more than a quarter of the CPUs all day."""
    assert disturbance({"other_cpu_share": 0.6, "gpu_clock_ratio": 0.8}) is None
    waited = disturbance({"other_cpu_share": 0.6, "cpu_wait_share": 0.3, "gpu_clock_ratio": 0.8})
    assert waited == "it waited 30% of the time for a CPU"


def test_the_studys_other_lanes_are_no_disturbance() -> None:
    assert disturbance({"other_cpu_share": 0.7}, lanes_share=0.5) is None
    assert disturbance({"other_cpu_share": 0.8}, lanes_share=0.5) is not None


class DriverOfAGpu(SimpleNamespace):
    """NVML as it answers for a GPU, in turn: (SM clock in MHz, milliwatts, reasons). Bits and names: nvidia-ml-py 13.6."""

    NVMLError = RuntimeError
    NVML_CLOCK_SM = 1
    nvmlClocksThrottleReasonHwSlowdown = 0x08
    nvmlClocksThrottleReasonSwThermalSlowdown = 0x20
    nvmlClocksThrottleReasonHwThermalSlowdown = 0x40
    nvmlClocksThrottleReasonHwPowerBrakeSlowdown = 0x80

    def __init__(self, *states: tuple[int, int, int], pids: tuple[int, ...] = (os.getpid(),)) -> None:
        self.pids = pids
        clocks, watts, reasons = (iter(figures) for figures in zip(*states, strict=True))
        super().__init__(
            num_states=len(states),
            nvmlInit=lambda: None,
            nvmlDeviceGetHandleByUUID=lambda uuid: uuid,
            nvmlDeviceGetCurrentClocksThrottleReasons=lambda _: next(reasons),
            nvmlDeviceGetComputeRunningProcesses=lambda _: [SimpleNamespace(pid=pid) for pid in self.pids],
            nvmlDeviceGetClockInfo=lambda *_: next(clocks),
            nvmlDeviceGetPowerUsage=lambda _: next(watts),
        )


POWER_CAP = 0x04


def metrics_of_a_gpu(monkeypatch: pytest.MonkeyPatch, driver: DriverOfAGpu) -> dict[str, float]:
    """After a look at each of its states."""
    monkeypatch.setitem(sys.modules, "pynvml", driver)
    meter = LoadMeter("GPU-1")
    for _ in range(driver.num_states):
        meter.look()
    return meter.metrics()


def test_a_gpus_clock_power_and_reasons_are_told_and_its_power_limit_is_no_disturbance(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    found = metrics_of_a_gpu(monkeypatch, DriverOfAGpu((1980, 650_000, 0), (1400, 700_000, POWER_CAP)))
    told = {"clock_hertz": 1.4e9, "gpu_watts": 700.0, "gpu_throttle_reasons": 4.0, "gpu_slowed": 0.0}
    assert {key: found[key] for key in told} == told
    assert found["gpu_clock_ratio"] == pytest.approx(1400 / 1980)
    assert disturbance(found) is None


@pytest.mark.parametrize("refused", ["Reasons", "Processes", "PowerUsage"])
def test_what_a_gpu_does_not_answer_costs_no_other_figure(monkeypatch: pytest.MonkeyPatch, refused: str) -> None:
    driver = DriverOfAGpu((1980, 650_000, 0))
    (name,) = [name for name in vars(driver) if name.startswith("nvml") and name.endswith(refused)]
    setattr(driver, name, Mock(side_effect=DriverOfAGpu.NVMLError("Not Supported")))
    found = metrics_of_a_gpu(monkeypatch, driver).keys()
    answers = {"Reasons": "gpu_slowed", "Processes": "other_gpu_processes", "PowerUsage": "gpu_watts"}
    expected = {"clock_hertz", *(key for question, key in answers.items() if question != refused)}
    assert expected <= found
    assert answers[refused] not in found


@pytest.mark.parametrize(
    ("pids", "others"),
    [
        ((os.getpid(),), 0),
        ((os.getpid(), os.getppid()), 0),
        ((os.getpid(), os.getppid(), 2**30), 1),
        ((2**30, 2**30 + 1), 1),
        ((), 0),
    ],
    ids=["alone", "beside the driver", "and another", "numbered otherwise, as outside of a container", "unlisted"],
)
def test_whoever_waits_for_this_process_is_no_other_one(
    monkeypatch: pytest.MonkeyPatch, pids: tuple[int, ...], others: int
) -> None:
    """A study's driver that has built a model on the GPU stays on it as long as the study runs."""
    found = metrics_of_a_gpu(monkeypatch, DriverOfAGpu((1980, 650_000, 0), pids=pids))
    assert found["other_gpu_processes"] == others


def test_a_gpu_that_was_hot_once_was_disturbed_though_it_is_cool_again(monkeypatch: pytest.MonkeyPatch) -> None:
    found = metrics_of_a_gpu(monkeypatch, DriverOfAGpu((1980, 650_000, 0x20), (1980, 650_000, 0)))
    assert disturbance(found) == "the GPU slowed itself down for its heat or power supply"


def test_every_reason_that_a_gpu_gave_for_a_slower_clock_is_among_those_told(monkeypatch: pytest.MonkeyPatch) -> None:
    states = (1980, 650_000, POWER_CAP), (1980, 650_000, 0x20), (1980, 650_000, POWER_CAP), (1980, 650_000, 0)
    found = metrics_of_a_gpu(monkeypatch, DriverOfAGpu(*states))
    assert found["gpu_throttle_reasons"] == POWER_CAP | 0x20


@pytest.fixture
def hog() -> Iterator[None]:
    """Another process that never rests, on the one CPU that is left to this process, too."""
    cpus = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(cpus)})
    process = subprocess.Popen([sys.executable, "-c", "print(flush=True)\nwhile True: pass"], stdout=subprocess.PIPE)
    try:
        next_line(process)
        yield
    finally:
        process.kill()
        process.communicate()
        os.sched_setaffinity(0, cpus)


def work(seconds: float) -> None:
    until = time.thread_time() + seconds
    while time.thread_time() < until:
        pass


@pytest.mark.slow
def test_another_process_at_work_is_noticed(hog: None) -> None:
    meter = LoadMeter()
    meter.start()
    work(0.7)
    meter.stop()
    metrics = meter.metrics()
    assert metrics["other_cpu_share"] > 0.2
    assert metrics["cpu_wait_share"] > 0.2
    assert disturbance(metrics) is not None


def test_a_processs_own_work_is_not_that_of_others() -> None:
    begin = read_cpu_seconds()
    work(0.3)
    seconds = CpuSeconds().plus(begin, read_cpu_seconds())
    assert seconds.own == pytest.approx(0.3, abs=0.05)
    assert seconds.busy >= seconds.own - 0.05
    assert seconds.waited <= seconds.wall - 0.3 + 0.01
