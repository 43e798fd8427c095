"""The generalisation gap of a run is what it is defined as, and opens where a model learns its samples by heart."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from batchscout.trainers.loop import train
from batchscout.trainers.report import Answer, Report
from batchscout.trainers.reporting.evaluation import evaluate, generalisation
from batchscout.trainers.run import Run
from tests.support.tiny import config, cpu_run


def mean_loss(run: Run, samples: list[dict[str, torch.Tensor]]) -> float:
    run.module.eval()
    stacked = {key: torch.stack([sample[key] for sample in samples]) for key in samples[0]}
    with torch.no_grad():
        loss_sum, num_targets = run.module(stacked)
    run.module.train()
    return (loss_sum / num_targets).item()


@pytest.mark.parametrize("micro_batch_size", [1, 3, 4])
def test_it_is_the_validation_loss_less_that_over_the_first_samples_of_the_run_without_dropout(
    micro_batch_size: int,
) -> None:
    run = cpu_run(
        config(padded=True, dropout=0.5, micro_batch_size=micro_batch_size, evaluation_samples=7, sample_budget=12)
    )
    while run.samples_seen < 12:
        run.step()
    val_loss = evaluate(run)["val_loss"]
    measured = generalisation(run, val_loss)
    expected = mean_loss(run, [run.first_samples[index] for index in run.order.indices(range(7))])
    assert measured["train_loss"] == pytest.approx(expected, rel=1e-5)
    assert measured["generalisation_gap"] == val_loss - measured["train_loss"]
    assert run.module.training


def test_samples_that_the_run_has_not_met_do_not_count() -> None:
    run = cpu_run(config(micro_batch_size=4, evaluation_samples=16), steps=1)
    met = [run.first_samples[index] for index in run.order.indices(range(4))]
    assert generalisation(run, 0.0)["train_loss"] == pytest.approx(mean_loss(run, met), rel=1e-5)


def gap_of(directory: Path, **changes: Any) -> dict[str, float]:
    """What a run reports of it at its end, and nowhere else."""
    reports: list[Report] = []

    def report(said: Report) -> Answer:
        reports.append(said)
        return Answer.GO_ON

    train(config(**changes), report, directory)
    assert not any("generalisation_gap" in said.metrics for said in reports if said.kind != "end")
    return {key: value for key, value in reports[-1].metrics.items() if key in ("train_loss", "generalisation_gap")}


@pytest.mark.slow
def test_it_opens_where_few_samples_are_met_again_and_again_and_not_where_each_is_met_once(tmp_path: Path) -> None:
    """0.3 is more than 64 samples of 12 targets leave to chance; eight samples met 64 times are known by heart."""
    shared = {"sample_budget": 512, "evaluations": (512,), "evaluation_samples": 64}
    once, again = (
        gap_of(tmp_path / str(num_train), **shared, data={"target": "tests.support.tiny:data", "kwargs": {"num_train": num_train, "num_val": 64}})
        for num_train in (512, 8)
    )  # fmt: skip
    assert abs(once["generalisation_gap"]) < 0.3
    assert again["generalisation_gap"] > 1.0
    assert again["train_loss"] < once["train_loss"]


def test_a_short_measurement_has_none(tmp_path: Path) -> None:
    assert gap_of(tmp_path) == {}
