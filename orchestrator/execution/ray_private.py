"""Every use of what Ray and Tune (2.60) keep private, each with its reason: all of this may change with Ray's version.

That is names with an underscore, the wording of Ray's messages, what Tune keeps in memory, and environment variables
and resources that no documentation promises. No other file of this program uses any of it; with a new Ray, read this
one first.
"""

from __future__ import annotations

import contextlib
import logging
import os
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import grpc
import ray
import ray._private.utils as ray_utils
import ray._private.worker as ray_worker
from ray._private import ray_constants
from ray._private.grpc_utils import init_grpc_channel
from ray._private.state import state
from ray.core.generated.gcs_pb2 import PlacementGroupTableData  # pyright: ignore[reportAttributeAccessIssue]
from ray.core.generated.gcs_service_pb2 import GetClusterIdRequest  # pyright: ignore[reportAttributeAccessIssue]
from ray.core.generated.gcs_service_pb2_grpc import NodeInfoGcsServiceStub
from ray.exceptions import ActorUnavailableError, AuthenticationError
from ray.train import Result
from ray.train._internal import utils as train_utils
from ray.train.torch import TorchTrainer
from ray.train.v2._internal.callbacks.datasets import DatasetsCallback
from ray.train.v2._internal.callbacks.placement_group_callback import PlacementGroupCleanerCallback
from ray.train.v2._internal.exceptions import WorkerHealthCheckFailedError
from ray.train.v2._internal.execution.context import TrainRunContext
from ray.train.v2._internal.execution.scaling_policy import FixedScalingPolicy
from ray.train.v2.api.callback import RayTrainCallback
from ray.tune.execution import class_cache
from ray.tune.progress_reporter import TrialProgressCallback
from ray.util.placement_group import PlacementGroup, remove_placement_group

from orchestrator import signals

if TYPE_CHECKING:
    from ray.tune.execution.tune_controller import TuneController
    from ray.tune.experiment import Trial as TuneTrial

# What Ray says

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


def cause_of(error: Exception) -> str:
    """Return the line of a rank's error that says most: of a process that is gone Train says only that it did not
    answer."""
    said = str(error.health_check_failure if isinstance(error, WorkerHealthCheckFailedError) else error)
    if NO_CAUSE in said:
        return "its process died without a message"
    return next((line for line in said.splitlines() if line.strip()), type(error).__name__)[:300]


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
    # Train would change to a folder of its own. Without that ranks are where Ray has put the files that the study ships.
    "RAY_CHDIR_TO_TRIAL_DIR": "0",
}
"""For the driver whose lanes are opened."""


CONTROLLER_ENVIRONMENT = {
    # Where one rank has run out of memory, the others hang in a collective, and Train waits this long for them to leave it.
    "TORCH_PROCESS_GROUP_SHUTDOWN_TIMEOUT_S": "5",
}
"""For the controllers of lanes, which Train starts without this part of the driver's environment."""


def relay_environment(num_lanes: int) -> dict[str, str]:
    """Return the variable that lets a relay for every lane start at once: by itself Tune starts them one by one."""
    return {"TUNE_MAX_PENDING_TRIALS_PG": str(num_lanes)}


def forward_no_keys() -> None:
    """Keep Tune from forwarding the keys of an AWS account to its actors, which read nothing from there.

    Tune puts them into the actors' runtime environment, and Ray writes those into a log.
    """
    class_cache.ENV_VARS_TO_PROPAGATE -= {name for name in class_cache.ENV_VARS_TO_PROPAGATE if name.startswith("AWS_")}


# How a connection begins

SECONDS_TO_ANSWER = 5
"""How long --address has to accept a connection, and to answer."""


def refuses_us(address: str) -> bool:
    """True if the cluster at host:port does not accept the token that this process has, or that it has none.

    ray.init asks again for 20 s, prints a line each time, and then says that it found no cluster.
    """
    try:
        with contextlib.closing(init_grpc_channel(address)) as channel:
            NodeInfoGcsServiceStub(channel).GetClusterId(GetClusterIdRequest(), timeout=SECONDS_TO_ANSWER)
    except AuthenticationError:  # a token is to be shown, and there is none
        return True
    except grpc.RpcError as error:
        return isinstance(error, grpc.Call) and error.code() is grpc.StatusCode.UNAUTHENTICATED
    return False


def sigterm_left_alone() -> contextlib.AbstractContextManager[None]:
    """Keep ray.init from taking SIGTERM for itself: it would end this process at once, with exit code 15."""
    return _replaced(ray_utils, "set_sigterm_handler", lambda handler: None)


def shut_down() -> None:
    """Call ray.shutdown, and go on hearing SIGTERM.

    Ray's part in C++ has a handler of its own for it, and when it ends, half a second into the call, it leaves the signal's
    default action behind, whatever was there before: to end this process at once.
    """
    disconnect = state.disconnect  # the first thing that Ray does after that

    def hear_and_disconnect() -> None:
        signals.hear_again()
        disconnect()

    with _replaced(state, "disconnect", hear_and_disconnect):
        ray.shutdown()


def loopback_only() -> contextlib.AbstractContextManager[None]:
    """Have ray.init start a cluster that listens on loopback alone.

    Ray does so on systems where it supports no cluster of several machines; an address of loopback that it is given, it
    replaces by one that others reach.
    """
    return _replaced(ray_constants, "ENABLE_RAY_CLUSTER", False)


@contextlib.contextmanager
def _replaced(module: object, name: str, value: object) -> Iterator[None]:
    before = getattr(module, name)
    setattr(module, name, value)
    try:
        yield
    finally:
        setattr(module, name, before)


def files_in(folder: Path) -> dict[str, str]:
    """Return the argument of ray.init for a cluster that keeps its files in this folder."""
    return {"_temp_dir": str(folder)}


def meet_in(open_store: Callable[[], tuple[str, int]]) -> None:
    """Have this process, one of a Train group, meet the others in a store that rank 0 opens with this function.

    Train's own lets torch listen on every address of the machine, with nothing to keep strangers out.
    """
    train_utils.get_address_and_port = open_store
    os.environ["TORCHELASTIC_USE_AGENT_STORE"] = "True"  # torch's word for a store that somebody else has opened


def servers() -> dict[str, subprocess.Popen[bytes]]:
    """Return the two processes that the cluster which this one has started cannot do without, by their names."""
    node = ray_worker._global_node
    assert node is not None
    return {name: node.all_processes[name][0].process for name in ("gcs_server", "raylet")}


def raylet_socket() -> str:
    """Return where the raylet listens by which this process reaches its cluster."""
    node = ray_worker._global_node
    assert node is not None
    return node.raylet_socket_name


def without_its_errors() -> contextlib.AbstractContextManager[None]:
    """Keep Ray from printing the errors of a local cluster: of a raylet that has died, twenty lines of its log. The study
    says itself what has died of what."""
    return _replaced(ray_worker, "_worker_logs_enabled", False)


# What the cluster knows

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


class LaneTrainer(TorchTrainer):
    """Leaves out three processes that Train starts beside a group of ranks. Each imports Ray, on the cores on which the ranks start at
    that time; for the second and the third Train even waits before it lets the ranks begin.

    One is for Ray Data: lanes read no data sets of Ray's. One removes the placement group of a controller that has died:
    `free_placement_groups` does that. One repeats to the autoscaler what the placement group asks of it already, in a
    request that replaces the study's own, and that stands for minutes after a driver was killed."""

    def _create_default_callbacks(self) -> list[RayTrainCallback]:
        left_out = (DatasetsCallback, PlacementGroupCleanerCallback)
        return [one for one in super()._create_default_callbacks() if not isinstance(one, left_out)]

    def _initialize_and_run_controller(self, **told: Any) -> Result:
        return super()._initialize_and_run_controller(**told | {"scaling_policy": WithoutRequests(self.scaling_config)})


class WithoutRequests(FixedScalingPolicy):
    """As many ranks as the lane has, and no request to the autoscaler beside their placement group."""

    def after_controller_start(self, train_run_context: TrainRunContext) -> None:
        pass

    def _maybe_send_resource_request(self) -> None:
        pass


def end_train_runs() -> None:
    """End the controllers of all Train runs of this driver, and their worker groups with them.

    Train keeps its handle of a controller to itself, and a controller that waits for room, or for processes to start,
    listens to nobody.
    """
    job, driver = ray.get_runtime_context().get_job_id(), cast(Any, ray_worker.global_worker)
    for actor in state.actor_table(None, job_id=ray.JobID.from_hex(job)).values():
        if actor["ActorClassName"] == "TrainController" and actor["State"] != "DEAD":
            driver.core_worker.kill_actor(ray.ActorID.from_hex(actor["ActorID"]), True)


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
