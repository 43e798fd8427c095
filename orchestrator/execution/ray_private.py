"""What Ray knows of its cluster and has no public call for (2.60): everything here may change with its version."""

from __future__ import annotations

import ray
from ray._private.state import state
from ray.core.generated.gcs_pb2 import PlacementGroupTableData  # pyright: ignore[reportAttributeAccessIssue]
from ray.util.placement_group import PlacementGroup, remove_placement_group


def is_draining(node_id: str) -> bool:
    """Whether the node is about to be taken away, so that nothing new is placed there."""
    return node_id in state.get_draining_nodes()


def free_placement_groups(last: PlacementGroup | None) -> None:
    """Remove what a lost Train run has left: the last group that it had, and all of this driver whose creator is dead.

    Ray keeps them, and their CPUs and GPUs, until the driver ends. Ray Train's own cleaner asks the dashboard whether the
    creator lives, and gives up where there is none; and a controller that failed may live on for a while.
    """
    if last is not None:
        remove_placement_group(last)
    job = ray.get_runtime_context().get_job_id()
    for data in state._connect_and_get_accessor().get_placement_group_table():
        group = PlacementGroupTableData.FromString(data)
        gone = group.state == PlacementGroupTableData.REMOVED
        if not gone and group.creator_job_id.hex() == job and _has_dead_creator(group):
            remove_placement_group(PlacementGroup(ray.PlacementGroupID(group.placement_group_id)))


def _has_dead_creator(group: PlacementGroupTableData) -> bool:
    """What the driver itself created has no actor for its creator, which Ray counts as a dead one."""
    return group.creator_actor_dead and not ray.ActorID(group.creator_actor_id).is_nil()
