"""What of the study runs in the controller of a lane's Train run: it makes a group of the ranks, ends them, and sees what they die of."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any

import ray
from ray import train
from ray.exceptions import RayActorError
from ray.train.backend import Backend, BackendConfig

from batchscout.orchestrator.execution import group, termination
from batchscout.orchestrator.execution.cluster_servers import refuses
from batchscout.orchestrator.execution.dispatcher import DispatcherHandle
from batchscout.orchestrator.execution.ray_private.errors import (
    LOW_MEMORY,
    NODE_GONE,
    cause_of,
    is_lost_process,
    raylet_of_unavailable,
)
from batchscout.orchestrator.study.messages import Blame


@dataclass
class Ranks(BackendConfig):
    """Has the processes of a Train run become a group of ranks."""

    backend: str
    """torch's word: nccl, or gloo on CPUs."""

    @property
    def backend_cls(self) -> type[Backend]:
        return _Ranks


class _Ranks(Backend):
    """In place of Train's own for torch, which imports torch into the controller, before any rank is started, and which waits up to 30 s for the
    ranks to leave their collectives. They need not: their processes end with the group."""

    share_cuda_visible_devices = True  # NCCL talks from GPU to GPU of a node only where it sees both

    def on_start(self, worker_group: Any, backend_config: BackendConfig) -> None:
        assert isinstance(backend_config, Ranks)
        worker_group.execute(termination.hear_sigterm)
        if backend_config.backend == "nccl":
            worker_group.execute(group.require_cuda)
        address, port = worker_group.execute_single(0, group.open_store)
        worker_group.execute(group.join, backend_config.backend, address, port)

    def on_shutdown(self, worker_group: Any, backend_config: BackendConfig) -> None:
        """End the ranks. Train would ask them to end first, and wait for the answer of those that went with their node, too."""
        for worker in worker_group.get_workers():
            ray.kill(worker.actor)


class TellCause(train.UserCallback):
    """Tells the Dispatcher what a group of the lane's processes died of."""

    def __init__(self, dispatcher: DispatcherHandle, lane: str) -> None:
        self._dispatcher, self._lane = dispatcher, lane

    def after_exception(self, run_context: Any, worker_exceptions: dict[int, Exception]) -> None:
        lost = [rank for rank, error in sorted(worker_exceptions.items()) if is_lost_process(error)]
        causes = [f"rank {rank}: {cause_of(error)}" for rank, error in sorted(worker_exceptions.items())]
        blame = blame_for("\n".join(map(str, worker_exceptions.values())))
        if blame == "trial" and any(map(_went_with_its_node, worker_exceptions.values())):
            blame = "machine"
        try:
            ray.get(self._dispatcher.group_died.remote(self._lane, "; ".join(causes), blame, lost))
        except RayActorError:  # without a Dispatcher there is nothing to do: end this Train run with its controller
            os._exit(1)


def _went_with_its_node(error: Exception) -> bool:
    """True if a rank does not answer, and neither does its node's raylet: Ray itself takes half a minute to call a node dead that went
    without a word."""
    raylet = raylet_of_unavailable(error)
    return raylet is not None and refuses(raylet)


def blame_for(said: str) -> Blame:
    """Return what is to blame, judged by what Ray says about the processes of a group that died."""
    return "memory" if LOW_MEMORY in said else "machine" if NODE_GONE in said else "trial"
