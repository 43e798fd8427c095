"""How many lanes of what size a cluster holds."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import ray

from batchscout.orchestrator.config.keys import PlacementStrategy, StudyConfig
from batchscout.orchestrator.execution.nodes.node_kinds import Choice, Node, nodes_of
from batchscout.orchestrator.execution.ray_private.cluster import ACCELERATOR
from batchscout.orchestrator.units import counted

MOST_CPUS_OF_A_GPU = 8
# How much of what a node announces of its kind each rank demands: the announced 1 is to suffice for all of them.
SHARE_OF_A_KIND = 0.001

# Ray counts Intel's and Apple's devices as GPUs, too, and the lanes' ranks meet over NCCL.
_NO_CUDA = re.compile(r"Intel-GPU-.*|M\d(-Pro|-Max|-Ultra)?|Apple-Silicon")


@dataclass(frozen=True)
class LaneShape:
    """What every lane of a study is made of."""

    num_lanes: int
    world_size: int
    """Ranks of each lane."""
    cpus_per_rank: int
    use_gpu: bool
    """One GPU for every rank."""
    strategy: PlacementStrategy = "pack"
    """How its ranks are placed over nodes."""
    kind: str | None = None
    """The kind of device that each rank demands of its node; None where it takes any."""

    @property
    def num_ranks(self) -> int:
        """Return how many ranks all lanes have together."""
        return self.num_lanes * self.world_size

    @property
    def of_its_kind(self) -> dict[str, float]:
        """Return what a rank demands of its node beside CPUs and a GPU, so that it has the right kind of device."""
        return {} if self.kind is None else {f"{ACCELERATOR}{self.kind}": SHARE_OF_A_KIND}


def nodes_now() -> list[Node]:
    """Return the nodes of the cluster. Raises ValueError where trials cannot run on what one of them has."""
    described = ray.nodes()
    refuse_gpus_without_cuda(described)
    return nodes_of(described)


def lane_shape(config: StudyConfig, choice: Choice) -> LaneShape:
    """Return what the study file asks for, and else the most that the chosen nodes hold, with those that an autoscaler may start.
    Raises ValueError where they hold less."""
    use_gpu = choice.on_gpus
    rooms = [Room(node.num_cpus, node.num_gpus if use_gpu else None) for node in choice.nodes]
    world_size, placement = config.world_size, config.placement
    num_gpus, num_cpus = sum(room.num_gpus or 0 for room in rooms), sum(room.num_cpus for room in rooms)
    of_gpus = lanes_on([room.num_gpus or 0 for room in rooms], world_size, placement.strategy)
    num_lanes = placement.lanes or (max(1, of_gpus) if use_gpu else 1)
    share = placement.cpus_per_rank or largest_share(rooms, num_lanes, world_size, placement.strategy)
    shape = LaneShape(num_lanes, world_size, share, use_gpu, placement.strategy, choice.demanded)
    has = "has" if all(node.is_there for node in choice.nodes) else "has at most"
    _refuse_too_few(shape, "GPU", shape.num_ranks if use_gpu else 0, num_gpus, has)
    _refuse_too_few(shape, "CPU", shape.num_ranks * shape.cpus_per_rank, num_cpus, has)
    _refuse_too_small_nodes(shape, rooms)
    return shape


def lanes_on(ranks: Sequence[int], world_size: int, strategy: PlacementStrategy) -> int:
    """Return how many lanes nodes hold together that have room for so many ranks each."""
    return sum(there // world_size for there in ranks) if strategy == "strict_pack" else sum(ranks) // world_size


def refuse_gpus_without_cuda(nodes: Iterable[Mapping[str, Any]]) -> None:
    """Raise ValueError where a node, as `ray.nodes` describes it, has GPUs that neither CUDA nor ROCm drives."""
    for node in nodes:
        resources = node["Resources"] if node["Alive"] else {}
        kinds = [name.removeprefix(ACCELERATOR) for name in resources if name.startswith(ACCELERATOR)]
        refused = [kind for kind in kinds if _NO_CUDA.fullmatch(kind)]
        if resources.get("GPU") and refused:
            raise ValueError(
                f"{node['NodeManagerHostname']} has {counted(round(resources['GPU']), 'GPU')} of type {refused[0]}, and trials run on those "
                "of NVIDIA (CUDA) and AMD (ROCm) alone; to use its CPUs, start Ray there with `ray start --head --num-gpus 0` "
                "and run with --address auto"
            )


@dataclass(frozen=True)
class Room:
    """What a node has for ranks."""

    num_cpus: int
    num_gpus: int | None = None
    """None: its ranks run on CPUs, as many as there are CPUs for."""

    def num_ranks(self, cpus_per_rank: int) -> int:
        ranks = self.num_cpus // cpus_per_rank
        return ranks if self.num_gpus is None else min(ranks, self.num_gpus)


def largest_share(
    rooms: Sequence[Room], num_lanes: int, world_size: int = 1, strategy: PlacementStrategy = "pack"
) -> int:
    """Return the most CPUs that each rank of so many lanes can have, where the strategy puts it; 1 where there are too
    few. A rank on a GPU has use for a few only: to compile, and to fetch and pin its batches."""
    on_gpus = any(room.num_gpus is not None for room in rooms)
    most = max((room.num_cpus for room in rooms), default=1)
    shares = range(min(most, MOST_CPUS_OF_A_GPU) if on_gpus else most, 0, -1)
    return next((share for share in shares if _hold(rooms, num_lanes, world_size, share, strategy)), 1)


def _hold(
    rooms: Sequence[Room], num_lanes: int, world_size: int, cpus_per_rank: int, strategy: PlacementStrategy
) -> bool:
    """True if nodes with these rooms hold so many lanes, none of whose ranks is on two of them, as the strategy wants it."""
    ranks = [room.num_ranks(cpus_per_rank) for room in rooms]
    if strategy == "spread":
        even = num_lanes * -(-world_size // max(1, len(rooms)))
        ranks = [min(there, even) for there in ranks]
    return lanes_on(ranks, world_size, strategy) >= num_lanes


def _refuse_too_few(shape: LaneShape, what: str, num_needed: int, num_there: int, has: str) -> None:
    if num_needed > num_there:
        of_kind = f" of type {shape.kind}" if shape.kind else ""
        or_else = (
            " or placement.cpus_per_rank, or give its nodes more CPUs (of a job: --cpus-per-node)"
            if what == "CPU"
            else ""
        )
        raise ValueError(
            f"world_size {shape.world_size} on {counted(shape.num_lanes, 'lane')} takes {counted(num_needed, what)}, and the cluster {has} "
            f"{num_there}{of_kind}; lower world_size or placement.lanes{or_else}, or add nodes"
        )


def _refuse_too_small_nodes(shape: LaneShape, rooms: Sequence[Room]) -> None:
    """Raise ValueError where each lane is to be on one node, and too few nodes are large enough."""
    if shape.strategy != "strict_pack" or shape.world_size == 1:
        return
    ranks = [room.num_ranks(shape.cpus_per_rank) for room in rooms]
    held = lanes_on(ranks, shape.world_size, shape.strategy)
    if held >= shape.num_lanes:
        return
    needs = f"{'a GPU and ' if shape.use_gpu else ''}{counted(shape.cpus_per_rank, 'CPU')} each"
    if held == 0:
        raise ValueError(
            f"placement.strategy is strict_pack, so that world_size {shape.world_size} takes a node that holds "
            f"{counted(shape.world_size, 'rank')} ({needs}), and the largest holds {max(ranks, default=0)}; lower world_size or "
            "placement.cpus_per_rank, or set placement.strategy: pack, with which a trial may be on several nodes"
        )
    raise ValueError(
        f"placement.strategy is strict_pack, and the nodes hold {counted(held, 'lane')} of {counted(shape.world_size, 'rank')} "
        f"({needs}) where placement.lanes asks for {shape.num_lanes}; lower placement.lanes or placement.cpus_per_rank, or set "
        "placement.strategy: pack, with which a trial may be on several nodes"
    )
