"""What runs in the processes of a lane: rank after rank takes the assignment of its group, and says what came of it."""

from __future__ import annotations

import gc
import importlib
import os
import re
import signal
import socket
import threading
import time
import traceback
import uuid
from dataclasses import replace
from pathlib import Path
from typing import Any

import ray
from ray import train
from ray.exceptions import RayError
from ray.util.placement_group import get_current_placement_group

from orchestrator.execution.ray_private import is_draining
from orchestrator.study.messages import Assignment, Host, Message
from orchestrator.units import bytes_text
from trainers.config import TrialConfig
from trainers.files import StorageLost
from trainers.report import Report

# What a CPU rank may still hold above its idle size after running out of memory before its processes are replaced.
MEMORY_TOLERANCE_BYTES = 64 * 2**20
# How long a rank may outlive its driver. It asks anew: a call left waiting would be one more for every recycled group.
SECONDS_BETWEEN_LOOKS = 2.0


class LaneRecycled(Exception):
    """Raised by a rank so that Ray Train replaces the processes of its group."""


_told_to_end = threading.Event()
"""Set in a rank's process by SIGTERM, as it comes before a machine is taken away."""


def hear_sigterm() -> None:
    signal.signal(signal.SIGTERM, lambda *_: _told_to_end.set())


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
    from trainers.device import describe, pick_device
    from trainers.memory import memory_kills

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
    from trainers.device import pick_device

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
    from trainers.device import on_cuda
    from trainers.loop import train as train_one

    config = TrialConfig.model_validate(assignment.config)
    relay = Relay(board, assignment.key)
    try:
        verdict = train_one(config, relay, Path(assignment.directory), assignment.token)
    except StorageLost as error:
        return Message(outcome="no_room", reason=str(error)), config.world_size == 1
    except Exception as error:
        if memory.is_out_of_memory(error):
            alone_on_a_cpu = config.world_size == 1 and not on_cuda()
            return Message(outcome="out_of_memory", reason=memory_reason(str(error), config)), alone_on_a_cpu
        _write_traceback(assignment, rank)
        if lost_a_peer(error):  # whoever has another reason says it; if nobody has, this one is the cause of death
            raise LaneRecycled(f"a collective failed: {first_line(error)}") from None
        return Message(outcome="failed", reason=f"failed: {type(error).__name__}: {first_line(error)}"), False
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


def first_line(error: BaseException) -> str:
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
