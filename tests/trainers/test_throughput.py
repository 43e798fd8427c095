"""What seconds per step are made into."""

from __future__ import annotations

import time
from collections.abc import Sequence

import pytest
import torch

from tests.support.tiny import config
from trainers.config import DevicePeak
from trainers.flops import Work
from trainers.meter import Meter
from trainers.throughput import NUM_WARMUP_STEPS, RECENT_STEPS, Pace, StepClock, utilisation


def test_utilisation_is_the_counted_work_over_the_peak() -> None:
    peak = DevicePeak(flops_per_second=1e6, source="measured")
    found = utilisation(Work(model_flops=600.0, hardware_flops=800.0), peak, samples_per_second=1_000.0)
    told = {"model_flops_per_sample": 600.0, "assumed_peak_flops": 1e6, "peak_is_measured": 1.0}
    assert found == pytest.approx({"mfu": 0.6, "hfu": 0.8} | told)


def test_what_is_not_known_has_no_utilisation() -> None:
    peak = DevicePeak(flops_per_second=1e6, source="data sheet")
    assert "hfu" not in utilisation(Work(model_flops=1.0, hardware_flops=None), peak, 1.0)
    assert utilisation(None, peak, 1.0) == {}


@pytest.mark.parametrize("world_size", [1, 4])
def test_a_run_tells_the_utilisation_of_one_rank_against_the_peak_that_it_is_given(world_size: int) -> None:
    given = {"float32": {"flops_per_second": 1e9, "source": "data sheet"}}
    trial = config(world_size=world_size, device_peaks=given)
    meter = Meter(trial, torch.device("cpu"), 0.0)
    for _ in range(NUM_WARMUP_STEPS + 1):
        meter.pace.add(2.0, 1.0)
    found = meter.metrics(torch.nn.Linear(1, 1), 64, Work(model_flops=1e6, hardware_flops=1e6))
    per_rank = trial.micro_batch_size / 2.0
    assert found["mfu"] == pytest.approx(per_rank * 1e6 / 1e9)
    assert found["peak_is_measured"] == 0.0


def test_the_machines_load_is_that_of_the_timed_steps_and_of_nothing_between_them() -> None:
    clock = StepClock(torch.device("cpu"))
    began = time.perf_counter()
    clock.start()
    clock.end_of_step()
    clock.read()
    timed = time.perf_counter() - began
    while time.perf_counter() < began + timed + 0.05:  # an evaluation, say
        pass
    clock.start()
    clock.end_of_step()
    clock.read()
    assert 0.0 < clock.load.seconds.wall <= time.perf_counter() - began - 0.05


def pace_of(seconds: Sequence[float], amounts: Sequence[float]) -> Pace:
    pace = Pace()
    for second, amount in zip(seconds, amounts, strict=True):
        pace.add(second, amount)
    return pace


def test_the_rate_is_the_median_over_steps_of_each_steps_own_targets() -> None:
    warm_up = [9.0] * NUM_WARMUP_STEPS
    pace = pace_of([*warm_up, 1.0, 2.0, 4.0], [1.0] * NUM_WARMUP_STEPS + [100.0, 200.0, 800.0])
    assert pace.median_rate() == 100.0
    assert pace.median_step_seconds() == 2.0
    assert pace.total_seconds() == sum(warm_up) + 7.0
    assert pace_of(warm_up, warm_up).median_rate() is None


def test_a_long_run_says_how_fast_it_is_now() -> None:
    pace = pace_of([1.0] * 3 * RECENT_STEPS + [2.0] * RECENT_STEPS, [10.0] * 4 * RECENT_STEPS)
    assert pace.median_step_seconds() == 2.0
    assert pace.median_rate() == 5.0
    assert pace.total_seconds() == 5.0 * RECENT_STEPS
