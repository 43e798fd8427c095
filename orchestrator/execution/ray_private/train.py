"""What a lane needs of Train."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, cast

import ray
import ray._private.worker as ray_worker
from ray._private.state import state
from ray.train import Result
from ray.train.v2._internal.callbacks.datasets import DatasetsCallback
from ray.train.v2._internal.callbacks.placement_group_callback import PlacementGroupCleanerCallback
from ray.train.v2._internal.execution.context import TrainRunContext
from ray.train.v2._internal.execution.scaling_policy import FixedScalingPolicy
from ray.train.v2.api.callback import RayTrainCallback
from ray.train.v2.api.data_parallel_trainer import DataParallelTrainer


class LaneTrainer(DataParallelTrainer):
    """Leaves out three processes that Train starts beside a group of ranks. Each imports Ray, on the cores on which the ranks start at
    that time; for the second and the third Train even waits before it lets the ranks begin.

    One is for Ray Data: lanes read no data sets of Ray's. One removes the placement group of a controller that has died:
    `free_placement_groups` does that. One repeats to the autoscaler what the placement group asks of it already, in a
    request that replaces the study's own, and that stands for minutes after a driver was killed."""

    def _create_default_callbacks(self) -> list[RayTrainCallback]:
        left_out = (DatasetsCallback, PlacementGroupCleanerCallback)
        return [one for one in super()._create_default_callbacks() if not isinstance(one, left_out)]

    def _initialize_and_run_controller(self, **told: Any) -> Result:
        mine = {"scaling_policy": WithoutRequests(self.scaling_config), "train_fn_ref": _Told(self._get_train_func())}
        return super()._initialize_and_run_controller(**told | mine)


@dataclass(frozen=True)
class _Told:
    """What a rank is to run, in the message that starts it. Train puts it into the object store, of which every node that reads it has a copy: a
    rank that is started after such a node was lost may ask that node for it, and asks another after 10 s."""

    function: Callable[[], None]

    def get(self) -> Callable[[], None]:
        return self.function


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
