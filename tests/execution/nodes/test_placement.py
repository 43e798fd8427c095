"""How many lanes of what size a cluster holds, without Ray."""

from __future__ import annotations

import re
from typing import Any

import pytest

from batchscout.orchestrator.config.keys import PlacementStrategy
from batchscout.orchestrator.execution.nodes.node_kinds import Choice, Node
from batchscout.orchestrator.execution.nodes.placement import (
    LaneShape,
    Room,
    lane_shape,
    largest_share,
    refuse_gpus_without_cuda,
)
from tests.support.studies import tiny_study


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


@pytest.mark.parametrize(
    ("strategy", "share"), [("pack", 4), ("strict_pack", 3), ("spread", 2)], ids=["pack", "strict_pack", "spread"]
)
def test_the_cpus_of_a_rank_follow_the_nodes_that_the_strategy_puts_it_on(
    strategy: PlacementStrategy, share: int
) -> None:
    """Two ranks where there are 8 and 2 CPUs: both fit onto the larger node with 4 each, and one on each with 2; of three
    such nodes with 6 CPUs the lane takes one alone."""
    rooms = [Room(6)] * 3 if strategy == "strict_pack" else [Room(8), Room(2)]
    assert largest_share(rooms, 1, 2, strategy) == share


def shape_on(nodes: list[tuple[int, int]], world_size: int, **placement: Any) -> LaneShape:
    """On nodes with so many CPUs and GPUs."""
    there = tuple(Node(f"node-{number}", *has) for number, has in enumerate(nodes))
    return lane_shape(tiny_study(world_size=world_size, placement=placement), Choice(there))


@pytest.mark.parametrize(("strategy", "lanes"), [("pack", 4), ("spread", 4), ("strict_pack", 3)])
def test_gpus_that_no_node_has_enough_of_together_make_no_strictly_packed_lane(strategy: str, lanes: int) -> None:
    """8 GPUs, in threes and a pair: each of the three nodes holds one lane of two, and only two nodes together a fourth."""
    assert shape_on([(8, 3), (8, 3), (8, 2)], 2, strategy=strategy).num_lanes == lanes


def test_a_rank_demands_a_kind_of_device_only_where_there_is_a_choice() -> None:
    here, other = Node("a", 8, 2, "H100"), Node("b", 8, 2, "T4")
    assert lane_shape(tiny_study(), Choice((here,), kind="H100")).of_its_kind == {}
    assert [*lane_shape(tiny_study(), Choice((here,), (other,), "H100")).of_its_kind] == ["accelerator_type:H100"]
    assert [*lane_shape(tiny_study(), Choice((here,), (), "H100", is_named=True)).of_its_kind] == [
        "accelerator_type:H100"
    ]


@pytest.mark.parametrize(
    ("nodes", "world_size", "placement", "said"),
    [
        (
            [(8, 2), (8, 2)],
            4,
            {},
            "placement.strategy is strict_pack, so that world_size 4 takes a node that holds 4 ranks (a GPU and 1 CPU each), and "
            "the largest holds 2; lower world_size or placement.cpus_per_rank, or set placement.strategy: pack, with which a trial "
            "may be on several nodes",
        ),
        (
            [(4, 0), (2, 0)],
            3,
            {"cpus_per_rank": 2},
            "world_size 3 takes a node that holds 3 ranks (2 CPUs each), and the largest holds 2;",
        ),
        (
            [(8, 3), (8, 3)],
            2,
            {"lanes": 3},
            "placement.strategy is strict_pack, and the nodes hold 2 lanes of 2 ranks (a GPU and 1 CPU each) where placement.lanes "
            "asks for 3; lower placement.lanes or placement.cpus_per_rank, or set placement.strategy: pack, with which a trial may "
            "be on several nodes",
        ),
    ],
)
def test_what_no_single_node_holds_is_refused_with_both_numbers(
    nodes: list[tuple[int, int]], world_size: int, placement: dict[str, Any], said: str
) -> None:
    with pytest.raises(ValueError, match=re.escape(said)):
        shape_on(nodes, world_size, strategy="strict_pack", **placement)
    assert shape_on(nodes, world_size, **placement).world_size == world_size, "on several nodes it runs"


def test_too_few_of_the_chosen_kind_are_not_helped_by_another() -> None:
    here, other = Node("a", 8, 2, "H100"), Node("b", 8, 8, "T4")
    with pytest.raises(ValueError, match="takes 4 GPUs, and the cluster has 2 of type H100; lower world_size"):
        lane_shape(tiny_study(world_size=4), Choice((here,), (other,), "H100"))


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
