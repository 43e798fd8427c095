"""Lanes: warm Ray Train worker groups that run trial after trial.

A trial that starts a Train run of its own spends 10 to 20 seconds around its training. A lane is one long-lived Train
run; its ranks take assignments from the `Switchboard`, an actor that knows every lane and every trial in flight.

    Tune trial (LaneTrainable)  --assign, next_message, dismiss-->  Switchboard  <--take, say, ask--  ranks of a lane
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import itertools
import os
import re
import signal
import socket
import threading
import time
import traceback
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import ray
from ray import train
from ray.exceptions import GetTimeoutError, RayActorError, RayError
from ray.train import FailureConfig, RunConfig, ScalingConfig
from ray.train.torch import TorchConfig, TorchTrainer
from ray.util.placement_group import get_current_placement_group

from orchestrator.cluster import ON_THE_HEAD
from orchestrator.messages import Assignment, Blame, Host, Message
from orchestrator.ray_state import free_placement_groups, is_draining
from orchestrator.switchboard import Switchboard
from orchestrator.words import bytes_text
from trainers.config import TrialConfig
from trainers.files import StorageLost
from trainers.loop import Report

# What a CPU rank may still hold above its idle size after running out of memory before its processes are replaced.
MEMORY_TOLERANCE_BYTES = 64 * 2**20
# Train asks its workers this often how they are; its default of 2 s would be the price of every recycled lane.
HEALTH_CHECK_SECONDS = "0.2"
SECONDS_TO_CLOSE = 10
# What Ray says of a process that its memory monitor ended, and of one that went with its node.
LOW_MEMORY, NODE_GONE = "running low on memory", "its node"
# What Train says when it has found no room four times, each time waiting so long; an autoscaler sees what it asks for.
NO_ROOM, SECONDS_TO_FIND_ROOM = "worker group startup timed out", "6"
# How long a rank may outlive its driver. It asks anew: a call left waiting would be one more for every recycled group.
SECONDS_BETWEEN_LOOKS = 2.0


class LaneRecycled(Exception):
    """Raised by a rank so that Ray Train replaces the processes of its group."""


_told_to_end = threading.Event()
"""Set in a rank's process by SIGTERM, as it comes before a machine is taken away."""


# The ranks


def serve(lane: dict[str, Any]) -> None:
    """Ray Train's train function: run assignments until there are no more. Runs on every rank of a lane."""
    board, name, rank = lane["switchboard"], lane["name"], train.get_context().get_world_rank()
    _exit_with_the_study(board, name)
    _freeze_what_is_imported()
    if rank == 0:
        board.introduce.remote(name, _host(), get_current_placement_group())
    group = _common_name()
    turn = 0
    while True:
        turn += 1
        next_one = board.take.remote(name, group, turn) if rank == 0 else board.follow.remote(group, turn)
        assignment: Assignment | None = ray.get(next_one)
        if assignment is None and _is_leaving():
            raise LaneRecycled("its processes were told to end")
        if assignment is None:
            return
        if assignment.fresh and turn > 1:
            ray.get(
                board.give_back.remote(name, assignment.key)
                if rank == 0
                else board.until_freed.remote(name, assignment.key)
            )
            raise LaneRecycled(f"fresh processes for {assignment.trial_id}")
        clean = _run(assignment, board, name, rank)
        if leaving := _is_leaving():  # known before the group ends: rank 0 may have taken another trial by then
            ray.get(board.outlook.remote(name, leaving=True))
        recycle = assignment.recycle_after or leaving
        if clean and recycle:
            ray.get(board.until_freed.remote(name, assignment.key))  # ended now, rank 0 could not say its last word
        if not clean or recycle:
            raise LaneRecycled("fresh processes for the next trial")


def _freeze_what_is_imported() -> None:
    """The collection after every trial then looks at what trials made, not at the objects of 1,500 modules."""
    importlib.import_module("torch._dynamo")  # the first optimizer would import it
    gc.collect()
    gc.freeze()


def _host() -> Host:
    from trainers.loop import pick_device
    from trainers.memory import describe, memory_kills

    return Host(socket.gethostname(), describe(pick_device()), memory_kills())


def _is_leaving() -> bool:
    """Whether this process is to end soon: the trial it runs is to save a checkpoint, and no other to begin."""
    return _told_to_end.is_set() or is_draining(ray.get_runtime_context().get_node_id())


def _exit_with_the_study(board: Any, lane: str) -> None:
    """A rank in a long computation hears of nothing: this thread ends its process when the driver is lost, or its trial has
    hung, and passes on that the process was told to end."""

    def watch() -> None:
        outlook = "go on"
        while outlook == "go on":
            time.sleep(SECONDS_BETWEEN_LOOKS)
            try:
                outlook = ray.get(board.outlook.remote(lane, leaving=_is_leaving()))
            except RayError:
                outlook = "the driver is gone"
        if outlook != "closed":
            os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


def _common_name() -> str:
    """A name for this group of processes that all its ranks know and no group before it had."""
    import torch.distributed as dist

    names = [uuid.uuid4().hex]
    if dist.is_initialized() and dist.get_world_size() > 1:
        dist.broadcast_object_list(names, src=0)
    return names[0]


def _run(assignment: Assignment, board: Any, lane: str, rank: int) -> bool:
    """Run one assignment and say how it ended; False where this process is not fit for another one."""
    from trainers import memory
    from trainers.loop import pick_device

    device = pick_device()
    idle_bytes = memory.idle_bytes(device)
    last_word, clean = _train(assignment, board, rank)
    if clean:  # else the device may be past use, and the process ends in any case
        memory.give_back()
        leaked = memory.idle_bytes(device) - idle_bytes > MEMORY_TOLERANCE_BYTES
        clean = not (leaked and last_word is not None and last_word.outcome == "out_of_memory")
    if last_word is not None:
        ray.get(board.say.remote(assignment.key, last_word))
    if rank == 0 or not clean:
        ray.get(board.freed.remote(lane))
    return clean


def _train(assignment: Assignment, board: Any, rank: int) -> tuple[Message | None, bool]:
    """(the trial's last word if this rank has it, whether the process may go on). No exception outlives this frame:
    it would keep the whole model alive."""
    from trainers import memory
    from trainers.loop import train as train_one

    config = TrialConfig.model_validate(assignment.config)
    relay = Relay(board, assignment.key)
    try:
        verdict = train_one(config, relay, Path(assignment.directory), assignment.token)
    except StorageLost as error:
        return Message(outcome="no_room", reason=str(error)), config.world_size == 1
    except Exception as error:
        if memory.is_out_of_memory(error):
            alone_on_a_cpu = config.world_size == 1 and not memory.on_cuda()
            return Message(outcome="out_of_memory", reason=memory_reason(str(error), config)), alone_on_a_cpu
        _write_traceback(assignment, rank)
        if lost_a_peer(error):  # whoever has another reason says it; if nobody has, this one is the cause of death
            raise LaneRecycled(f"a collective failed: {_first_line(error)}") from None
        return Message(outcome="failed", reason=f"failed: {type(error).__name__}: {_first_line(error)}"), False
    if rank != 0:
        return None, True
    return replace(relay.last_message, outcome="stopped" if verdict == "stop" else "complete"), True


def lost_a_peer(error: Exception) -> bool:
    """Whether a collective failed because another rank's process ended: that is its fault, not this rank's trial's."""
    gone = ("Connection closed by peer", "Connection reset by peer", "Broken pipe", "NCCL", "Gloo")
    return isinstance(error, RuntimeError) and any(text.lower() in str(error).lower() for text in gone)


def memory_reason(text: str, config: TrialConfig) -> str:
    """What the allocator said, without the line of its source that said it."""
    asked = re.search(r"allocate ([\d.]+) ?(bytes|[KMG]iB)", text)
    more = "what it asked for" if asked is None else f"{asked[1]} {asked[2]} more"
    if asked is not None and asked[2] == "bytes":
        more = f"{bytes_text(float(asked[1]))} more"
    limit = f"the limit of {bytes_text(config.memory_limit_bytes)}" if config.memory_limit_bytes else "the device"
    return f"out_of_memory: {more} did not fit into {limit}"


def _first_line(error: BaseException) -> str:
    return next((line for line in str(error).splitlines() if line.strip()), type(error).__name__)[:300]


def _write_traceback(assignment: Assignment, rank: int) -> None:
    log = Path(assignment.directory) / f"error-rank{rank}.log"
    try:
        log.parent.mkdir(parents=True, exist_ok=True)
        log.write_text(traceback.format_exc())
    except OSError:  # a full disk must not take the lane with it: Ray's own log has it then
        traceback.print_exc()


class Relay:
    """Rank 0's report function: evaluations wait for the driver's word, what is between them goes out without waiting."""

    def __init__(self, board: Any, key: str) -> None:
        self._board, self._key = board, key
        self._answer: Any = None
        self.last_message = Message()

    def __call__(self, report: Report) -> str:
        message = Message(report.metrics, report.rungs, report.step_losses, evaluated=report.kind == "milestone")
        if report.kind == "end":
            self.last_message = message
            return "go on"
        if report.kind == "milestone":  # once its checkpoint is past, only the driver's journal has it
            return ray.get(self._board.ask.remote(self._key, message))
        before, self._answer = self._answer, self._board.say.remote(self._key, message)
        return "go on" if before is None else ray.get(before)


# The driver's side


@dataclass(frozen=True)
class LaneShape:
    """What every lane of a study is made of."""

    num_lanes: int
    world_size: int
    cpus_per_rank: int
    use_gpu: bool


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
        causes = [f"rank {rank}: {_first_line(error)}" for rank, error in sorted(worker_exceptions.items())]
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


def hear_sigterm() -> None:
    signal.signal(signal.SIGTERM, lambda *_: _told_to_end.set())


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
        said = f"{lost or 'its ranks went home'}{self._left_behind()}"
        if has_no_room(lost):
            return ray.get(self.board.no_room.remote(self.lane))
        blame = "memory" if LOW_MEMORY in said else "machine"
        cause = " ".join(said.split())[:300]  # its first line alone says nothing
        return ray.get(self.board.run_lost.remote(self.lane, cause, blame))

    def _left_behind(self) -> str:
        """Remove it; where that fails, what to say of it: the lane's trials must hear of the loss in any case."""
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
