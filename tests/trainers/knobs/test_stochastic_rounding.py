"""Weights in bfloat16 whose updates are rounded at random: unbiased, AdamW but for the rounding, and resumed exactly."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from batchscout.trainers.loop import train
from batchscout.trainers.report import Answer
from batchscout.trainers.step.stochastic_rounding import StochasticAdamW, rounded_stochastically
from tests.support.tiny import assert_equal_bit_by_bit, config, cpu_run, losses_of, newest_state, stop_at

ROUNDED: dict[str, Any] = {"memory_knobs": ["bfloat16_weights"], "precision": "bfloat16"}


@pytest.mark.parametrize("value", [1.001, -1.001, 0.3333333, 3e-5, -7777.7, 1e-40])
def test_the_mean_of_many_roundings_is_the_value_and_each_is_a_neighbour(value: float) -> None:
    torch.manual_seed(0)
    num_draws = 100_000
    values = torch.full((num_draws,), value)
    rounded = rounded_stochastically(values)
    low, high = rounded.float().min().item(), rounded.float().max().item()
    assert low <= values[0].item() <= high
    assert len(rounded.unique()) <= 2
    step = high - low
    # The mean of so many draws between two neighbours scatters by half a step over their root at most: five times that.
    assert abs(rounded.double().mean().item() - values[0].item()) <= 5 * step / 2 / num_draws**0.5


def test_what_bfloat16_has_is_never_moved_and_what_is_no_number_stays_none() -> None:
    exact = torch.tensor([0.0, -0.0, 1.0, -2.5, float("inf"), float("-inf")])
    assert torch.equal(rounded_stochastically(exact).float(), exact)
    assert rounded_stochastically(torch.tensor([float("nan")])).isnan().all()


def test_updates_too_small_for_bfloat16_add_up_all_the_same() -> None:
    """A thousand steps of 1e-4 from 1 are 0.9, where to the nearest each would be rounded away."""
    torch.manual_seed(0)
    weight = torch.nn.Parameter(torch.ones(256, dtype=torch.bfloat16))
    optimizer = StochasticAdamW([weight], lr=1e-4, betas=(0.0, 0.0), weight_decay=0.0)
    for _ in range(1000):
        weight.grad = torch.ones_like(weight)
        optimizer.step()
    assert weight.float().mean().item() == pytest.approx(0.9, abs=0.002)


def test_of_float32_weights_it_is_torchs_adamw() -> None:
    torch.manual_seed(0)
    start, gradients = torch.randn(64), torch.randn(20, 64)
    ours, theirs = (torch.nn.Parameter(start.clone()) for _ in range(2))
    settings: dict[str, Any] = {"lr": 1e-2, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1}
    optimizers = StochasticAdamW([ours], **settings), torch.optim.AdamW([theirs], **settings)
    for gradient in gradients:
        for weight, optimizer in zip((ours, theirs), optimizers, strict=True):
            weight.grad = gradient.clone()
            optimizer.step()
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)


def test_weights_and_gradients_take_half_and_moments_and_buffers_stay() -> None:
    run = cpu_run(config(**ROUNDED), steps=1)
    assert {p.dtype for p in run.parameters} == {torch.bfloat16}
    assert {s["exp_avg_sq"].dtype for s in run.optimizer.state.values()} == {torch.float32}
    assert run.module.head.weight is run.module.token_embedding.weight  # tied weights stay tied  # pyright: ignore[reportAttributeAccessIssue]


def test_a_run_that_was_stopped_goes_on_to_the_same_weights_and_moments(tmp_path: Path) -> None:
    trial = config(**ROUNDED, rungs=(32,), statistics=False)
    assert train(trial, lambda said: Answer.GO_ON, tmp_path / "whole") is Answer.GO_ON
    assert train(trial, stop_at(32), tmp_path / "halves") is Answer.STOP
    assert train(trial, lambda said: Answer.GO_ON, tmp_path / "halves") is Answer.GO_ON
    whole, halves = newest_state(tmp_path / "whole/checkpoints"), newest_state(tmp_path / "halves/checkpoints")
    assert_equal_bit_by_bit(whole, halves)
    assert halves["optimizer"]["state"][0]["exp_avg"].dtype == torch.float32


def test_it_learns_as_well_as_with_weights_in_float32() -> None:
    """Over the same samples, within what another seed changes."""
    plain, another, rounded = (
        last_loss(**{"precision": "bfloat16", **changes}) for changes in ({}, {"seed": 1}, ROUNDED)
    )
    assert rounded < plain + max(0.05 * plain, 2 * abs(another - plain))


def last_loss(**changes: Any) -> float:
    return sum(losses_of(config(sample_budget=2048, **changes), 60)[-10:]) / 10
