"""What a run notes of its micro-gradients is what they are, on one rank and on several."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from batchscout.trainers.config import TrialConfig
from batchscout.trainers.noise.gradient_noise import (
    FIRST_STEPS,
    RECENT_STEPS,
    THEN_ONE_IN,
    MicroGradientNorms,
    NoiseLog,
)
from batchscout.trainers.noise.noise_estimate import NoiseEstimate, SquaredNorms, estimate_noise
from tests.support.gradients import DIM, known_windows
from tests.support.ranks import on_two_ranks
from tests.support.tiny import config, cpu_run


def test_a_long_run_says_what_the_noise_is_of_late() -> None:
    log = NoiseLog(2, 4)
    ((early,), (late,)) = (
        known_windows(0, noise_scale=scale, micro_batch_size=2, num_micro_batches=4, num_steps=RECENT_STEPS)
        for scale in (8.0, 32.0)
    )
    log.steps.extend(early)
    log.steps.extend(late)
    assert log.estimate() == estimate_noise(late, 2, 4)


def test_one_micro_batch_on_one_rank_says_nothing() -> None:
    run = cpu_run(config(micro_batch_size=8), steps=2)
    run.read()
    assert not {key for key in run.metrics() if key.startswith(("noise", "coherence"))}


def micro_gradients(trial: TrialConfig, micro_batches: list[dict[str, Tensor]]) -> list[torch.Tensor]:
    """The gradient of the mean loss of each micro-batch, flat, at the weights that a run of `trial` begins with."""
    module = cpu_run(trial).module
    found = []
    for batch in micro_batches:
        loss_sum, num_targets = module(batch)
        gradients = torch.autograd.grad(loss_sum / num_targets, list(module.parameters()))
        found.append(torch.cat([gradient.flatten().double() for gradient in gradients]))
    return found


def one_step(trial: TrialConfig) -> tuple[SquaredNorms, list]:
    """(What the run noted of its first step, this rank's micro-batches of it)."""
    run, batches = cpu_run(trial), []
    run.module.register_forward_pre_hook(lambda module, args: batches.append(args[0]))
    run.step()
    run.read()
    return run.meter.noise.steps[0], batches


def of_two_ranks(parallel: str) -> tuple[SquaredNorms, list]:
    return one_step(config(micro_batch_size=2, gradient_accumulation_steps=2, world_size=2, parallel=parallel))


def assert_norms_are_those_of(gradients: list[torch.Tensor], noted: SquaredNorms) -> None:
    mean_square = torch.stack(gradients).square().sum(1).mean().item()
    square_of_mean = torch.stack(gradients).mean(0).square().sum().item()
    assert noted[:2] == pytest.approx((mean_square, square_of_mean), rel=1e-5)


def test_a_step_sees_the_norms_of_the_explicit_micro_gradients() -> None:
    trial = config(micro_batch_size=2, gradient_accumulation_steps=4, optimizer={"max_gradient_norm": 1e-3})
    noted, batches = one_step(trial)
    assert len(batches) == 4
    assert_norms_are_those_of(micro_gradients(trial, batches), noted)


@pytest.mark.first
@pytest.mark.slow
@pytest.mark.parametrize("parallel", ["ddp", "fsdp"])
def test_ranks_see_their_own_gradients_whole_and_before_they_are_averaged(tmp_path: Path, parallel: str) -> None:
    results = on_two_ranks(of_two_ranks, tmp_path, parallel)
    assert results[0][0] == results[1][0]
    batches = [batch for _, own in results for batch in own]
    assert len(batches) == 4
    assert_norms_are_those_of(micro_gradients(config(), batches), results[0][0])


def test_padded_micro_batches_count_by_their_targets() -> None:
    trial = config(padded=True, micro_batch_size=4, gradient_accumulation_steps=4)
    noted, batches = one_step(trial)
    squares = torch.stack(micro_gradients(trial, batches)).square().sum(1)
    targets = torch.tensor([int((batch["targets"] != -100).sum()) for batch in batches])
    assert len(set(targets.tolist())) > 1
    assert noted.mean_square == pytest.approx(((squares * targets).sum() / targets.sum()).item(), rel=1e-5)
    assert noted.num_targets == targets.sum().item()


def test_uneven_numbers_of_targets_leave_the_noise_scale_unbiased() -> None:
    """Gradients of known noise through the hooks, 10 targets a micro-batch on average."""
    random, noise_scale, numbers = np.random.default_rng(0), 20.0, [1, 2, 9, 28]
    weight = torch.nn.Parameter(torch.zeros(DIM))
    norms, log, scale = MicroGradientNorms([weight]), NoiseLog(10, len(numbers)), torch.tensor(0.5)
    for _ in range(2500):
        for number in numbers:
            samples = DIM**-0.5 + random.normal(size=(number, DIM)) * (noise_scale / DIM) ** 0.5
            (weight @ torch.from_numpy(samples.sum(0)).float() * scale).backward()
            norms.end_of_micro_batch(torch.tensor(number), scale, last=number == numbers[-1])
        taken = norms.take()
        assert taken is not None
        assert weight.grad is not None
        log.add(taken / sum(numbers), weight.grad.norm() / scale / sum(numbers), torch.tensor(sum(numbers)))
        weight.grad = None
    log.read()
    assert log.estimate().noise_scale == pytest.approx(noise_scale, rel=0.08)


def test_a_long_run_looks_at_every_first_step_and_then_at_one_in_so_many() -> None:
    run = cpu_run(config(gradient_accumulation_steps=2), steps=FIRST_STEPS + 3 * THEN_ONE_IN)
    run.read()
    assert len(run.meter.noise.steps) == FIRST_STEPS + 3


def test_a_step_with_a_micro_batch_without_targets_does_not_count() -> None:
    run = cpu_run(config(padded=True, micro_batch_size=1, gradient_accumulation_steps=32), steps=1)
    loss = run.read()[0].loss
    assert math.isfinite(loss)
    assert not math.isfinite(run.meter.noise.steps[0][0])
    assert run.meter.noise.estimate() == NoiseEstimate()
