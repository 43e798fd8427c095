"""Lanes: warm Ray Train worker groups that run trial after trial. The driver's side; `controller.py` and
`group.py` make their processes a group, and `ranks.py` is what runs in them.

A trial that starts a Train run of its own spends 10 to 20 seconds around its training. A lane is one long-lived Train
run; its ranks take assignments from the `Dispatcher`, an actor that knows every lane and every trial in flight.

    Tune trial (LaneTrainable)  --assign, next_message, dismiss-->  Dispatcher  <--take, say, ask--  ranks of a lane
"""

from __future__ import annotations

import contextlib
import itertools
import os
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

import ray
from ray.exceptions import OutOfMemoryError, RayError
from ray.train import FailureConfig, RunConfig, ScalingConfig

from batchscout.orchestrator.execution.controller import Ranks, TellCause
from batchscout.orchestrator.execution.dispatcher import Dispatcher, DispatcherHandle
from batchscout.orchestrator.execution.fleet import ClusterResources, Fleet
from batchscout.orchestrator.execution.group import serve
from batchscout.orchestrator.execution.nodes.placement import LaneShape
from batchscout.orchestrator.execution.ray_private.cluster import ON_THE_HEAD, free_placement_groups
from batchscout.orchestrator.execution.ray_private.environment import LANE_ENVIRONMENT
from batchscout.orchestrator.execution.ray_private.errors import LOW_MEMORY, NO_ROOM, cause_of, told_by
from batchscout.orchestrator.execution.ray_private.train import LaneTrainer, end_train_runs
from batchscout.orchestrator.study.messages import Device, FirstLane
from batchscout.orchestrator.study.state import Halted
from batchscout.orchestrator.study.storage.marker import RunMarker

# How long the Dispatcher has to answer that it closes; how long a lane's Train run then has to end by itself, and how
# long once its controller has been ended.
SECONDS_TO_CLOSE, SECONDS_TO_GO_HOME, SECONDS_TO_END = 10, 30, 10
SECONDS_BETWEEN_LOOKS = 1.0
_MOST_USED = "RAY_memory_usage_threshold"


@dataclass(frozen=True)
class Workplace:
    """What the ranks of every lane find where they run."""

    storage: Path
    """Where Ray Train keeps its own records."""
    environment: Mapping[str, str] = field(default_factory=dict)
    """Of their processes, beside what these inherit."""
    working_directory: Path | None = None
    """Of the user's code; None: the copy of the driver's that Ray has shipped."""
    code: Mapping[str, str] = field(default_factory=dict)
    """Digests of that code as the driver found it, where it may change under the study: Ray's copy does not."""
    marker: RunMarker | None = None
    """What a rank must see to run anything; None: it sees what the driver sees."""


@dataclass(frozen=True)
class Lanes:
    """The lanes of a study while they are open."""

    dispatcher: DispatcherHandle
    dispatcher_name: str
    """The name by which the trials' relays find the Dispatcher."""
    fleet: Fleet | None = None
    """What opens and releases them, where nodes come and go; None: they are all open from the beginning."""

    def first(self, meanwhile: Callable[[], object] = lambda: None) -> FirstLane:
        """Wait for the first lane, and return what it runs on. meanwhile: is called again and again until it is there. Raises Halted where
        none comes up."""
        answer = self.dispatcher.first_lane.remote()
        while not ray.wait([answer], timeout=SECONDS_BETWEEN_LOOKS)[0]:
            meanwhile()
        try:
            first: FirstLane = ray.get(answer)
        except OutOfMemoryError as error:
            most = os.environ.get(_MOST_USED, "by default 0.95")
            raise Halted(
                f"Ray ends processes where more of a node's memory is used than {_MOST_USED} says ({most}), and has ended the one "
                f"that hands out trials: {cause_of(error)}"
            ) from error
        if not first.device:
            raise Halted(f"every lane has failed, the last one because {self.given_up()[-1]}")
        return first

    def given_up(self) -> list[str]:
        """Return why lanes were given up so far."""
        return ray.get(self.dispatcher.given_up.remote())

    def let_trials_save(self, seconds: float) -> bool:
        """Stop every trial at its next message, and return whether all have saved a checkpoint in time."""
        try:
            ray.get(self.dispatcher.dismiss_all.remote(), timeout=seconds)
        except RayError:  # they were too slow, or the cluster is gone and their processes with it
            return False
        return True


@contextlib.contextmanager
def open_lanes(
    shape: LaneShape,
    workplace: Workplace,
    say: Callable[[str], None],
    max_silent_seconds: float | None = None,
    measured_on: Device | None = None,
    resources: ClusterResources | None = None,
) -> Iterator[Lanes]:
    """Start the lanes in the background, and end every process on leaving. say: shows people what happens.
    measured_on: what the study has measured on; a lane on another kind of GPU runs nothing.
    resources: what nodes there are, where they come and go, and the lanes with them; None: all lanes are started now."""
    for name, value in LANE_ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    token = uuid.uuid4().hex[:8]
    actor: DispatcherHandle = ray.remote(Dispatcher)
    options = {"name": f"dispatcher-{token}", "num_cpus": 0, "resources": ON_THE_HEAD, "max_concurrency": 1000}
    dispatcher = actor.options(**options).remote(shape.num_lanes, max_silent_seconds, measured_on)
    lanes = Lanes(dispatcher, f"dispatcher-{token}")
    threads: list[threading.Thread] = []

    def open_lane() -> str:
        name = f"lane-{token}-{len(threads)}"
        keeper = _LaneKeeper(lanes.dispatcher, shape, workplace, name, say)
        threads.append(threading.Thread(target=keeper.keep_alive, daemon=True))
        threads[-1].start()
        return name

    try:
        if resources is None or resources.asker is None:
            for _ in range(shape.num_lanes):
                open_lane()
            yield lanes
        else:
            fleet = Fleet(resources, lanes.dispatcher, open_lane, say)
            fleet.start()
            try:
                yield replace(lanes, fleet=fleet)
            finally:
                fleet.stop()
    finally:
        _send_home(lanes.dispatcher, threads)


def _send_home(dispatcher: DispatcherHandle, threads: list[threading.Thread]) -> None:
    """Let the ranks of all lanes end, then the Dispatcher; if the Dispatcher has died, the lanes end by themselves.

    A thread that calls Ray after ray.shutdown() would end this process at once, with the study's last word unsaid. So a
    lane that does not end, as its processes still start or wait for room, is ended with its controller.
    """
    with contextlib.suppress(RayError):  # it still starts, or it has died
        ray.get(dispatcher.close.remote(), timeout=SECONDS_TO_CLOSE)
    if not _have_ended(threads, SECONDS_TO_GO_HOME):
        with contextlib.suppress(RayError):
            end_train_runs()
        _have_ended(threads, SECONDS_TO_END)
    with contextlib.suppress(RayError):
        ray.kill(dispatcher)
    _have_ended(threads, SECONDS_TO_END)  # one that asked it has now heard that it is gone


def _have_ended(threads: list[threading.Thread], seconds: float) -> bool:
    """Wait for them, at most so long in all."""
    deadline = time.monotonic() + seconds
    for thread in threads:
        thread.join(timeout=max(0.0, deadline - time.monotonic()))
    return not any(thread.is_alive() for thread in threads)


# One lane


@dataclass(frozen=True)
class _LaneKeeper:
    """Keeps one lane alive: it runs a Train run, and starts another whenever Ray loses one."""

    dispatcher: DispatcherHandle
    shape: LaneShape
    workplace: Workplace
    lane: str
    say: Callable[[str], None]

    def keep_alive(self) -> None:
        """Run one Train run after another until the study is over, or the lane given up; in a thread of its own."""
        had_room = True
        for attempt in itertools.count():
            loss = self._run(attempt)
            has_room = not has_no_room(loss)
            if had_room and not has_room:
                now = time.strftime("%H:%M")
                self.say(f"{now}: the cluster has no room for a lane; it is tried again until there is")
            had_room = has_room
            try:
                if not self._is_another_wanted(loss):
                    return
            except RayError:  # without a Dispatcher there are no lanes; the trials' relays say so
                return

    def _run(self, attempt: int) -> str | None:
        """Run one Train run; return the error that it was lost with, or None if it ended. Nothing of it outlives this
        frame."""
        try:
            self._trainer(attempt).fit()
        except Exception as error:
            return told_by(error)
        return None

    def _is_another_wanted(self, loss: str | None) -> bool:
        if loss is None and ray.get(self.dispatcher.heartbeat.remote(self.lane)) == "closed":
            return False
        trouble = self._remove_what_it_left()
        if has_no_room(loss):
            return ray.get(self.dispatcher.no_room.remote(self.lane))
        said = f"{loss or 'its ranks have ended'}{trouble}"
        blame = "memory" if LOW_MEMORY in said else "machine"
        cause = " ".join(said.split())[:300]  # the first line alone says nothing
        return ray.get(self.dispatcher.run_lost.remote(self.lane, cause, blame))

    def _remove_what_it_left(self) -> str:
        """Remove the placement groups of a lost Train run, and return what went wrong with that; empty if nothing did.

        Nothing is raised here: the Dispatcher must hear of the lost run in any case.
        """
        try:
            free_placement_groups(ray.get(self.dispatcher.placement.remote(self.lane)))
        except Exception as error:
            return f"; what it left behind could not be removed: {error}"
        return ""

    def _trainer(self, attempt: int) -> LaneTrainer:
        shape, workplace = self.shape, self.workplace
        return LaneTrainer(
            serve,
            train_loop_config={
                "dispatcher": self.dispatcher,
                "lane": self.lane,
                "working_directory": workplace.working_directory,
                "marker": workplace.marker,
                "code": workplace.code,
            },
            backend_config=Ranks("nccl" if shape.use_gpu else "gloo"),
            scaling_config=ScalingConfig(
                num_workers=shape.world_size,
                use_gpu=shape.use_gpu,
                resources_per_worker={"CPU": shape.cpus_per_rank}
                | ({"GPU": 1} if shape.use_gpu else {})
                | shape.of_its_kind,
                placement_strategy=shape.strategy.upper(),
            ),
            run_config=RunConfig(
                name=f"{self.lane}-{attempt}",
                storage_path=str(workplace.storage),
                failure_config=FailureConfig(max_failures=-1, controller_failure_limit=3),
                callbacks=[TellCause(self.dispatcher, self.lane)],
                worker_runtime_env={"env_vars": dict(workplace.environment)} if workplace.environment else None,
            ),
        )


def has_no_room(loss: str | None) -> bool:
    """True if a Train run was lost because the cluster has no room for it: then nothing is wrong with its lane."""
    return loss is not None and NO_ROOM in loss
