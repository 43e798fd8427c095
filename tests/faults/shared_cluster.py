"""A simulated cluster that is not the study's own: a head, a node for the lane, and what may go wrong with them."""

from __future__ import annotations

import os
import random
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from batchscout.orchestrator.study.storage.lock import is_locked
from tests.faults.driver import Driver
from tests.faults.scene import Scene, alive, title
from tests.support.processes import until

# Train tries four times to find room for a lane; the outage is as long as several Train runs.
OUTAGE_SECONDS = 25.0


class SharedCluster(Scene):
    """A head without CPUs, and one node that the lane runs on."""

    def __init__(self, folder: Path, chance: random.Random) -> None:
        from ray.cluster_utils import Cluster

        super().__init__(folder, chance)
        self.cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 0})
        self._num_nodes = 0
        self.node = self.add_node()
        self.new_study()

    def add_node(self) -> Any:
        """Each unpacks what drivers ship into a directory of its own, as on a machine of its own it would."""
        self._num_nodes += 1
        return self.cluster.add_node(num_cpus=1, runtime_env_dir_name=f"node-{self._num_nodes}")

    def driver_of(self, study: dict[str, Any], place: Path) -> Driver:
        assert self.cluster.address is not None
        return Driver(place, study, self.cluster.address)

    def on_the_head(self, actor: str) -> int | None:
        """The process of a Ray actor there, by what its title says."""
        assert self.cluster.head_node is not None
        raylet = self.cluster.head_node.all_processes["raylet"][0].process.pid
        return next((pid for pid in children(raylet) if actor in title(pid)), None)

    def check_nothing_is_left_over(self) -> None:
        import ray

        pids = {line["pid"] for line in self.logged()}
        until(lambda: not any(map(alive, pids)), "the ranks are gone")
        until(lambda: ray.available_resources().get("CPU") == 1, "the lane's CPU is free again")
        groups = ray.util.placement_group_table().values()
        assert {group["state"] for group in groups} <= {"REMOVED"}, "no placement group is left"
        assert not is_locked(self.driver.run_dir / "journal.jsonl")


def children(pid: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


# Faults: each answers what it struck, None where there was nothing to strike


def kill_driver(scene: SharedCluster) -> str | None:
    before = scene.driver.run_dir / "journal.jsonl"
    scene.driver.send(signal.SIGKILL)
    assert not is_locked(before), "the dead driver's lock is held"
    scene.start()
    return "the driver"


def kill_lane(scene: SharedCluster) -> str | None:
    """Once in a driver's life."""
    if scene.lane_was_killed:
        return None
    what = send(signal.SIGKILL, "the lane's process", scene.rank())
    scene.lane_was_killed = what is not None
    return what


def send(number: signal.Signals, what: str, pid: int | None) -> str | None:
    if pid is None:
        return None
    os.kill(pid, number)
    return f"{number.name} to {what} {pid}"


def kill_controller(scene: SharedCluster) -> str | None:
    return send(signal.SIGKILL, "the Train controller", scene.on_the_head("TrainController"))


def kill_relay(scene: SharedCluster) -> str | None:
    """Tune names it after what holds its resources."""
    return send(signal.SIGKILL, "the trial's Tune actor", scene.on_the_head("ResourceTrainable"))


def kill_dispatcher(scene: SharedCluster) -> str | None:
    """Without it nothing can be run: the driver says so and ends, and is started again."""
    what = send(signal.SIGKILL, "the Dispatcher", scene.on_the_head("Dispatcher"))
    if what is not None:
        code, output = scene.driver.end()
        said = "the process that hands trials to the lanes has died" in " ".join(output.split())
        assert (code == 1 and said) or code == 0, f"exit code {code}: {output}"  # 0: nothing was left to run
        scene.start()
    return what


def kill_node(scene: SharedCluster) -> str | None:
    scene.cluster.remove_node(scene.node, allow_graceful=False)
    scene.node = scene.add_node()
    return "the lane's node"


def take_node_away(scene: SharedCluster) -> str | None:
    """For longer than a lane has to come up, were it there."""
    scene.cluster.remove_node(scene.node, allow_graceful=False)
    time.sleep(OUTAGE_SECONDS)
    scene.node = scene.add_node()
    return f"the lane's node, for {OUTAGE_SECONDS:g} s"


def tell_to_end(scene: SharedCluster) -> str | None:
    return send(signal.SIGTERM, "the lane's process", scene.rank())


def drain_node(scene: SharedCluster) -> str | None:
    """As a cloud does that takes a machine away: a notice first, the end later."""
    from ray._raylet import GcsClient  # pyright: ignore[reportAttributeAccessIssue]
    from ray.core.generated.autoscaler_pb2 import DrainNodeReason  # pyright: ignore[reportAttributeAccessIssue]

    rank, leaving = scene.rank(), scene.node
    deadline_ms = int((time.time() + 60) * 1000)
    reason = DrainNodeReason.Value("DRAIN_NODE_REASON_PREEMPTION")
    accepted, why_not = GcsClient(address=scene.cluster.address).drain_node(
        leaving.node_id, reason, "test", deadline_ms
    )
    assert accepted, why_not
    scene.node = scene.add_node()
    if rank is not None:
        until(lambda: not alive(rank), "the drained node's rank ended by itself")
    scene.cluster.remove_node(leaving)
    return "the lane's node, by a drain"


FAULTS: dict[str, Callable[[SharedCluster], str | None]] = {
    "driver": kill_driver,
    "lane": kill_lane,
    "controller": kill_controller,
    "relay": kill_relay,
    "dispatcher": kill_dispatcher,
    "node": kill_node,
    "outage": take_node_away,
    "sigterm": tell_to_end,
    "drain": drain_node,
}
