"""Schedules are written in samples, so that runs of different batch sizes are comparable."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from batchscout.trainers.step.learning_rate import learning_rate_of_step
from tests.support.every import for_every
from tests.support.tiny import config, cpu_run

PEAK = 0.5
BUDGET = 1024
SHAPES = ["warmup_stable_decay", "cosine", "constant"]


def rate(samples: int, *, micro_batch_size: int = 8, warmup: int = 0, budget: int = BUDGET, **schedule: Any) -> float:
    """The rate of the step that ends at so many samples."""
    trial = config(
        learning_rate=PEAK,
        warmup_samples=warmup,
        sample_budget=budget,
        micro_batch_size=micro_batch_size,
        schedule=schedule,
    )
    return learning_rate_of_step(trial, samples - trial.effective_batch_size)


@pytest.mark.parametrize("shape", SHAPES)
def test_warm_up_is_linear_in_samples(shape: str) -> None:
    assert [rate(s, warmup=128, type=shape) for s in (16, 64, 128)] == pytest.approx(
        [PEAK / 8, PEAK / 2, PEAK], rel=1e-3
    )


def test_warmup_stable_decay_is_flat_and_then_falls_linearly_to_one_steps_share() -> None:
    at = {s: rate(s, type="warmup_stable_decay", decay=0.25, micro_batch_size=32) for s in range(32, BUDGET + 1, 32)}
    assert all(value == PEAK for s, value in at.items() if s <= 0.75 * BUDGET)
    falls = [at[s] - at[s + 32] for s in range(768, BUDGET, 32)]
    assert falls == pytest.approx([PEAK / 9] * 8)  # eight steps of the anneal, and the last one still moves
    assert at[BUDGET] == pytest.approx(PEAK / 9)


def test_cosine_falls_from_the_end_of_warm_up_to_zero_one_step_past_the_budget() -> None:
    at = [rate(s, type="cosine", warmup=24, micro_batch_size=8) for s in (24, 528, 1024, 1032)]
    assert at == pytest.approx([PEAK, PEAK / 2, at[2], 0.0])
    assert 0 < at[2] < PEAK / 1000, "the last step still moves"


def test_constant_stays() -> None:
    assert {rate(s, type="constant") for s in (8, 512, 1024, 1032)} == {PEAK}


@for_every(shape=SHAPES, micro_batch_size=[1, 16, 128])
def test_at_equal_samples_the_rate_is_the_same_for_every_batch_size(shape: str, micro_batch_size: int) -> None:
    """Exactly where the rate is constant or warms up; while it falls, to a step's share of the fall."""
    for samples in range(128, BUDGET + 1, 128):
        here, there = (rate(samples, type=shape, warmup=256, micro_batch_size=m) for m in (micro_batch_size, 8))
        falls_from = {"warmup_stable_decay": 0.8 * BUDGET, "cosine": 256, "constant": BUDGET}[shape]
        share = max(micro_batch_size, 8) / (BUDGET - falls_from) if samples > falls_from else 0.0
        tolerance = PEAK * share * math.pi / 2
        assert abs(here - there) <= tolerance


@pytest.mark.parametrize("shape", SHAPES)
def test_a_step_past_the_budget_has_a_rate_too(shape: str) -> None:
    assert 0 <= rate(1040, budget=1030, micro_batch_size=16, type=shape) <= PEAK


@pytest.mark.parametrize("optimizer", ["adamw", "sgd"])
def test_weight_decay_is_on_matrices_only(optimizer: str) -> None:
    run = cpu_run(config(optimizer={"type": optimizer, "weight_decay": 0.3}))
    decays = {id(p): group["weight_decay"] for group in run.optimizer.param_groups for p in group["params"]}
    assert {p.dim(): decays[id(p)] for p in run.parameters} == {2: 0.3, 1: 0.0}


def test_a_step_uses_the_rate_of_the_samples_it_ends_at() -> None:
    run = cpu_run(config(micro_batch_size=4, gradient_accumulation_steps=2, warmup_samples=32, learning_rate=PEAK))
    rates = []
    for _ in range(4):
        run.step()
        rates.append(run.optimizer.param_groups[0]["lr"])
    assert rates == pytest.approx([PEAK / 4, PEAK / 2, PEAK * 3 / 4, PEAK])


def test_an_unused_frozen_parameter_is_left_out() -> None:
    run = cpu_run(config(model={"target": "tests.trainers.step.test_learning_rate:Frozen"}), steps=1)
    assert run.module.get_parameter("frozen.weight").equal(torch.ones(2, 2))
    assert sum(len(group["params"]) for group in run.optimizer.param_groups) == 1


class Frozen(torch.nn.Module):
    """A user's model with a part that is not trained."""

    def __init__(self, vocab_size: int) -> None:
        super().__init__()
        self.table = torch.nn.Embedding(vocab_size, vocab_size)
        self.frozen = torch.nn.Linear(2, 2, bias=False).requires_grad_(False)
        torch.nn.init.ones_(self.frozen.weight)

    def forward(self, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
        logits = self.table(batch["input_ids"]).flatten(0, 1)
        loss_sum = torch.nn.functional.cross_entropy(logits, batch["targets"].flatten(), reduction="sum")
        return loss_sum, torch.tensor(batch["targets"].numel())


@pytest.mark.parametrize("optimizer", [{"type": "sgd"}, {"type": "adamw"}])
def test_a_first_step_that_float16_skips_leaves_nothing_behind(optimizer: dict[str, Any]) -> None:
    run = cpu_run(config(precision="float16", optimizer=optimizer))
    before = [p.detach().clone() for p in run.parameters]
    handle = run.parameters[0].register_hook(lambda gradient: gradient * math.inf)
    run.step()
    handle.remove()
    assert all(torch.equal(p, old) for p, old in zip(run.parameters, before, strict=True))
    run.read()
    assert "update_norm" not in run.metrics(), "no update was made"
    run.step()
    moved = max((p - old).abs().max().item() for p, old in zip(run.parameters, before, strict=True))
    assert 0 < moved < 0.1
