"""The noise scale of known gradients is found, its interval covers, and noise is not taken for signal."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from tests.support.ranks import on_two_ranks
from tests.support.tiny import config, cpu_run
from trainers.config import TrialConfig
from trainers.gradient_noise import (
    FIRST_STEPS,
    RECENT_STEPS,
    THEN_ONE_IN,
    MicroGradientNorms,
    NoiseEstimate,
    NoiseLog,
    estimate_noise,
)

DIM = 60
NOT_AVAILABLE = NoiseEstimate(*[None] * 6)


def steps_of(
    seed: int, *, noise_scale: float, micro_batch_size: int, num_micro_batches: int, num_steps: int
) -> list[tuple[float, float]]:
    """(mean |g_k|^2, |gbar|^2) of steps whose true gradient has norm 1 and whose samples' covariance has that trace."""
    random = np.random.default_rng(seed)
    variances = np.linspace(0.2, 1.8, DIM)
    variances *= noise_scale / variances.sum() / micro_batch_size
    signal = np.full(DIM, DIM**-0.5) if math.isfinite(noise_scale) else np.zeros(DIM)
    micro = signal + random.normal(size=(num_steps, num_micro_batches, DIM)) * np.sqrt(variances)
    mean_squares = (micro**2).sum(2).mean(1)
    squares_of_mean = (micro.mean(1) ** 2).sum(1)
    return list(zip(mean_squares.tolist(), squares_of_mean.tolist(), strict=True))


def pure_noise(seed: int, num_micro_batches: int, num_steps: int) -> list[tuple[float, float]]:
    micro = np.random.default_rng(seed).normal(size=(num_steps, num_micro_batches, DIM))
    return list(zip((micro**2).sum(2).mean(1).tolist(), (micro.mean(1) ** 2).sum(1).tolist(), strict=True))


@pytest.mark.parametrize("noise_scale", [2.0, 50.0, 500.0])
@pytest.mark.parametrize(("micro_batch_size", "num_micro_batches"), [(4, 2), (2, 8)])
def test_the_interval_covers_the_true_noise_scale(
    noise_scale: float, micro_batch_size: int, num_micro_batches: int
) -> None:
    covered = 0
    for seed in range(300):
        steps = steps_of(
            seed,
            noise_scale=noise_scale,
            micro_batch_size=micro_batch_size,
            num_micro_batches=num_micro_batches,
            num_steps=40,
        )
        found = estimate_noise(steps, micro_batch_size, num_micro_batches)
        low = 0 if found.noise_scale_low is None else found.noise_scale_low
        covered += low <= noise_scale <= (found.noise_scale_high or math.inf)
    assert 0.91 <= covered / 300 <= 0.99  # nominal 0.95, three standard errors of 300 windows


@pytest.mark.parametrize(("micro_batch_size", "num_micro_batches"), [(1, 2), (4, 2), (2, 8), (8, 16)])
def test_noise_scale_and_coherence_go_to_the_truth_whatever_the_split(
    micro_batch_size: int, num_micro_batches: int
) -> None:
    steps = steps_of(
        0,
        noise_scale=20.0,
        micro_batch_size=micro_batch_size,
        num_micro_batches=num_micro_batches,
        num_steps=20_000,
    )
    found = estimate_noise(steps, micro_batch_size, num_micro_batches)
    assert found.noise_scale == pytest.approx(20.0, rel=0.05)
    assert found.coherence == pytest.approx(1 / (1 + 20.0 / micro_batch_size), rel=0.05)


def test_steps_are_averaged_before_the_division() -> None:
    """The mean of the steps' own ratios, where they have one, misses by far."""
    steps = steps_of(0, noise_scale=200.0, micro_batch_size=4, num_micro_batches=4, num_steps=4000)
    each = [estimate_noise([pair], 4, 4).noise_scale for pair in steps]
    ratios = [ratio for ratio in each if ratio is not None]
    assert estimate_noise(steps, 4, 4).noise_scale == pytest.approx(200.0, rel=0.1)
    assert abs(sum(ratios) / len(ratios) - 200.0) > 40.0


@pytest.mark.parametrize("num_micro_batches", [2, 8, 32])
def test_the_coherence_of_pure_noise_is_within_its_floor(num_micro_batches: int) -> None:
    estimates = [estimate_noise(pure_noise(seed, num_micro_batches, 30), 1, num_micro_batches) for seed in range(300)]
    pairs = [(e.coherence, e.coherence_floor) for e in estimates]
    coherences = [(coherence, floor) for coherence, floor in pairs if coherence is not None and floor is not None]
    assert len(coherences) == 300
    within = sum(abs(coherence) <= floor for coherence, floor in coherences)
    assert 0.89 <= within / 300 <= 0.99  # two-sided 95 %, three standard errors, 30 steps
    assert abs(sum(coherence for coherence, _ in coherences) / 300) < 0.01


def test_pure_noise_has_no_upper_bound() -> None:
    unbounded = [estimate_noise(pure_noise(seed, 4, 30), 1, 4).noise_scale_high is None for seed in range(100)]
    assert sum(unbounded) >= 90


def test_a_signal_is_above_the_floor() -> None:
    steps = steps_of(0, noise_scale=8.0, micro_batch_size=2, num_micro_batches=4, num_steps=30)
    found = estimate_noise(steps, 2, 4)
    assert found.coherence is not None
    assert found.coherence_floor is not None
    assert found.coherence > found.coherence_floor > 0


def test_equal_micro_batches_are_all_signal() -> None:
    found = estimate_noise([(2.0, 2.0), (3.0, 3.0)], 4, 2)
    assert (found.coherence, found.noise_scale) == (1.0, 0.0)


def test_a_step_that_overflowed_does_not_count() -> None:
    steps = steps_of(0, noise_scale=8.0, micro_batch_size=2, num_micro_batches=4, num_steps=30)
    broken = [(math.inf, math.nan), *steps, (math.nan, 1.0)]
    assert estimate_noise(broken, 2, 4) == estimate_noise(steps, 2, 4)


def test_a_long_run_says_what_the_noise_is_of_late() -> None:
    log, late = (
        NoiseLog(2, 4),
        steps_of(1, noise_scale=32.0, micro_batch_size=2, num_micro_batches=4, num_steps=RECENT_STEPS),
    )
    log.steps.extend(steps_of(0, noise_scale=8.0, micro_batch_size=2, num_micro_batches=4, num_steps=RECENT_STEPS))
    log.steps.extend(late)
    assert log.estimate() == estimate_noise(late, 2, 4)


def test_one_micro_batch_on_one_rank_says_nothing() -> None:
    assert estimate_noise([(1.0, 1.0)] * 10, 8, 1) == NOT_AVAILABLE
    assert NoiseLog(8, 2).estimate() == NOT_AVAILABLE
    run = cpu_run(config(micro_batch_size=8))
    run.step()
    run.step()
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


def one_step(trial: TrialConfig) -> tuple[tuple[float, float], list]:
    """(What the run noted of its first step, this rank's micro-batches of it)."""
    run, batches = cpu_run(trial), []
    run.module.register_forward_pre_hook(lambda module, args: batches.append(args[0]))
    run.step()
    run.read()
    return run.meter.noise.steps[0], batches


def of_two_ranks(parallel: str) -> tuple[tuple[float, float], list]:
    return one_step(config(micro_batch_size=2, gradient_accumulation_steps=2, world_size=2, parallel=parallel))


def assert_norms_are_those_of(gradients: list[torch.Tensor], noted: tuple[float, float]) -> None:
    mean_square = torch.stack(gradients).square().sum(1).mean().item()
    square_of_mean = torch.stack(gradients).mean(0).square().sum().item()
    assert noted == pytest.approx((mean_square, square_of_mean), rel=1e-5)


def test_a_step_sees_the_norms_of_the_explicit_micro_gradients() -> None:
    trial = config(micro_batch_size=2, gradient_accumulation_steps=4, optimizer={"max_gradient_norm": 1e-3})
    noted, batches = one_step(trial)
    assert len(batches) == 4
    assert_norms_are_those_of(micro_gradients(trial, batches), noted)


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
    assert noted[0] == pytest.approx(((squares * targets).sum() / targets.sum()).item(), rel=1e-5)


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
        log.add(taken / sum(numbers), weight.grad.norm() / scale / sum(numbers))
        weight.grad = None
    log.read()
    assert log.estimate().noise_scale == pytest.approx(noise_scale, rel=0.08)


def test_a_long_run_looks_at_every_first_step_and_then_at_one_in_so_many() -> None:
    run = cpu_run(config(gradient_accumulation_steps=2))
    for _ in range(FIRST_STEPS + 3 * THEN_ONE_IN):
        run.step()
    run.read()
    assert len(run.meter.noise.steps) == FIRST_STEPS + 3


def test_a_step_with_a_micro_batch_without_targets_does_not_count() -> None:
    run = cpu_run(config(padded=True, micro_batch_size=1, gradient_accumulation_steps=32))
    run.step()
    loss = run.read()[0].loss
    assert math.isfinite(loss)
    assert not math.isfinite(run.meter.noise.steps[0][0])
    assert run.meter.noise.estimate() == NOT_AVAILABLE
