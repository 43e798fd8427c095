"""The average forgets half of what it knew after its half life in samples, whatever the batch."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from batchscout.trainers.loop import train
from batchscout.trainers.report import Answer
from batchscout.trainers.reporting.evaluation import evaluate
from batchscout.trainers.step.weight_average import WeightAverage
from tests.support.tiny import config, cpu_run


def averaged(steps: list[tuple[int, float]], half_life_samples: int = 64) -> float:
    """The average over a weight that begins at 1,000 and then has these values, each after a step of so many samples."""
    weight = torch.nn.Parameter(torch.tensor([1000.0]))
    average = WeightAverage([weight], half_life_samples)
    for effective_batch_size, value in steps:
        with torch.no_grad():
            weight.fill_(value)
        average.update(effective_batch_size)
    with average.in_place():
        found = weight.item()
    assert weight.item() == steps[-1][1]
    return found


def weighted_mean(steps: list[tuple[int, float]], half_life_samples: int = 64) -> float:
    """What a step of B samples weighs that ended s samples ago: the integral of 0.5^(s / half-life) over its samples."""
    total = weights = ended = 0.0
    for effective_batch_size, value in reversed(steps):
        began = ended + effective_batch_size
        weight = 0.5 ** (ended / half_life_samples) - 0.5 ** (began / half_life_samples)
        total, weights, ended = total + weight * value, weights + weight, began
    return total / weights


@pytest.mark.parametrize("effective_batch_size", [1, 8, 64])
def test_after_the_half_life_the_weights_of_then_count_half(effective_batch_size: int) -> None:
    num_steps = 64 // effective_batch_size
    steps = [(effective_batch_size, 1.0)] * (20 * num_steps) + [(effective_batch_size, 0.0)] * num_steps
    assert averaged(steps) == pytest.approx(0.5, rel=1e-5)


@pytest.mark.parametrize("num_steps", [1, 2, 50])
def test_the_initial_weights_do_not_count(num_steps: int) -> None:
    assert averaged([(8, 3.0)] * num_steps) == pytest.approx(3.0, rel=1e-6)


@pytest.mark.parametrize("batches", [[8], [1], [200], [4, 4, 8, 16, 32]])
def test_the_average_of_a_line_is_its_exact_weighted_mean_also_where_the_batch_grows(batches: list[int]) -> None:
    steps = [(batches[i * len(batches) // 60], float(i)) for i in range(60)]
    for count in (2, 5, 60):
        assert averaged(steps[:count]) == pytest.approx(weighted_mean(steps[:count]), rel=1e-5)


def test_the_average_is_what_is_evaluated_and_the_run_trains_on_as_without_it() -> None:
    plain, averaged = cpu_run(config()), cpu_run(config(ema_half_life_samples=16))
    losses = []
    for run in (plain, averaged):
        for _ in range(8):
            run.step()
        losses.append(evaluate(run)["val_loss"])
    assert losses[0] != losses[1]
    assert all(a.equal(b) for a, b in zip(plain.parameters, averaged.parameters, strict=True))
    assert averaged.average is not None
    with averaged.average.in_place():
        averaged.average, kept = None, averaged.average
        assert evaluate(averaged)["val_loss"] == losses[1]
        averaged.average = kept


def test_a_run_that_stops_and_goes_on_has_the_same_average(tmp_path: Path) -> None:
    trial = config(sample_budget=64, evaluations=(24,), ema_half_life_samples=16)
    ends: list[float] = []
    train(trial, lambda report: ends.append(report.metrics["val_loss"]), tmp_path / "whole")
    train(trial, lambda report: Answer.STOP, tmp_path / "parts")
    train(trial, lambda report: ends.append(report.metrics["val_loss"]), tmp_path / "parts")
    assert ends[1] == ends[-1]
