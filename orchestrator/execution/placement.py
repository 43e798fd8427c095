"""How many lanes of what size a cluster holds, and what lies on its head."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import ray

from orchestrator.config.keys import StudyConfig


def lane_shape(config: StudyConfig) -> Any:
    """How many lanes of what size the cluster holds. Raises ValueError where it does not hold one."""

    resources = ray.cluster_resources()
    num_gpus, num_cpus = int(resources.get("GPU", 0)), int(resources.get("CPU", 0))
    world_size, placement = config.world_size, config.placement
    lanes = placement.lanes or (max(1, num_gpus // world_size) if num_gpus else 1)
    ranks = lanes * world_size
    cpus_of_nodes = [int(node["Resources"].get("CPU", 0)) for node in ray.nodes() if node["Alive"]]
    cpus_per_rank = placement.cpus_per_rank or (1 if num_gpus else largest_share(cpus_of_nodes, ranks))
    for what, need, have in (("GPUs", ranks if num_gpus else 0, num_gpus), ("CPUs", ranks * cpus_per_rank, num_cpus)):
        if need > have:
            raise ValueError(
                f"{lanes} lane(s) of world_size {world_size} need {need} {what}, and the cluster has {have}; "
                "lower world_size or placement.lanes, or add nodes"
            )
    return LaneShape(lanes, world_size, cpus_per_rank, use_gpu=num_gpus > 0)


def largest_share(cpus_of_nodes: list[int], num_ranks: int) -> int:
    """The most CPUs that each of so many ranks can have, none of them on two nodes; 1 where there are too few."""
    shares = range(max(cpus_of_nodes, default=1), 0, -1)
    return next((share for share in shares if sum(cpus // share for cpus in cpus_of_nodes) >= num_ranks), 1)


# What serves the whole study takes a share of a resource that only the head has: other nodes come and go.
ON_THE_HEAD = {"node:__internal_head__": 0.001}


@dataclass(frozen=True)
class LaneShape:
    """What every lane of a study is made of."""

    num_lanes: int
    world_size: int
    cpus_per_rank: int
    use_gpu: bool
