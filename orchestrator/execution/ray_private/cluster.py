"""What the cluster knows: its nodes, its autoscaler, and the placement groups of lost runs."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

import ray
from ray._private.state import state
from ray.core.generated.gcs_pb2 import PlacementGroupTableData  # pyright: ignore[reportAttributeAccessIssue]
from ray.util.placement_group import PlacementGroup, remove_placement_group

HEAD = "node:__internal_head__"
"""The resource that only the head node has."""

ON_THE_HEAD = {HEAD: 0.001}
"""A share of it. What serves the whole study runs there: other nodes come and
go."""


ACCELERATOR = "accelerator_type:"
"""The beginning of the resource by which a node tells what accelerators it has: `accelerator_type:H100`."""


def is_draining(node_id: str) -> bool:
    """True if the node is about to be taken away, so that Ray places nothing new there."""
    return node_id in state.get_draining_nodes()


def has_ended(job: str) -> bool:
    """True if the driver with this job id has ended, or was lost."""
    return any(one["JobID"] == job and one["IsDead"] for one in state.job_table())


def nodes_that_stay() -> list[dict[str, Any]]:
    """Return the nodes of the cluster as `ray.nodes` does, without those that are about to be taken away."""
    leaving = state.get_draining_nodes()
    return [node for node in ray.nodes() if node["NodeID"] not in leaving]


IN_KUBERAY = "RAY_USAGE_STATS_KUBERAY_IN_USE"
"""KubeRay sets this variable in its pods."""


def runs_a_monitor(address: str) -> bool:
    """True if the monitor of the cluster with this gcs runs on this machine, as it does on every head that was not started with
    --no-monitor. It is in the monitor that an autoscaler runs."""
    return _monitor(address) is not None


def file_of_autoscaler(address: str) -> str | None:
    """Return the file that the autoscaler of the cluster with this gcs was started with, if it runs on this machine. Ray
    keeps it to its monitor."""
    return next((word.partition("=")[2] for word in _monitor(address) or () if word.startswith(_AUTOSCALING)), None)


_AUTOSCALING = "--autoscaling-config="


def _monitor(address: str) -> list[str] | None:
    """Return the words that the cluster's monitor was started with; None if it does not run here."""
    for process in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):  # it has ended meanwhile
            words = process.read_text(errors="replace").split("\0")
            if f"--gcs-address={address}" in words and any(word.endswith("/monitor.py") for word in words):
                return words
    return None


def free_placement_groups(last: PlacementGroup | None) -> None:
    """Remove the placement groups that a lost Train run has left: its last one, and all of this driver whose creator
    died.

    Ray keeps such groups, and their CPUs and GPUs, until the driver ends. Ray Train's own cleaner, which `LaneTrainer` leaves
    out, asks the dashboard whether the creator lives, and gives up where there is none. The last group is removed in any case, because
    the controller of a failed run may live on for a while.
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
    """True if an actor created the group and has died. A group that the driver created has no actor, which Ray calls
    dead."""
    return group.creator_actor_dead and not ray.ActorID(group.creator_actor_id).is_nil()
