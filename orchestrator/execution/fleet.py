"""The lanes of a study on a cluster that grows and shrinks: they are opened as nodes arrive, and given back when no trial needs them.

A thread looks every second; what it does is decided by growth.py. It writes to no journal: the driver's main thread fetches what
has changed.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

import ray
from ray.exceptions import RayError

from batchscout.orchestrator.decisions.director import Wanted
from batchscout.orchestrator.execution.dispatcher import DispatcherHandle, LaneState, LaneTold
from batchscout.orchestrator.execution.nodes.autoscaler import AskerHandle
from batchscout.orchestrator.execution.nodes.growth import Growth, OpenLane, ScalingState, decide
from batchscout.orchestrator.execution.nodes.node_kinds import Choice, nodes_of
from batchscout.orchestrator.execution.nodes.placement import LaneShape
from batchscout.orchestrator.execution.nodes.room import bundles_of, bundles_of_whole, lanes_held
from batchscout.orchestrator.execution.ray_private.cluster import nodes_that_stay
from batchscout.orchestrator.study.events import LanesChanged
from batchscout.orchestrator.study.state import Halted
from batchscout.orchestrator.units import counted

SECONDS_BETWEEN_LOOKS = 1.0
# For how long Ray may fail at every look: an actor that has died does not come back.
SECONDS_TO_RECOVER = 60.0
# How long the last look has to end, before the lanes are closed.
SECONDS_TO_STOP = 10.0


@dataclass(frozen=True)
class ClusterResources:
    """The nodes that lanes may run on, which come and go."""

    shape: LaneShape
    choice: Choice
    idle_release_seconds: float
    """How long a lane may be idle that trials may yet come for."""
    asker: AskerHandle | None = None
    """What asks the cluster's autoscaler for nodes; None where there is none, and so all lanes are opened at the beginning."""

    def lanes_held(self) -> int:
        """Return how many lanes the nodes hold that are there."""
        return lanes_held(nodes_of(nodes_that_stay()), self.choice, self.shape)

    def needs(self) -> str:
        """Return in words what a lane takes."""
        of_kind = f" of type {self.choice.kind}" if self.choice.kind else ""
        what, each = ("GPU", 1) if self.shape.use_gpu else ("CPU", self.shape.cpus_per_rank)
        return f"room for a lane ({counted(each * self.shape.world_size, what)}{of_kind})"

    def ask_for(self, num_lanes: int) -> None:
        """Ask the autoscaler for room for so many lanes in all; with 0, idle nodes may go."""
        self._ask_for(bundles_of(num_lanes, self.shape))

    def ask_for_nodes(self, num_nodes: int) -> None:
        """Ask the autoscaler for so many nodes that lanes may run on, in all."""
        workers = [node for node in self.choice.nodes if not node.is_head]
        self._ask_for(bundles_of_whole(workers[:num_nodes], self.shape))

    def _ask_for(self, bundles: list[dict[str, float]]) -> None:
        assert self.asker is not None
        ray.get(self.asker.ask_for.remote(bundles))

    def ask_for_nothing_more(self) -> None:
        """Withdraw what was asked for, and end what asks."""
        assert self.asker is not None
        self.ask_for(0)
        ray.kill(self.asker)


def wait_for_room(resources: ClusterResources, num_nodes: int, say: Callable[[str], None]) -> None:
    """Wait until the nodes hold a lane, and there are so many of them, for as long as it takes: the autoscaler is asked for the room.
    Until there is a node nothing can be known of what the study runs on. Raises ValueError where it starts another kind than the study's."""
    asked = "room for 1 lane" if num_nodes == 1 else f"{num_nodes - 1} beside the head"
    said, lacks = "", _lacking(resources, num_nodes)
    if lacks:
        resources.ask_for(1) if num_nodes == 1 else resources.ask_for_nodes(num_nodes - 1)
    while lacks:
        if lacks != said:
            say(f"the cluster has {lacks}: its autoscaler is asked for {asked}, and the study begins then")
        time.sleep(SECONDS_BETWEEN_LOOKS)
        resources.choice.refuse_another_kind(nodes_of(nodes_that_stay()))
        said, lacks = lacks, _lacking(resources, num_nodes)


def _lacking(resources: ClusterResources, num_nodes: int) -> str:
    """Return what the cluster has too little of, in words; nothing where it has enough."""
    there = len(nodes_of(nodes_that_stay()))
    if there < num_nodes:
        return f"{there} of {counted(num_nodes, 'node')} (--min-nodes)"
    return "" if resources.lanes_held() else f"no {resources.needs()}"


class Fleet:
    """Opens and releases lanes while a study runs."""

    def __init__(
        self, resources: ClusterResources, dispatcher: DispatcherHandle, open_lane: Callable[[], str], say: Callable[[str], None],
        seconds_to_recover: float = SECONDS_TO_RECOVER,
    ) -> None:  # fmt: skip
        """open_lane: opens one more lane, and returns its name. say: shows people what happens. seconds_to_recover: for how long the
        Dispatcher, or what asks for nodes, may not be reached until that ends the study."""
        self._seconds_to_recover = seconds_to_recover
        self._resources, self._dispatcher, self._open_lane, self._say = resources, dispatcher, open_lane, say
        self._opened: dict[str, float] = {}
        """The lanes that were neither released nor given up, and when each was opened."""
        self._wanted = Wanted(1, more_may_come=True)  # the first lane tells what the study runs on
        self._asked: int | None = None
        """For how many lanes there was to be room when that was asked last; None: an earlier driver may have asked."""
        self._changes = deque[LanesChanged]()
        self._last = (0, 0)
        """How many lanes there were at the last look, and for how many more nodes were asked."""
        self._failure: Exception | None = None
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._keep_looking, daemon=True)
        self._num_lanes = 0

    def lanes_now(self) -> int:
        """Return how many lanes trials can be given to: those that are open, on nodes that are there."""
        return self._num_lanes

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """Open and release nothing more, and let idle nodes go."""
        self._is_over.set()
        self._thread.join(SECONDS_TO_STOP)
        with contextlib.suppress(RayError):  # a cluster that is gone starts no nodes
            self._resources.ask_for_nothing_more()

    def hear(self, wanted: Wanted) -> None:
        """Take in what trials there are. Raises what went wrong in the thread."""
        self._wanted = wanted
        if self._failure is not None:
            raise self._failure

    def changes(self) -> list[LanesChanged]:
        """Return what has changed since this was asked last."""
        return [self._changes.popleft() for _ in range(len(self._changes))]

    # The thread

    def _keep_looking(self) -> None:
        looked_at = time.monotonic()
        while not self._is_over.is_set():
            try:
                self._look()
                looked_at = time.monotonic()
            except RayError as error:
                # Whoever watches the cluster says so if it is gone; else the next look may find it again.
                if time.monotonic() - looked_at > self._seconds_to_recover:
                    self._failure = Halted(
                        f"no lane could be opened or given back for {self._seconds_to_recover:g} s: {error}"
                    )
                    return
            except Exception as error:
                self._failure = error
                return
            self._is_over.wait(SECONDS_BETWEEN_LOOKS)

    def _look(self) -> None:
        told: dict[str, LaneTold] = ray.get(self._dispatcher.lanes.remote())
        given_up = {name for name, lane in told.items() if lane.state is LaneState.GIVEN_UP}
        for name in given_up & self._opened.keys():
            del self._opened[name]
        lanes = [self._open(name, told.get(name)) for name in self._opened]
        room, most = self._resources.lanes_held(), self._resources.shape.num_lanes - len(given_up)
        growth = decide(ScalingState(self._wanted, lanes, room, most, self._resources.idle_release_seconds))
        self._carry_out(growth)
        self._num_lanes = min(len(self._opened), room)
        self._note(growth, room)

    def _open(self, name: str, told: LaneTold | None) -> OpenLane:
        if told is None:  # none of its ranks has come up yet
            return OpenLane(name, time.monotonic() - self._opened[name])
        return OpenLane(name, told.idle_seconds, "" if told.state is LaneState.STARTING else told.node)

    def _carry_out(self, growth: Growth) -> None:
        for name in growth.release:
            if ray.get(self._dispatcher.release.remote(name)):
                del self._opened[name]
        for _ in range(growth.open):
            self._opened[self._open_lane()] = time.monotonic()
        if growth.ask != self._asked:
            self._resources.ask_for(growth.ask)
            self._asked = growth.ask

    def _note(self, growth: Growth, room: int) -> None:
        """Keep for the journal, and say, that there are other lanes than at the last look."""
        asked = growth.ask if growth.ask > room else 0
        if (self._num_lanes, asked) == self._last:
            return
        fewer, most = self._num_lanes < self._last[0] and not growth.release, self._resources.shape.num_lanes
        why = f"nodes were lost: the others hold {counted(room, 'lane')}" if fewer else growth.reason
        why = why or f"the nodes hold {counted(room, 'lane')}"
        self._last = self._num_lanes, asked
        self._changes.append(LanesChanged(lanes=self._num_lanes, most=most, asked=asked, reason=why))
        self._say(f"{time.strftime('%H:%M')}: {self._num_lanes} of up to {counted(most, 'lane')}; {why}")
