"""How many CPUs a rank gets, without Ray."""

from __future__ import annotations

import re
from typing import Any

import pytest

from orchestrator.execution.placement import Room, largest_share, refuse_gpus_without_cuda


@pytest.mark.parametrize(
    ("nodes", "ranks", "share"),
    [([2], 1, 2), ([2], 2, 1), ([8] * 4, 1, 8), ([8] * 4, 4, 8), ([8] * 4, 5, 4), ([9, 3], 2, 4), ([1], 2, 1)],
)
def test_a_rank_gets_the_most_cpus_that_every_rank_can_have_on_one_node(
    nodes: list[int], ranks: int, share: int
) -> None:
    assert largest_share([Room(cpus) for cpus in nodes], ranks) == share


@pytest.mark.parametrize(
    ("nodes", "ranks", "share"),
    [
        ([(8, 1)], 1, 8),
        ([(64, 1)], 1, 8),
        ([(16, 4)], 4, 4),
        ([(16, 4)], 2, 8),
        ([(96, 0), (12, 4)], 4, 3),
        ([(2, 4)], 4, 1),
    ],
)
def test_a_rank_on_a_gpu_gets_its_share_of_the_cpus_beside_the_gpus_and_at_most_eight(
    nodes: list[tuple[int, int]], ranks: int, share: int
) -> None:
    assert largest_share([Room(cpus, gpus) for cpus, gpus in nodes], ranks) == share


def node(kind: str, num_gpus: float, *, alive: bool = True) -> dict[str, Any]:
    """As `ray.nodes` describes it (Ray 2.60)."""
    resources = {"CPU": 8.0, "GPU": num_gpus, f"accelerator_type:{kind}": 1.0} if num_gpus else {"CPU": 8.0}
    return {"Alive": alive, "NodeManagerHostname": "node-1", "Resources": resources if alive else {}}


@pytest.mark.parametrize("kind", ["Intel-GPU-Max-1550", "M3-Max", "Apple-Silicon"])
def test_a_gpu_that_cuda_does_not_drive_is_refused_by_its_name(kind: str) -> None:
    said = (
        f"node-1 has 2 GPUs of type {kind}, and trials run on those of NVIDIA (CUDA) and AMD (ROCm) alone; to use its CPUs, "
        "start Ray there with `ray start --head --num-gpus 0` and run with --address auto"
    )
    with pytest.raises(ValueError, match=re.escape(said)):
        refuse_gpus_without_cuda([node("H100", 8), node(kind, 2)])
    refuse_gpus_without_cuda([node("H100", 8), node(kind, 0), node(kind, 2, alive=False)])


def test_nvidias_and_amds_gpus_are_not_refused() -> None:
    refuse_gpus_without_cuda([node(kind, 1) for kind in ("H100", "T4", "M60", "AMD-Instinct-MI300X-OAM")])
