"""What errors of Ray and Train say where they have no field for it."""

from __future__ import annotations

import ray
from ray._private.state import state
from ray.exceptions import ActorUnavailableError, RayTaskError
from ray.train import ControllerError
from ray.train.v2._internal.exceptions import WorkerHealthCheckFailedError

LOW_MEMORY = "running low on memory"
"""Ray's memory monitor says this about a process that it ended; the exception has no field for it."""

NODE_GONE = "its node"
"""Ray says this about a process that went with its node ("its node has died"); the exception has no field for it."""

NO_CAUSE = "died unexpectedly"
"""Ray says this about a process of whose end it knows nothing."""

NO_ROOM = "worker group startup timed out"
"""Train says this when it has found no room for a worker group four times; its exception is a ControllerError like
any."""


def is_lost_process(error: Exception) -> bool:
    """True if Train says with this error of a rank that its process is gone."""
    return isinstance(error, WorkerHealthCheckFailedError)


def raylet_of_unavailable(error: Exception) -> tuple[str, int] | None:
    """Return where the raylet of a rank's node listens, if Train says with this error that the rank could not be reached; None if it says
    something else."""
    failure = error.health_check_failure if isinstance(error, WorkerHealthCheckFailedError) else None
    if not isinstance(failure, ActorUnavailableError) or failure.actor_id is None:
        return None
    node_id = state.actor_table(failure.actor_id)["Address"]["NodeID"]
    there = next((node for node in ray.nodes() if node["NodeID"] == node_id), None)
    return None if there is None else (there["NodeManagerAddress"], there["NodeManagerPort"])


def told_by(lost: Exception) -> str:
    """Return what a Train run was lost with: where a rank raised it before it served, that alone, which Ray puts last in a traceback."""
    failure = lost.controller_failure if isinstance(lost, ControllerError) else lost
    error = failure.cause if isinstance(failure, RayTaskError) else lost
    return f"{type(error).__name__}: {error}"


def cause_of(error: Exception) -> str:
    """Return the line of a rank's error that says most: of a process that is gone Train says only that it did not
    answer."""
    failure = error.health_check_failure if isinstance(error, WorkerHealthCheckFailedError) else error
    if isinstance(failure, ActorUnavailableError):
        return "its process could not be reached"
    said = str(failure)
    if NO_CAUSE in said:
        return "its process died without a message"
    return next((line for line in said.splitlines() if line.strip()), type(error).__name__)[:300]
