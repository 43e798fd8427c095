"""What is read of a step is what it did: weights before and after, gradients as the optimizer was given them."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from batchscout.trainers.checkpoints.checkpoint import save_checkpoint
from batchscout.trainers.model.parallel import local, whole
from batchscout.trainers.noise.gradient_noise import FIRST_STEPS, THEN_ONE_IN
from batchscout.trainers.noise.step_statistics import adam_snr_of, next_update, read_step
from batchscout.trainers.run import STEPS_PER_INTERVAL, Run
from tests.support.ranks import on_two_ranks
from tests.support.tiny import config, cpu_run

OPTIMIZERS = [
    {"type": "adamw", "weight_decay": 0.3},
    {"type": "sgd", "weight_decay": 0.3},
    {"type": "sgd", "betas": (0.0, 0.9), "weight_decay": 0.3},
]


def flat(tensors: Sequence[Tensor]) -> Tensor:
    return torch.cat([whole(tensor.detach()).flatten().double() for tensor in tensors])


def some_steps(**changes: Any) -> tuple[Run, Tensor, Tensor]:
    """(a run after its third step, the weights before that step, its gradient)"""
    run = cpu_run(config(padded=True, **changes))
    before = gradient = torch.empty(0)
    for _ in range(3):
        before = flat(run.parameters).clone()
        run.step()
        gradient = flat([p.grad for p in run.parameters if p.grad is not None])
    return run, before, gradient


@pytest.mark.parametrize("optimizer", OPTIMIZERS, ids=["adamw", "sgd with momentum", "sgd"])
def test_the_update_is_the_way_from_the_weights_before_to_those_after(optimizer: dict[str, Any]) -> None:
    run, before, gradient = some_steps(optimizer=optimizer)
    found, after = read_step(run.optimizer), flat(run.parameters)
    assert found["update_norm"] == pytest.approx((after - before).norm().item(), rel=1e-3)
    assert found["update_ratio"] == pytest.approx(((after - before).norm() / after.norm()).item(), rel=1e-3)
    assert found["gradient_mean"] == pytest.approx(gradient.mean().item(), rel=1e-4)
    assert found["gradient_variance"] == pytest.approx(gradient.var(correction=0).item(), rel=1e-4)
    assert ("adam_snr" in found) == (optimizer["type"] == "adamw")


@pytest.mark.parametrize(("noise", "low", "high"), [(0.0, 0.999, 1.001), (100.0, 0.02, 0.09)])
def test_adams_signal_to_noise_is_1_for_a_constant_gradient_and_near_its_floor_for_noise(
    noise: float, low: float, high: float
) -> None:
    weight = torch.nn.Parameter(torch.zeros(10_000))
    optimizer = torch.optim.AdamW([weight], lr=0.0, betas=(0.9, 0.999))
    generator = torch.Generator().manual_seed(0)
    for _ in range(200):
        weight.grad = 1 + noise * torch.randn(10_000, generator=generator)
        optimizer.step()
    assert low < read_step(optimizer)["adam_snr"] < high  # for noise (1 - beta1) / (1 + beta1) = 0.053


@pytest.mark.parametrize("optimizer", OPTIMIZERS, ids=["adamw", "sgd with momentum", "sgd"])
def test_the_next_update_is_what_a_step_then_does(optimizer: dict[str, Any]) -> None:
    run, _, _ = some_steps(optimizer=optimizer)
    for parameter in run.parameters:
        parameter.grad = torch.randn(parameter.shape, generator=torch.Generator().manual_seed(0))
    before = flat(run.parameters).clone()
    state = {key: value.clone() for p in run.parameters for key, value in run.optimizer.state[p].items()}
    update, weight = next_update(run.optimizer, torch.tensor(0.25)).tolist()
    assert torch.equal(flat(run.parameters), before), "nothing moves"
    assert all(torch.equal(run.optimizer.state[run.parameters[-1]][key], value) for key, value in state.items())
    for parameter in run.parameters:
        assert parameter.grad is not None
        parameter.grad *= 0.25
    run.optimizer.step()
    assert update**0.5 == pytest.approx((flat(run.parameters) - before).norm().item(), rel=1e-4)
    assert weight**0.5 == pytest.approx(before.norm().item(), rel=1e-5)


@pytest.mark.parametrize("gradient_snr", [0.01, 0.5, 10.0])
def test_adams_signal_to_noise_follows_from_that_of_the_gradient(gradient_snr: float) -> None:
    weight = torch.nn.Parameter(torch.zeros(10_000))
    optimizer = torch.optim.AdamW([weight], lr=0.0, betas=(0.9, 0.99))
    generator = torch.Generator().manual_seed(0)
    for _ in range(300):
        weight.grad = gradient_snr**0.5 + torch.randn(10_000, generator=generator)
        optimizer.step()
    assert read_step(optimizer)["adam_snr"] == pytest.approx(adam_snr_of(gradient_snr, 0.9), rel=0.05)


def test_before_the_first_step_and_without_gradients_there_is_nothing_to_say() -> None:
    run = cpu_run(config())
    assert read_step(run.optimizer) == {}
    run.step()
    run.read()
    assert read_step(run.optimizer) == {}, "a read lets the gradient go"


def test_the_successive_cosine_is_that_of_each_micro_gradient_with_the_sum_before_it() -> None:
    trial = config(padded=True, micro_batch_size=4, gradient_accumulation_steps=4, sample_budget=256)
    run, sums = cpu_run(trial, steps=STEPS_PER_INTERVAL - 1), []
    norms: Any = run.norms
    end_of_micro_batch = norms.end_of_micro_batch

    def look(*arguments: Any, last: bool) -> None:
        end_of_micro_batch(*arguments, last=last)
        sums.append(flat([p.grad for p in run.parameters if p.grad is not None]))

    norms.end_of_micro_batch = look
    run.step()
    run.read()
    gradients = [sums[0], *(after - before for before, after in itertools.pairwise(sums))]
    cosines = [torch.cosine_similarity(g, s, dim=0) for g, s in zip(gradients[1:], sums, strict=False)]
    assert run.metrics()["successive_cosine"] == pytest.approx(torch.stack(cosines).mean().item(), rel=1e-3)


def test_a_long_run_looks_at_its_updates_in_every_first_interval_and_then_in_one_in_so_many() -> None:
    run, seen = cpu_run(config(gradient_accumulation_steps=2, sample_budget=10_000)), []
    for _ in range(FIRST_STEPS + 2 * THEN_ONE_IN * STEPS_PER_INTERVAL):
        run.step()
        if run.num_steps % STEPS_PER_INTERVAL == 0:
            before = run.metrics()
            run.read()
            changed = {key for key, value in run.metrics().items() if value != before.get(key)}
            assert ("update_norm" in changed) == ("successive_cosine" in changed)
            seen.append("update_norm" in changed)
    first, later = seen[: FIRST_STEPS // STEPS_PER_INTERVAL], seen[FIRST_STEPS // STEPS_PER_INTERVAL :]
    assert all(first)
    assert later == 2 * [False, False, False, False, True]


def test_what_was_seen_of_the_updates_stands_after_going_on_from_a_checkpoint(tmp_path: Path) -> None:
    trial = config(gradient_accumulation_steps=2, sample_budget=10_000)
    run = cpu_run(trial)
    for _ in range(FIRST_STEPS + STEPS_PER_INTERVAL):
        run.step()
        if run.num_steps % STEPS_PER_INTERVAL == 0:
            run.read()
    save_checkpoint(tmp_path / "checkpoints", "token", run.samples_seen, run.state(None), keep=1)
    resumed = cpu_run(trial)
    resumed.resume(tmp_path)
    keys = ("update_norm", "adam_snr", "successive_cosine", "gradient_variance")
    assert [resumed.metrics()[key] for key in keys] == [run.metrics()[key] for key in keys]


def test_without_statistics_loss_norm_and_speed_are_all_there_is() -> None:
    run = cpu_run(config(gradient_accumulation_steps=4, statistics=False), steps=2 * STEPS_PER_INTERVAL)
    run.read()
    found = run.metrics()
    assert {"loss", "gradient_norm", "tokens_per_second", "peak_memory_bytes"} <= found.keys()
    assert not {"coherence", "noise_scale", "update_norm", "adam_snr", "successive_cosine"} & found.keys()


def sharded_and_whole(optimizer: dict[str, Any]) -> list[dict[str, float]]:
    """What a run of one interval says of its gradients and updates, whole on both ranks and in shards."""
    found = []
    for parallel in ("ddp", "fsdp"):
        run = cpu_run(
            config(
                micro_batch_size=2,
                gradient_accumulation_steps=3,
                world_size=2,
                parallel=parallel,
                sample_budget=60,
                optimizer=optimizer,
            )
        )
        assert (local(run.parameters[0]) is run.parameters[0]) == (parallel == "ddp")
        for _ in range(STEPS_PER_INTERVAL):
            run.step()
        run.read()
        keys = ("coherence", "noise_scale", "successive_cosine", "gradient_variance", "update_norm", "adam_snr")
        found.append({key: value for key, value in run.metrics().items() if key in keys})
    return found


@pytest.mark.slow
@pytest.mark.parametrize("optimizer", [{}, {"target": "torch.optim:Adam"}], ids=["adamw", "one that is not known"])
def test_shards_add_up_to_the_same_figures(tmp_path: Path, optimizer: dict[str, Any]) -> None:
    for whole_model, shards in on_two_ranks(sharded_and_whole, tmp_path, optimizer):
        assert ("update_norm" in shards) == (not optimizer)
        assert len(whole_model) == (4 if optimizer else 6)
        assert shards == pytest.approx(whole_model, rel=1e-3)
