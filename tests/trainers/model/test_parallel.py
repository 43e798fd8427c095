"""How ranks hold the model, and what they say to each other."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from tests.support.ranks import on_two_ranks
from tests.support.tiny import config, cpu_run, gradient_of_step, relative_error


class NormedBlock(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear, self.norm = nn.Linear(width, width), nn.BatchNorm1d(width)

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(self.norm(self.linear(x).flatten(0, 1))).view(x.shape)


class Normed(nn.Module):
    """With BatchNorm in its repeated blocks."""

    def __init__(self, vocab_size: int) -> None:
        super().__init__()
        self.table, self.head = nn.Embedding(vocab_size, 8), nn.Linear(8, vocab_size)
        self.blocks = nn.ModuleList(NormedBlock(8) for _ in range(2))

    def forward(self, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
        x = self.table(batch["input_ids"])
        for block in self.blocks:
            x = block(x)
        losses = nn.functional.cross_entropy(self.head(x).flatten(0, 1), batch["targets"].flatten(), reduction="none")
        return losses.float().sum(), torch.tensor(losses.numel())


NORMED = {"target": "tests.trainers.model.test_parallel:Normed"}


def sharded(precision: str, **changes: Any) -> dict[str, Any]:
    split = {"micro_batch_size": 2, "gradient_accumulation_steps": 3, "world_size": 2, "parallel": "fsdp"}
    run = cpu_run(config(**{"padded": True, "precision": precision} | split | changes))
    assert run.norms is not None
    run.num_steps = 9  # the next step ends an interval, in which the sum of micro-gradients is followed
    gradient = gradient_of_step(run)
    run.read()
    return {
        "gradient": gradient,
        "gathered": sorted({str(leaf.dtype) for leaf in run.norms._parameters}),
        "shards": sorted({str(parameter.dtype) for parameter in run.parameters}),
        "norms": run.meter.noise.steps[0],
        "cosine": run.metrics().get("successive_cosine"),
    }


@pytest.mark.slow
@pytest.mark.parametrize(("precision", "tolerance"), [("bfloat16", 0.01), ("float16", 0.001)])
def test_blocks_are_gathered_in_the_precision_they_compute_in_and_summed_in_float32(
    tmp_path: Path, precision: str, tolerance: float
) -> None:
    exact = on_two_ranks(sharded, tmp_path, "float32")[0]
    assert exact["gathered"] == exact["shards"] == ["torch.float32"]
    assert exact["cosine"] is not None
    for found in on_two_ranks(sharded, tmp_path, precision):
        assert found["gathered"] == sorted([f"torch.{precision}", "torch.float32"])
        assert found["shards"] == ["torch.float32"]
        assert found["gradient"].dtype == torch.float64
        assert relative_error(found["gradient"], exact["gradient"]) < tolerance
        assert found["norms"][:2] == pytest.approx(exact["norms"][:2], rel=3 * tolerance)
        assert found["cosine"] is None, "the sum is not where it could be measured"


def with_batch_norm(precision: str) -> dict[str, Any]:
    return sharded(precision, model=NORMED, padded=False)


@pytest.mark.slow
def test_blocks_with_batch_norm_are_gathered_in_float32_since_no_policy_casts_its_statistics(tmp_path: Path) -> None:
    assert on_two_ranks(with_batch_norm, tmp_path, "bfloat16")[0]["gathered"] == ["torch.float32"]


class Names(TorchDispatchMode):
    """Notes the name of every operation."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen.append(func.name())
        return func(*args, **(kwargs or {}))


def test_a_group_of_one_process_sends_nothing(tmp_path: Path) -> None:
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        run = cpu_run(config(gradient_accumulation_steps=2))
        with Names() as names:
            for _ in range(3):
                run.step()
            run.read()
    finally:
        dist.destroy_process_group()
    assert len(names.seen) > 100
    assert not [name for name in names.seen if name.startswith("c10d::")]
