"""How many lanes of what size a cluster holds."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import ray

from orchestrator.config.keys import StudyConfig
from orchestrator.execution.ray_private import ACCELERATOR
from orchestrator.units import counted

MOST_CPUS_OF_A_GPU = 8

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

    @property
    def num_ranks(self) -> int:
        """Return how many ranks all lanes have together."""
        return self.num_lanes * self.world_size


def lane_shape(config: StudyConfig) -> LaneShape:
    """Return what the study file asks for, and else the most that the cluster holds. Raises ValueError where it holds
    less."""
    refuse_gpus_without_cuda(ray.nodes())
    resources = ray.cluster_resources()
    num_gpus, num_cpus = int(resources.get("GPU", 0)), int(resources.get("CPU", 0))
    world_size, placement = config.world_size, config.placement
    num_lanes = placement.lanes or (max(1, num_gpus // world_size) if num_gpus else 1)
    share = largest_share(_rooms(on_gpus=num_gpus > 0), num_lanes * world_size)
    shape = LaneShape(num_lanes, world_size, placement.cpus_per_rank or share, use_gpu=num_gpus > 0)
    _refuse_too_few(shape, "GPU", shape.num_ranks if shape.use_gpu else 0, num_gpus)
    _refuse_too_few(shape, "CPU", shape.num_ranks * shape.cpus_per_rank, num_cpus)
    return shape


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


def largest_share(rooms: list[Room], num_ranks: int) -> int:
    """Return the most CPUs that each of so many ranks can have, none of them on two nodes; 1 where there are too
    few. A rank on a GPU has use for a few only: to compile, and to fetch and pin its batches."""
    on_gpus = any(room.num_gpus is not None for room in rooms)
    most = max((room.num_cpus for room in rooms), default=1)
    shares = range(min(most, MOST_CPUS_OF_A_GPU) if on_gpus else most, 0, -1)
    return next((share for share in shares if sum(room.num_ranks(share) for room in rooms) >= num_ranks), 1)


def _rooms(*, on_gpus: bool) -> list[Room]:
    alive = [node["Resources"] for node in ray.nodes() if node["Alive"]]
    return [Room(int(one.get("CPU", 0)), int(one.get("GPU", 0)) if on_gpus else None) for one in alive]


def _refuse_too_few(shape: LaneShape, what: str, num_needed: int, num_there: int) -> None:
    if num_needed > num_there:
        raise ValueError(
            f"world_size {shape.world_size} on {counted(shape.num_lanes, 'lane')} takes {counted(num_needed, what)}, and the cluster has "
            f"{num_there}; lower world_size or placement.lanes, or add nodes"
        )
