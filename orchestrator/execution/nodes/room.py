"""How many lanes of a study the nodes of a cluster hold: those that are there, and those that an autoscaler may start. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from batchscout.orchestrator.execution.nodes.autoscaler import MayStart
from batchscout.orchestrator.execution.nodes.node_kinds import Choice, Node
from batchscout.orchestrator.execution.nodes.placement import LaneShape, Room, lanes_on


def lanes_held(nodes: Iterable[Node], choice: Choice, shape: LaneShape) -> int:
    """Return how many lanes run at once on these nodes, as far as they are of the kind that the study runs on. What else runs there is
    not asked: a lane that finds no room waits for it."""
    rooms = [Room(node.num_cpus, node.num_gpus if shape.use_gpu else None) for node in nodes if choice.takes(node)]
    return lanes_on([room.num_ranks(shape.cpus_per_rank) for room in rooms], shape.world_size, shape.strategy)


def at_most(there: Sequence[Node], scaler: MayStart) -> list[Node]:
    """Return the nodes that the cluster may have at once: those that are there, and the largest that may yet be started beside them."""
    left, workers = list(scaler.nodes), [node for node in there if not node.is_head]
    for worker in workers:
        started = next((node for node in left if _are_alike(node, worker)), None)
        if started is not None:
            left.remove(started)
    left.sort(key=lambda node: (node.num_gpus, node.num_cpus), reverse=True)
    return [*there, *left[: max(0, scaler.most - len(workers))]]


def _are_alike(of_type: Node, there: Node) -> bool:
    """True if a node that is there may be one of this type, by what it has."""
    has_kind = of_type.kind in (None, there.kind)
    return has_kind and (of_type.num_cpus, of_type.num_gpus) == (there.num_cpus, there.num_gpus)


def bundles_of(num_lanes: int, shape: LaneShape) -> list[dict[str, float]]:
    """Return what so many lanes take of nodes: a bundle for every rank, or for every lane that must be on one node."""
    rank = {"CPU": float(shape.cpus_per_rank)} | ({"GPU": 1.0} if shape.use_gpu else {}) | shape.of_its_kind
    if shape.strategy != "strict_pack":
        return [rank for _ in range(num_lanes * shape.world_size)]
    return [{name: shape.world_size * value for name, value in rank.items()} for _ in range(num_lanes)]


def bundles_of_whole(nodes: Iterable[Node], shape: LaneShape) -> list[dict[str, float]]:
    """Return what takes all of each of these nodes, so that no two bundles are on one."""
    return [{"CPU": float(node.num_cpus)} | ({"GPU": float(node.num_gpus)} if shape.use_gpu else {}) for node in nodes]
