"""What seconds per step are made into."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from batchscout.trainers import loop
from batchscout.trainers.config import DevicePeak
from batchscout.trainers.loop import train
from batchscout.trainers.report import Report
from batchscout.trainers.reporting.reporter import Reporter
from batchscout.trainers.run import Run
from batchscout.trainers.speed.flops import Work
from batchscout.trainers.speed.meter import Meter
from batchscout.trainers.speed.throughput import (
    NUM_WARMUP_STEPS,
    RECENT_STEPS,
    Pace,
    StepClock,
    steps_to_time,
    utilisation,
)
from tests.support.tiny import config, cpu_run


def test_utilisation_is_the_counted_work_over_the_peak() -> None:
    peak = DevicePeak(flops_per_second=1e6, source="measured")
    found = utilisation(Work(model_flops=600.0, hardware_flops=800.0), peak, samples_per_second=1_000.0)
    told = {"model_flops_per_sample": 600.0, "assumed_peak_flops": 1e6, "peak_is_measured": 1.0}
    assert found == pytest.approx({"mfu": 0.6, "hfu": 0.8} | told)


def test_what_is_not_known_has_no_utilisation() -> None:
    peak = DevicePeak(flops_per_second=1e6, source="data sheet")
    assert "hfu" not in utilisation(Work(model_flops=1.0, hardware_flops=None), peak, 1.0)
    assert utilisation(None, peak, 1.0) == {}


def test_more_than_all_of_a_device_is_not_told() -> None:
    peak = DevicePeak(flops_per_second=1e6, source="measured")
    assert {"mfu", "hfu"} & utilisation(Work(900.0, 1200.0), peak, 1_000.0).keys() == {"mfu"}
    assert {"mfu", "hfu"} & utilisation(Work(1300.0, 1400.0), peak, 1_000.0).keys() == set()


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


def test_a_timing_takes_the_steps_that_its_seconds_need_and_none_where_they_were_timed_already() -> None:
    pace = pace_of([9.0] * NUM_WARMUP_STEPS + [0.01] * 10, [1.0] * (NUM_WARMUP_STEPS + 10))
    assert pace.timed_seconds() == pytest.approx(0.1)
    assert steps_to_time(pace, 0.09, had_statistics=False) == 0
    for had_statistics in (False, True):
        wanted = steps_to_time(pace, 2.0, had_statistics=had_statistics)
        assert 2.0 <= (wanted - NUM_WARMUP_STEPS) * 0.01 <= 2.6
    nothing_timed = pace_of([9.0] * NUM_WARMUP_STEPS, [1.0] * NUM_WARMUP_STEPS)
    assert steps_to_time(nothing_timed, 2.0, had_statistics=False) == 0


def test_steps_that_were_measured_on_the_way_are_timed_again_however_long_they_took() -> None:
    pace = pace_of([9.0] * NUM_WARMUP_STEPS + [3.0] * 4, [1.0] * (NUM_WARMUP_STEPS + 4))
    assert steps_to_time(pace, 2.0, had_statistics=False) == 0
    assert steps_to_time(pace, 2.0, had_statistics=True) == NUM_WARMUP_STEPS + 1


def test_timed_steps_tell_the_speed_and_are_no_part_of_the_run() -> None:
    run = cpu_run(config(), steps=NUM_WARMUP_STEPS + 2)
    run.read()
    before = run.metrics()
    run.time_steps(NUM_WARMUP_STEPS + 4)
    after = run.metrics()
    assert after["update_norm"] == before["update_norm"], "what takes passes over the weights is no part of their time"
    assert (run.num_steps, run.samples_seen) == (NUM_WARMUP_STEPS + 2, 4 * (NUM_WARMUP_STEPS + 2))
    assert after["train_seconds"] > before["train_seconds"]
    assert after["step_seconds"] != before["step_seconds"]
    assert len(run.meter.noise.steps) == NUM_WARMUP_STEPS + 2, "no statistics were taken of them"
    run.step()
    run.read()
    assert len(run.meter.noise.steps) == NUM_WARMUP_STEPS + 3
    mean_square, square_of_mean, _ = run.meter.noise.steps[-1]
    assert mean_square == pytest.approx(square_of_mean, rel=1e-5), "of one micro-batch, and of none that was timed"


def test_a_cpu_is_timed_up_to_the_budget_alone(tmp_path: Path) -> None:
    ends: list[Report] = []
    train(config(gpu_timing_seconds=1e9), ends.append, tmp_path)
    assert [end.metrics["samples_seen"] for end in ends] == [64]


def test_a_gpu_is_timed_for_as_long_as_asked_once_the_budget_is_trained_on_and_before_the_run_tells_its_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The run is on the CPU, and told only while it decides that it is on a GPU."""
    runs: list[Run] = []
    told: list[tuple[str, int]] = []
    decide = Reporter.time_steps

    def kept(*args: Any) -> Run:
        runs.append(Run(*args))
        return runs[-1]

    def decide_as_on_a_gpu(reporter: Reporter) -> None:
        runs[0].device = torch.device("cuda", 0)
        decide(reporter)
        runs[0].device = torch.device("cpu")

    def timed(run: Run, num_steps: int) -> None:
        told.append(("timed" if num_steps > NUM_WARMUP_STEPS else "warmed up", run.samples_seen))

    monkeypatch.setattr(loop, "Run", kept)
    monkeypatch.setattr(Reporter, "time_steps", decide_as_on_a_gpu)
    monkeypatch.setattr(Run, "time_steps", timed)
    train(config(gpu_timing_seconds=1e9), lambda report: told.append((report.kind, report.samples_seen)), tmp_path)
    assert told == [("timed", 64), ("end", 64)]


def test_a_gpu_that_was_timed_for_long_enough_keeps_its_rates(tmp_path: Path) -> None:
    """The run is on the CPU, and told only here that it is on a GPU."""
    run = cpu_run(config(gpu_timing_seconds=1e-9, statistics=False), steps=NUM_WARMUP_STEPS + 2)
    reporter = Reporter(run, lambda _: None, tmp_path, "token")
    run.device = torch.device("cuda", 0)
    reporter.time_steps()
    assert run.meter.pace.median_step_seconds() is not None
    assert run.num_steps == NUM_WARMUP_STEPS + 2
