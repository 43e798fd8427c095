"""The average forgets half of what it knew after its half life in samples, whatever the batch."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.support.tiny import config, cpu_run
from trainers.evaluation import evaluate
from trainers.loop import train
from trainers.report import Answer
from trainers.weight_average import WeightAverage


@pytest.mark.parametrize("effective_batch_size", [1, 8, 64])
def test_after_the_half_life_the_weights_of_then_count_half(effective_batch_size: int) -> None:
    weight = torch.nn.Parameter(torch.tensor([1.0]))
    average = WeightAverage([weight], half_life_samples=64, effective_batch_size=effective_batch_size)
    with torch.no_grad():
        weight.zero_()
    for _ in range(64 // effective_batch_size):
        average.update()
    with average.in_place():
        assert weight.item() == pytest.approx(0.5, rel=1e-5)
    assert weight.item() == 0.0


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
