"""What is promised on a GPU alone: `pytest -m cuda -n 0`. All other tests do not see one."""

from __future__ import annotations

import math
import os
from pathlib import Path
from typing import Any

import pytest
import torch

from batchscout.trainers.data.batches import move_aside
from batchscout.trainers.data.draws import drawing_on_device_from
from batchscout.trainers.device.device import pick_device
from batchscout.trainers.device.memory import memory_of
from batchscout.trainers.device.out_of_memory import is_out_of_memory
from batchscout.trainers.loop import train
from batchscout.trainers.report import Report
from batchscout.trainers.run import Run
from tests.support.tiny import assert_equal_bit_by_bit, config, newest_state, stop_at

MIB = 1 << 20


def test_tests_that_do_not_ask_for_a_gpu_see_none() -> None:
    assert os.environ["CUDA_VISIBLE_DEVICES"] == ""
    assert not torch.cuda.is_available()


def ended(directory: Path, *stops: int, **changes: Any) -> tuple[dict[str, Any], float]:
    """The last state and loss of a run that is stopped at these rungs, and goes on each time."""
    losses: list[float] = []
    stop = stop_at(*stops)

    def report(said: Report) -> Any:
        losses.append(said.metrics.get("final_loss", math.nan))
        return stop(said)

    trial = config(rungs=(16, 32), evaluations=(64,), **changes)
    for _ in range(len(stops) + 1):
        train(trial, report, directory)
    return newest_state(directory / "checkpoints"), losses[-1]


@pytest.mark.cuda
def test_a_resumed_run_is_the_same_bit_by_bit_where_it_is_deterministic_and_else_within_a_thousandth(
    tmp_path: Path,
) -> None:
    whole, _ = ended(tmp_path / "whole", deterministic=True)
    resumed, _ = ended(tmp_path / "resumed", 16, 32, deterministic=True)
    assert_equal_bit_by_bit(whole, resumed)
    _, loss = ended(tmp_path / "loose-whole")
    _, loss_of_resumed = ended(tmp_path / "loose-resumed", 16, 32)
    assert loss_of_resumed == pytest.approx(loss, abs=1e-3)


@pytest.mark.cuda
def test_after_running_out_of_memory_the_device_answers_and_its_memory_is_back(tmp_path: Path) -> None:
    train(config(), lambda _: None, tmp_path / "before")
    too_large = config(micro_batch_size=1 << 16, sample_budget=1 << 16, memory_limit_bytes=64 * MIB)
    before = memory_of(pick_device()).bytes_kept()
    assert before is not None
    with pytest.raises(RuntimeError) as caught:
        train(too_large, lambda _: None, tmp_path / "too_large")
    assert is_out_of_memory(caught.value)
    caught.value.__traceback__ = None
    del caught
    after = memory_of(pick_device()).bytes_kept()
    assert after is not None
    assert after - before <= 64 * MIB
    train(config(), lambda _: None, tmp_path / "after")


@pytest.mark.cuda
def test_what_an_optimizer_draws_is_decided_by_its_seed_and_moves_no_generator() -> None:
    device = pick_device()
    torch.cuda.manual_seed(1)
    expected = torch.rand(4, device=device)
    torch.cuda.manual_seed(1)
    drawn = []
    for seed in (7, 7, 8):
        with drawing_on_device_from(seed, device):
            drawn.append(torch.rand(4, device=device))
    assert torch.equal(drawn[0], drawn[1])
    assert not torch.equal(drawn[0], drawn[2])
    assert torch.equal(torch.rand(4, device=device), expected)


@pytest.mark.cuda
def test_batches_that_are_copied_aside_arrive_whole() -> None:
    device = pick_device()
    busy = torch.rand(4096, 4096, device=device)
    for number in range(50):
        moved = move_aside({"x": torch.full((1 << 20,), float(number))}, device)
        busy = busy @ busy / busy.norm()
        assert (moved["x"] == number).all()


@pytest.mark.cuda
def test_a_timing_lasts_as_long_as_it_is_to_and_tells_of_the_gpu(tmp_path: Path) -> None:
    ends: list[Report] = []
    train(config(gpu_timing_seconds=1.0), ends.append, tmp_path)
    found = ends[-1].metrics
    assert found["samples_seen"] == 64
    assert found["train_seconds"] >= 1.0
    assert found["clock_hertz"] > 1e8
    assert found["gpu_watts"] > 10


@pytest.mark.cuda
def test_a_step_does_not_wait_for_the_device() -> None:
    run = Run(config(), pick_device())
    run.step()
    run.read()
    torch.cuda.set_sync_debug_mode("error")
    try:
        run.step()
    finally:
        torch.cuda.set_sync_debug_mode("default")
