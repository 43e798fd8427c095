"""The same samples give the same gradient for every split of the batch, and ranks talk once a step."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch._ops import OpOverload
from torch.nn.parallel import DistributedDataParallel
from torch.utils._python_dispatch import TorchDispatchMode

from batchscout.trainers.config import TrialConfig
from batchscout.trainers.data.batches import fetch
from batchscout.trainers.model.gpt import GPT
from batchscout.trainers.model.models import initial_module
from batchscout.trainers.step.accumulation import normalise_and_clip
from tests.support.ranks import on_two_ranks
from tests.support.tiny import config, cpu_run, gradient_of_step, relative_error

BATCH = 16
ONE_RANK = [(16, 1), (8, 2), (4, 4), (2, 8), (1, 16)]
TWO_RANKS = [(8, 1), (4, 2), (1, 8)]
BY_A_METHOD = f"{__name__}:by_a_method"
NEVER_CLIPPED = {"max_gradient_norm": None}

FirstBatch = tuple[torch.nn.Module, dict[str, Tensor]]
"""(module as every split begins, the samples of every split's first step)"""


def split(micro_batch_size: int, accumulation: int, world_size: int = 1, **changes: Any) -> TrialConfig:
    changes = {"optimizer": NEVER_CLIPPED} | changes
    return config(
        padded=True,
        micro_batch_size=micro_batch_size,
        gradient_accumulation_steps=accumulation,
        world_size=world_size,
        **changes,
    )


def by_a_method(module: GPT, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    """A loss that is no call of the module: hooks of a forward do not hear of it."""
    return GPT.forward(module, batch)


def two_ranks() -> dict[str, Any]:
    """What one spawned pair of ranks finds out for all tests of this file."""
    found: dict[str, Any] = {
        "gradients": {},
        "bytes": {},
        "noise": {},
        "sharded gradients": {},
        "reductions": {},
        "gradient by a method": None,
        "parameter_bytes": 0,
        "targets": 0,
    }
    for micro_batch_size, accumulation in TWO_RANKS:
        run = cpu_run(split(micro_batch_size, accumulation, world_size=2))
        found["gradients"][micro_batch_size, accumulation] = gradient_of_step(run)
        found["loss"] = run.read()[0].loss
        found["parameter_bytes"] = sum(p.numel() * p.element_size() for p in run.parameters)
        found["noise"][micro_batch_size, accumulation] = run.meter.noise.steps
        found["bytes"][accumulation] = bytes_per_step(split(micro_batch_size, accumulation, world_size=2))
    for micro_batch_size, accumulation in TWO_RANKS:
        sharded = split(micro_batch_size, accumulation, world_size=2, parallel="fsdp")
        found["sharded gradients"][micro_batch_size, accumulation] = gradient_of_step(cpu_run(sharded))
        found["reductions"][accumulation] = reductions_per_step(sharded)
    found["gradient by a method"] = gradient_of_step(
        cpu_run(split(4, 2, world_size=2, loss={"type": "own", "target": BY_A_METHOD}))
    )
    found["targets"] = targets_of_a_step(split(4, 2, world_size=2))
    return found


def targets_of_a_step(trial: TrialConfig) -> int:
    """How many this rank has."""
    run, seen = cpu_run(trial), []
    run.module.register_forward_pre_hook(lambda module, args: seen.append(args[0]["targets"]))
    run.step()
    return sum(int((targets != -100).sum()) for targets in seen)


def bytes_per_step(trial: TrialConfig) -> list[int]:
    """All-reduced gradient bytes of each of three steps."""
    run, sent = cpu_run(trial), [0]

    def count(state, bucket):  # DDP refuses annotations that are strings
        sent[-1] += bucket.buffer().numel() * bucket.buffer().element_size()
        work = dist.all_reduce(bucket.buffer().div_(2), async_op=True)
        assert work is not None
        return work.get_future().then(lambda future: future.value()[0])

    assert isinstance(run.model, DistributedDataParallel)
    run.model.register_comm_hook(None, count)
    for _ in range(3):
        run.step()
        sent.append(0)
    return sent[:-1]


class Collectives(TorchDispatchMode):
    """The names of everything that is dispatched within it."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(
        self,
        function: OpOverload,
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        self.names.append(function.name())
        return function(*args, **(kwargs or {}))

    def count(self, name: str) -> int:
        return sum(seen.split(".")[0] == name for seen in self.names)


def reductions_per_step(trial: TrialConfig) -> int:
    """Reduce-scatters of a step; FSDP2 makes one for every block and one for the rest of the model."""
    run = cpu_run(trial)
    with Collectives() as seen:
        run.step()
    return seen.count("c10d::_reduce_scatter_base_")


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return on_two_ranks(two_ranks, tmp_path_factory.mktemp("ranks"))


@pytest.fixture(scope="module")
def first_batch() -> FirstBatch:
    trial = split(BATCH, 1)
    run = cpu_run(trial)
    module = initial_module(trial, run.train_set)
    return module, fetch(run.first_samples, run.order.indices(range(BATCH)))


@pytest.fixture(scope="module")
def whole_batch_gradient(first_batch: FirstBatch) -> Tensor:
    """Of the mean loss over all targets, in one piece, without any code of ours but the model."""
    module, batch = first_batch
    loss_sum, num_targets = module(batch)
    return flat(torch.autograd.grad(loss_sum / num_targets, list(module.parameters())))


def flat(gradients: Iterable[Tensor]) -> Tensor:
    return torch.cat([gradient.flatten().double() for gradient in gradients])


@pytest.mark.parametrize(("micro_batch_size", "accumulation"), ONE_RANK)
def test_gradient_is_that_of_the_whole_batch_for_every_split_on_one_rank(
    whole_batch_gradient: Tensor, micro_batch_size: int, accumulation: int
) -> None:
    gradient = gradient_of_step(cpu_run(split(micro_batch_size, accumulation)))
    assert relative_error(gradient, whole_batch_gradient) <= 1e-5


@pytest.mark.first
@pytest.mark.slow
@pytest.mark.parametrize("shape", TWO_RANKS)
@pytest.mark.parametrize("found", ["gradients", "sharded gradients"])
def test_gradient_is_that_of_the_whole_batch_for_every_split_on_two_ranks_and_of_a_sharded_model(
    ranks: list[dict[str, Any]], whole_batch_gradient: Tensor, shape: tuple[int, int], found: str
) -> None:
    for rank in ranks:
        assert relative_error(rank[found][shape], whole_batch_gradient) <= 1e-5


def test_gradients_of_a_loss_that_calls_methods_of_the_module_meet(
    ranks: list[dict[str, Any]], whole_batch_gradient: Tensor
) -> None:
    for rank in ranks:
        assert relative_error(rank["gradient by a method"], whole_batch_gradient) <= 1e-5


def test_the_two_ranks_had_uneven_numbers_of_targets(ranks: list[dict[str, Any]]) -> None:
    assert ranks[0]["targets"] != ranks[1]["targets"]


def test_loss_of_a_step_is_the_mean_over_the_targets_of_all_ranks(
    ranks: list[dict[str, Any]], first_batch: FirstBatch
) -> None:
    module, batch = first_batch
    with torch.no_grad():
        loss_sum, num_targets = module(batch)
    assert [rank["loss"] for rank in ranks] == pytest.approx([(loss_sum / num_targets).item()] * 2, rel=1e-6)


@pytest.mark.parametrize("num_micro_batches", [4, 8])
def test_a_mean_per_micro_batch_would_miss_it_by_far(
    first_batch: FirstBatch, whole_batch_gradient: Tensor, num_micro_batches: int
) -> None:
    module, batch = first_batch
    naive = torch.zeros_like(whole_batch_gradient)
    for start in range(num_micro_batches):
        part = {key: value[start::num_micro_batches] for key, value in batch.items()}
        loss_sum, num_targets = module(part)
        naive += flat(torch.autograd.grad(loss_sum / num_targets / num_micro_batches, list(module.parameters())))
    assert relative_error(naive, whole_batch_gradient) > 0.05


@pytest.mark.parametrize("accumulation", [1, 2, 8])
def test_ranks_exchange_the_gradient_exactly_once_a_step_whatever_the_accumulation(
    ranks: list[dict[str, Any]], accumulation: int
) -> None:
    for rank in ranks:
        assert rank["bytes"][accumulation] == [rank["parameter_bytes"]] * 3


def test_shards_of_the_gradient_meet_once_a_step_whatever_the_accumulation(ranks: list[dict[str, Any]]) -> None:
    blocks_and_the_rest = 2 + 1
    for rank in ranks:
        assert rank["reductions"] == {accumulation: blocks_and_the_rest for _, accumulation in TWO_RANKS}


def test_the_gradient_of_the_whole_step_is_clipped_once(whole_batch_gradient: Tensor) -> None:
    limit = whole_batch_gradient.norm().item() / 3
    for micro_batch_size, accumulation in ONE_RANK:
        run = cpu_run(split(micro_batch_size, accumulation, optimizer={"max_gradient_norm": limit}))
        assert relative_error(gradient_of_step(run), whole_batch_gradient / 3) <= 1e-5
        run.read()
        assert run.metrics()["gradient_norm"] == pytest.approx(3 * limit, rel=1e-5)


def test_a_gradient_below_the_limit_is_left_alone() -> None:
    parameter = torch.nn.Parameter(torch.zeros(2))
    parameter.grad = torch.tensor([3.0, 4.0])
    norm = normalise_and_clip([parameter], torch.tensor(0.5), max_norm=2.6)
    assert norm.item() == pytest.approx(2.5)
    assert parameter.grad.tolist() == pytest.approx([1.5, 2.0])
