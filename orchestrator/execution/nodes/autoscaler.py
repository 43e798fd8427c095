"""The autoscaler of a cluster: which nodes it may start, and what it is asked for. A thin shell around Ray's.

Ray tells a driver nothing of the nodes that an autoscaler may yet start, so a process on the head reads the file that
the autoscaler was started with.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import ray
import yaml
from ray.autoscaler.sdk import request_resources
from ray.exceptions import RayError

from batchscout.orchestrator.execution.nodes.node_kinds import Node, kind_in
from batchscout.orchestrator.execution.ray_private.cluster import (
    IN_KUBERAY,
    ON_THE_HEAD,
    file_of_autoscaler,
    has_ended,
    runs_a_monitor,
)

# How soon a lost driver's request is withdrawn, and this study's is made again where another job's has replaced it.
SECONDS_BETWEEN_LOOKS = 2.0


@dataclass(frozen=True)
class NoAutoscaler:
    """The nodes are those that somebody has started."""


@dataclass(frozen=True)
class Unreadable:
    """An autoscaler may start nodes, and which ones is not to be read: that of KubeRay runs in a container of its own."""


@dataclass(frozen=True)
class MayStart:
    """An autoscaler that starts nodes where they are asked for, and ends those that are idle."""

    nodes: tuple[Node, ...]
    """The workers of each type that there may be at once, whether they are there or not."""
    most: int
    """The most workers of all types together."""


Autoscaler = NoAutoscaler | Unreadable | MayStart


def autoscaler() -> Autoscaler:
    """Return what the cluster that this process is connected to may start."""
    is_head = runs_a_monitor(ray.get_runtime_context().gcs_address)
    there: str | None = _on_the_head() if is_head else ray.get(_reading_on_the_head().remote())
    if there == "":
        return Unreadable()
    return NoAutoscaler() if there is None else may_start(yaml.safe_load(there))


def _reading_on_the_head() -> Any:
    """Return what runs there, in a process that ends with it."""
    return ray.remote(num_cpus=0, resources=ON_THE_HEAD, max_calls=1)(_on_the_head)


def _on_the_head() -> str | None:
    """Return the text of the autoscaler's file; None if there is no autoscaler, and nothing if it has no file here."""
    address = ray.get_runtime_context().gcs_address
    file = file_of_autoscaler(address)
    if file is not None:
        return Path(file).expanduser().read_text()
    return "" if IN_KUBERAY in os.environ and not runs_a_monitor(address) else None


def may_start(config: Mapping[str, Any]) -> Autoscaler:
    """Return which workers a file for `ray up` lets an autoscaler start. Of a type that does not say what its nodes have, Ray
    itself knows it only once one is there: it does not count."""
    types, head = config.get("available_node_types") or {}, config.get("head_node_type")
    most = int(config.get("max_workers", 0))
    nodes = [
        _node(name, one["resources"])
        for name, one in types.items()
        if name != head and one.get("resources")
        for _ in range(min(most, int(one.get("max_workers", most))))
    ]
    return MayStart(tuple(nodes), most) if nodes else NoAutoscaler()


def _node(name: str, resources: Mapping[str, float]) -> Node:
    return Node(name, int(resources.get("CPU", 0)), int(resources.get("GPU", 0)), kind_in(resources), is_there=False)


class Asker:
    """Asks the autoscaler in the driver's place, again and again: Ray keeps the latest request of the whole cluster alone, and the actor
    by which other jobs' Ray Train and Ray Data ask (`_AutoscalingCoordinatorActor` in ray.data) replaces it every 20 s, also after
    these have ended. This is an actor on the head that outlives the driver, so as to withdraw what that has asked for: nodes that nobody
    needs would cost money."""

    def __init__(self, job: str) -> None:
        """job: the driver's."""
        self._job = job
        self._bundles: list[dict[str, float]] = []
        self._asking = threading.Lock()
        threading.Thread(target=self._keep_asking, daemon=True).start()

    def ask_for(self, bundles: Sequence[Mapping[str, float]]) -> None:
        """Ask for nodes that hold all of these at once, whatever runs there. It replaces what was asked for before; with none, nodes
        that are idle may go."""
        with self._asking:
            self._bundles = [dict(bundle) for bundle in bundles]
            request_resources(bundles=self._bundles)

    def _keep_asking(self) -> None:
        while True:
            time.sleep(SECONDS_BETWEEN_LOOKS)
            with contextlib.suppress(RayError):  # a gcs that does not answer may do so at the next look
                if has_ended(self._job):
                    self.ask_for([])
                    os._exit(0)
                self._ask_again()

    def _ask_again(self) -> None:
        with self._asking:
            if self._bundles:
                request_resources(bundles=self._bundles)


AskerHandle: TypeAlias = Any
"""Ray's handle of the actor: Ray makes its methods at run time, so no type knows them."""


def start_asker() -> AskerHandle:
    actor: AskerHandle = ray.remote(Asker)
    # A namespace of its own, or Ray would warn on the terminal that nobody will find the actor.
    names = {"name": f"asker-{uuid.uuid4().hex[:8]}", "namespace": "batchscout"}
    options = {**names, "lifetime": "detached", "num_cpus": 0, "resources": ON_THE_HEAD}
    return actor.options(**options).remote(ray.get_runtime_context().get_job_id())
