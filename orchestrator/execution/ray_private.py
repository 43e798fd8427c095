"""Every use of what Ray and Tune (2.60) keep private, each with its reason: all of this may change with Ray's version.

That is names with an underscore, the wording of Ray's messages, what Tune keeps in memory, and environment variables
and resources that no documentation promises. No other file of this program uses any of it; with a new Ray, read this
one first.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

import ray
from ray._private.state import state
from ray.core.generated.gcs_pb2 import PlacementGroupTableData  # pyright: ignore[reportAttributeAccessIssue]
from ray.tune.progress_reporter import TrialProgressCallback
from ray.util.placement_group import PlacementGroup, remove_placement_group

if TYPE_CHECKING:
    from ray.tune.execution.tune_controller import TuneController
    from ray.tune.experiment import Trial as TuneTrial

# What Ray says

LOW_MEMORY = "running low on memory"
"""Ray's memory monitor says this about a process that it ended; the exception has no field for it."""

NODE_GONE = "its node"
"""Ray says this about a process that went with its node ("its node has died"); the exception has no field for it."""

NO_ROOM = "worker group startup timed out"
"""Train says this when it has found no room for a worker group four times; its exception is a ControllerError like
any."""

# What Ray reads from the environment

DRIVER_ENVIRONMENT = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "TUNE_DISABLE_SIGINT_HANDLER": "1",  # Ctrl-C is ours
    "TUNE_DISABLE_AUTO_CALLBACK_LOGGERS": "1",
    "TUNE_GLOBAL_CHECKPOINT_S": "1000000",  # the journal is what a study goes on from
    "RAY_AIR_NEW_OUTPUT": "0",  # the new one prints a banner at every verbosity
    "RAY_TRAIN_ENABLE_PREEMPTION_WATCHER": "0",  # the ranks look for themselves
    "RAY_worker_niceness": "0",  # with Ray's default of 15 anything else on the host slows down what is being timed
}
"""For the driver and the cluster that it starts."""

RANK_ENVIRONMENT = {"RAY_TRAIN_ENABLE_PRINT_PATCH": "0"}
"""For the processes of a study: a print of the user's is not to go through Train's logger."""

LANE_ENVIRONMENT = {
    # Train asks its workers this often how they are; its default of 2 s would be the price of every recycled lane.
    "RAY_TRAIN_HEALTH_CHECK_INTERVAL_S": "0.2",
    # Train waits this long for room, four times, before it says NO_ROOM; an autoscaler sees what it asks for.
    "RAY_TRAIN_WORKER_GROUP_START_TIMEOUT_S": "6",
}
"""For the driver whose lanes are opened."""


def relay_environment(num_lanes: int) -> dict[str, str]:
    """Return the variable that lets a relay for every lane start at once: by itself Tune starts them one by one."""
    return {"TUNE_MAX_PENDING_TRIALS_PG": str(num_lanes)}


# What the cluster knows

ON_THE_HEAD = {"node:__internal_head__": 0.001}
"""A share of a resource that only the head node has. What serves the whole study runs there: other nodes come and
go."""


def is_draining(node_id: str) -> bool:
    """True if the node is about to be taken away, so that Ray places nothing new there."""
    return node_id in state.get_draining_nodes()


def free_placement_groups(last: PlacementGroup | None) -> None:
    """Remove the placement groups that a lost Train run has left: its last one, and all of this driver whose creator
    died.

    Ray keeps such groups, and their CPUs and GPUs, until the driver ends. Ray Train's own cleaner asks the dashboard
    whether the creator lives, and gives up where there is no dashboard. The last group is removed in any case, because
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


# What Tune keeps and says


def keep_relays(tune_controller: TuneController, trial: TuneTrial, num_lanes: int) -> None:
    """Have Tune keep an idle actor for every lane: by itself it keeps one, and ends the processes of the others."""
    tune_controller._actor_cache.increase_max(trial.placement_group_factory, by=num_lanes)


def forget_ended_trials(tune_controller: TuneController) -> None:
    """Drop the trials that have ended from Tune's memory: it keeps every figure of theirs, and the journal has them
    all."""
    trials = tune_controller.get_trials()
    trials[:] = [trial for trial in trials if not trial.is_finished()]
    tune_controller._stopped_trials.clear()
    tune_controller._trials_to_cache.clear()


class NoProgress(TrialProgressCallback):
    """Replaces Tune's own callback, which prints nothing either but keeps every trial it hears of, with all its
    figures."""

    def on_trial_result(self, *told: object, **more: object) -> None: ...
    def on_trial_error(self, *told: object, **more: object) -> None: ...
    def on_trial_complete(self, *told: object, **more: object) -> None: ...


def quiet_tune() -> None:
    """Silence Tune's log of a lost trial with Ray's whole stack: the journal has one line, which names the stack's
    file."""
    logging.getLogger("ray.tune.execution.tune_controller").setLevel(logging.CRITICAL)
