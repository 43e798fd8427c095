"""The average forgets half of what it knew after its half life in samples, whatever the batch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from batchscout.trainers.loop import train
from batchscout.trainers.report import Answer
from batchscout.trainers.reporting.evaluation import evaluate
from batchscout.trainers.step.weight_average import WeightAverage
from tests.support.tiny import config, cpu_run

LOSS = {"type": "cross_entropy", "targets": "targets"}


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


class Normed(torch.nn.Module):
    def __init__(self, vocab_size: int) -> None:
        super().__init__()
        self.embedding, self.norm = torch.nn.Embedding(vocab_size, 8), torch.nn.BatchNorm1d(8)
        self.head = torch.nn.Linear(8, vocab_size)

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        return self.head(self.norm(self.embedding(input_ids).transpose(1, 2)).transpose(1, 2))


def test_the_statistics_of_batch_norm_are_averaged_with_the_weights_that_they_are_of() -> None:
    model = {"target": "tests.trainers.step.test_weight_average:Normed"}
    run = cpu_run(config(model=model, loss=LOSS, ema_half_life_samples=16, learning_rate=0.05))
    norm = next(one for one in run.module.modules() if isinstance(one, torch.nn.BatchNorm1d))
    assert norm.running_mean is not None
    assert run.average is not None
    steps = []
    for _ in range(6):
        run.step()
        steps.append((run.config.effective_batch_size, norm.running_mean[0].item()))
    with run.average.in_place():
        assert norm.running_mean[0].item() == pytest.approx(weighted_mean(steps, 16), rel=1e-4)
    assert norm.running_mean[0].item() == steps[-1][1]


@pytest.mark.parametrize(
    "model", [{}, {"model": {"target": "tests.trainers.step.test_weight_average:Normed"}}], ids=["plain", "normed"]
)
def test_a_run_that_stops_and_goes_on_has_the_same_average(tmp_path: Path, model: dict[str, Any]) -> None:
    loss: dict[str, Any] = {"loss": LOSS} if model else {}
    trial = config(sample_budget=64, evaluations=(24,), ema_half_life_samples=16, **model, **loss)
    ends: list[float] = []
    train(trial, lambda report: ends.append(report.metrics["val_loss"]), tmp_path / "whole")
    train(trial, lambda report: Answer.STOP, tmp_path / "parts")
    train(trial, lambda report: ends.append(report.metrics["val_loss"]), tmp_path / "parts")
    assert ends[1] == ends[-1]
