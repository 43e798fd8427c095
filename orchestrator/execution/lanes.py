"""Lanes: warm Ray Train worker groups that run trial after trial. The driver's side; `ranks.py` is what runs in them.

A trial that starts a Train run of its own spends 10 to 20 seconds around its training. A lane is one long-lived Train
run; its ranks take assignments from the `Switchboard`, an actor that knows every lane and every trial in flight.

    Tune trial (LaneTrainable)  --assign, next_message, dismiss-->  Switchboard  <--take, say, ask--  ranks of a lane
"""

from __future__ import annotations

import contextlib
import itertools
import os
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ray
from ray import train
from ray.exceptions import GetTimeoutError, RayActorError, RayError
from ray.train import FailureConfig, RunConfig, ScalingConfig
from ray.train.torch import TorchConfig, TorchTrainer

from orchestrator.execution.dispatcher import Switchboard
from orchestrator.execution.placement import ON_THE_HEAD, LaneShape
from orchestrator.execution.ranks import first_line, hear_sigterm, serve
from orchestrator.execution.ray_private import free_placement_groups
from orchestrator.study.messages import Blame

# Train asks its workers this often how they are; its default of 2 s would be the price of every recycled lane.
HEALTH_CHECK_SECONDS = "0.2"


SECONDS_TO_CLOSE = 10


# What Ray says of a process that its memory monitor ended, and of one that went with its node.
LOW_MEMORY, NODE_GONE = "running low on memory", "its node"


# What Train says when it has found no room four times, each time waiting so long; an autoscaler sees what it asks for.
NO_ROOM, SECONDS_TO_FIND_ROOM = "worker group startup timed out", "6"


@dataclass(frozen=True)
class Lanes:
    """The lanes of a study while they are open."""

    switchboard: Any
    name: str
    """The Switchboard's, by which the trials' relays find it."""


class _TellCause(train.UserCallback):
    """Tells the Switchboard why a group died."""

    def __init__(self, board: Any, lane: str) -> None:
        self._board, self._lane = board, lane

    def after_exception(self, run_context: Any, worker_exceptions: dict[int, Exception]) -> None:
        causes = [f"rank {rank}: {first_line(error)}" for rank, error in sorted(worker_exceptions.items())]
        blame = blame_for("\n".join(map(str, worker_exceptions.values())))
        try:
            ray.get(self._board.cause_of_death.remote(self._lane, "; ".join(causes), blame))
        except RayActorError:  # no group would find anything to do: this Train run ends with its controller
            os._exit(1)


def blame_for(said: str) -> Blame:
    """From what Ray says of the processes of a group that died."""
    return "memory" if LOW_MEMORY in said else "machine" if NODE_GONE in said else "trial"


class _Backend(TorchConfig().backend_cls):
    """Torch's, in processes that hear SIGTERM: only a process's main thread may say so, and `serve` has another."""

    def on_start(self, worker_group: Any, backend_config: Any) -> None:
        worker_group.execute(hear_sigterm)
        super().on_start(worker_group, backend_config)


class _LaneTorch(TorchConfig):
    @property
    def backend_cls(self) -> type[_Backend]:
        return _Backend


@contextlib.contextmanager
def open_lanes(
    shape: LaneShape, storage: Path, say: Callable[[str], None], max_silent_seconds: float | None = None
) -> Iterator[Lanes]:
    """Start the lanes in the background, and end every process on leaving. say: where people look."""
    os.environ.setdefault("RAY_TRAIN_HEALTH_CHECK_INTERVAL_S", HEALTH_CHECK_SECONDS)
    os.environ.setdefault("RAY_TRAIN_WORKER_GROUP_START_TIMEOUT_S", SECONDS_TO_FIND_ROOM)
    token = uuid.uuid4().hex[:8]
    name = f"switchboard-{token}"
    switchboard: Any = ray.remote(Switchboard)
    options = {"name": name, "num_cpus": 0, "resources": ON_THE_HEAD, "max_concurrency": 1000}
    board = switchboard.options(**options).remote(shape.num_lanes, max_silent_seconds)
    keepers = [_Keeper(board, shape, storage, f"lane-{token}-{index}", say) for index in range(shape.num_lanes)]
    threads = [threading.Thread(target=keeper.keep, daemon=True) for keeper in keepers]
    for thread in threads:
        thread.start()
    try:
        yield Lanes(board, name)
    finally:
        _send_home(board, threads)


def _send_home(board: Any, threads: list[threading.Thread]) -> None:
    """The ranks of all lanes; a lane whose Switchboard has died ends by itself."""
    try:
        ray.get(board.close.remote(), timeout=SECONDS_TO_CLOSE)
    except GetTimeoutError:  # the cluster is gone, as after a SIGTERM to the whole process group
        return
    except RayActorError:
        pass
    for thread in threads:  # one that asks Ray for something after ray.shutdown() would end this process at once
        thread.join(timeout=30)
    with contextlib.suppress(RayError):
        ray.kill(board)


def has_no_room(lost: str | None) -> bool:
    """Whether that is why a Train run was lost: then nothing is wrong with its lane."""
    return lost is not None and NO_ROOM in lost


@dataclass(frozen=True)
class _Keeper:
    """Keeps one lane alive: a Train run, and another wherever Ray loses one."""

    board: Any
    shape: LaneShape
    storage: Path
    lane: str
    say: Callable[[str], None]

    def keep(self) -> None:
        """Until the study is over, or the lane given up; in a thread of its own."""
        before = None
        for attempt in itertools.count():
            lost = self._lost_run(attempt)
            if has_no_room(lost) and not has_no_room(before):
                self.say(
                    f"{time.strftime('%H:%M')}: the cluster has no room for a lane; it is tried again until there is"
                )
            before = lost
            with contextlib.suppress(RayError):  # without a Switchboard there are no lanes; the trials' relays say so
                if self._is_another_wanted(lost):
                    continue
            return

    def _lost_run(self, attempt: int) -> str | None:
        """What a Train run that ended before its time said; nothing of the run outlives this frame."""
        try:
            self._trainer(attempt).fit()
        except Exception as error:
            return f"{type(error).__name__}: {error}"
        return None

    def _is_another_wanted(self, lost: str | None) -> bool:
        if lost is None and ray.get(self.board.outlook.remote(self.lane)) == "closed":
            return False
        left_behind = self._left_behind()
        if has_no_room(lost):
            return ray.get(self.board.no_room.remote(self.lane))
        said = f"{lost or 'its ranks went home'}{left_behind}"
        blame = "memory" if LOW_MEMORY in said else "machine"
        cause = " ".join(said.split())[:300]  # its first line alone says nothing
        return ray.get(self.board.run_lost.remote(self.lane, cause, blame))

    def _left_behind(self) -> str:
        """Remove it; empty, or, where that fails, what to say of it: the lane's trials must hear of the loss in any case."""
        try:
            free_placement_groups(ray.get(self.board.placement.remote(self.lane)))
        except Exception as error:
            return f"; what it left behind could not be removed: {error}"
        return ""

    def _trainer(self, attempt: int) -> TorchTrainer:
        shape = self.shape
        return TorchTrainer(
            serve,
            train_loop_config={"switchboard": self.board, "name": self.lane},
            torch_config=_LaneTorch(backend="nccl" if shape.use_gpu else "gloo"),
            scaling_config=ScalingConfig(
                num_workers=shape.world_size,
                use_gpu=shape.use_gpu,
                resources_per_worker={"CPU": shape.cpus_per_rank} | ({"GPU": 1} if shape.use_gpu else {}),
            ),
            run_config=RunConfig(
                name=f"{self.lane}-{attempt}",
                storage_path=str(self.storage),
                failure_config=FailureConfig(max_failures=-1, controller_failure_limit=3),
                callbacks=[_TellCause(self.board, self.lane)],
            ),
        )
