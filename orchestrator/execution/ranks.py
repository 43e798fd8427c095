"""Runs in the processes of a lane: its ranks take one assignment after another, and say what came of each."""

from __future__ import annotations

import contextlib
import faulthandler
import gc
import importlib
import itertools
import os
import re
import socket
import sys
import threading
import time
import traceback
import uuid
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import ray
from ray import train
from ray.exceptions import RayError
from ray.util.placement_group import get_current_placement_group

from batchscout.orchestrator.execution import process_endings
from batchscout.orchestrator.execution.dispatcher import DispatcherHandle, crash_log
from batchscout.orchestrator.execution.ray_private.cluster import is_draining
from batchscout.orchestrator.execution.termination import is_told_to_end
from batchscout.orchestrator.study.inputs import import_paths
from batchscout.orchestrator.study.messages import Assignment, Device, Host, Message
from batchscout.orchestrator.study.storage.marker import RunMarker, is_seen
from batchscout.orchestrator.study.storage.stored_trials import Publication
from batchscout.orchestrator.units import bytes_text, exit_text, shortened
from batchscout.trainers.config import TrialConfig, left_as_it_is
from batchscout.trainers.descendants import adopt_orphans, end_descendants
from batchscout.trainers.device.cgroup import memory_kills
from batchscout.trainers.errors import first_line, raised_text, raised_where, said_by
from batchscout.trainers.files import StorageLost, own_file, quoted, storage_error
from batchscout.trainers.report import Report

# How long a rank whose peer is gone waits before it ends the group: what the peer died of is then known, and has ended the group. Ray waits
# for a second or two until it says that a process went with its node, which is no fault of the trial's; on a busy machine longer.
SECONDS_TO_TELL_OF_A_PEER = 10.0
# How long a rank may outlive its driver. A rank asks again and again, since one long call would outlive a recycled
# group.
SECONDS_BETWEEN_LOOKS = 2.0


# The characters of a traceback that are kept: an exception's text may hold a whole tensor, or a whole file.
MOST_OF_A_TRACEBACK = 100_000


class LaneRecycled(Exception):
    """Raised by a rank so that Ray Train replaces the processes of its group."""


@dataclass(frozen=True)
class Place:
    """What this process is: one rank of a lane."""

    dispatcher: DispatcherHandle
    lane: str
    rank: int
    marker: RunMarker | None = None
    """What it can read where it sees the run directory; None: every rank sees it."""
    code: Mapping[str, str] = field(default_factory=dict)
    """Digests of the user's code, by which trials compare; none of code that cannot change meanwhile."""

    def introduce(self) -> None:
        host = _host(sees_run_directory=self.marker is None or is_seen(self.marker))
        ray.get(self.dispatcher.introduce.remote(self.lane, host, get_current_placement_group(), self.rank))

    def next_assignment(self, group: str, turn: int) -> Assignment | None:
        """Wait for the next assignment: rank 0 takes one, and the others follow."""
        call = self.dispatcher.take if self.rank == 0 else self.dispatcher.follow
        return ray.get(call.remote(self.lane, group, turn))

    def say(self, assignment: Assignment, message: Message) -> None:
        """Deliver a message; nothing comes of a second last word."""
        ray.get(self.dispatcher.say.remote(assignment.key, message))

    def give_back(self, assignment: Assignment) -> None:
        if self.rank == 0:
            ray.get(self.dispatcher.give_back.remote(self.lane, assignment.key))
        else:
            self.wait_until_freed(assignment)

    def wait_until_freed(self, assignment: Assignment) -> None:
        """Wait for rank 0's last word: if this process ended now, rank 0 could not say it."""
        ray.get(self.dispatcher.until_freed.remote(self.lane, assignment.key))

    def heartbeat(self, *, leaving: bool) -> str:
        return ray.get(self.dispatcher.heartbeat.remote(self.lane, leaving=leaving))


def serve(told: dict[str, Any]) -> None:
    """Run assignments until there are no more, on one rank of a lane."""
    place = Place(told["dispatcher"], told["lane"], train.get_context().get_world_rank(), told["marker"], told["code"])
    if told["working_directory"] is not None:
        os.chdir(told["working_directory"])
    adopt_orphans()  # before a user's code starts any: Ray ends only what is in a rank's own process group
    _exit_with_the_study(place)
    try:
        _serve(place)
    finally:
        end_descendants()  # those of a user's code, which would hold ports and memory that the next process wants


def _serve(place: Place) -> None:
    _freeze_what_is_imported()
    place.introduce()
    group = _common_name()
    _read_capacity()
    for turn in itertools.count(1):
        assignment = place.next_assignment(group, turn)
        if assignment is None and _is_leaving():
            raise LaneRecycled("its processes were told to end")
        if assignment is None:
            return
        if assignment.fresh_process and turn > 1:
            place.give_back(assignment)
            raise LaneRecycled(f"fresh processes for {assignment.trial_id}")
        with left_as_it_is():
            fit_for_another = _run(assignment, place)
        if not fit_for_another:
            raise LaneRecycled("fresh processes for the next trial")


def _run(assignment: Assignment, place: Place) -> bool:
    """Run one assignment and report how it ended; False if this process must not run another one."""
    clean = run_and_say(assignment, place)
    leaving = _is_leaving()
    if leaving:  # said before the group ends: rank 0 may have taken another trial by then
        place.heartbeat(leaving=True)
    if clean and (assignment.recycle_after or leaving):
        place.wait_until_freed(assignment)
    return clean and not assignment.recycle_after and not leaving


def _freeze_what_is_imported() -> None:
    """Keep the garbage collection after every trial from looking through the objects of 1,500 imported modules."""
    importlib.import_module("torch._dynamo")  # the first optimizer would import it
    gc.collect()
    gc.freeze()


def _read_capacity() -> None:
    """Read what this process can have of its GPU: after NCCL took its part, and before a trial takes any."""
    from batchscout.trainers.device.device import pick_device
    from batchscout.trainers.device.gpu_memory import capacity_bytes

    if pick_device().type == "cuda":
        capacity_bytes(pick_device())


def _host(*, sees_run_directory: bool) -> Host:
    import torch

    from batchscout.trainers.device.device import describe, device_name, memory_bytes, pick_device

    device = pick_device()
    hardware = Device(device_name(device), memory_bytes(device), is_gpu=device.type == "cuda")
    name, namespace = socket.gethostname(), process_endings.pid_namespace()
    free = torch.cuda.mem_get_info(device)[0] if hardware.is_gpu else None
    return Host(name, describe(device), memory_kills(), os.getpid(), namespace, hardware, free, sees_run_directory)


def _is_leaving() -> bool:
    """True if this process is to end soon: its trial is to save a checkpoint, and no other may begin."""
    return is_told_to_end() or is_draining(ray.get_runtime_context().get_node_id())


def _exit_with_the_study(place: Place) -> None:
    """Watch, in a thread, for events that a rank in a long computation would miss.

    The thread ends this process when the driver is lost or the trial has hung, and tells the Dispatcher when the
    process was told to end.
    """

    def watch() -> None:
        told = "go on"
        while told == "go on":
            time.sleep(SECONDS_BETWEEN_LOOKS)
            try:
                told = place.heartbeat(leaving=_is_leaving())
            except RayError:
                told = "the driver is gone"
        if told != "closed":
            end_descendants()
            os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


def _common_name() -> str:
    """Return a name for this group of processes that all its ranks know and no group before it had.

    Every rank has got this far when it returns.
    """
    import torch.distributed as dist

    if not dist.is_initialized():
        return uuid.uuid4().hex
    names: list[str] = [""] * dist.get_world_size()
    dist.all_gather_object(names, uuid.uuid4().hex)
    return names[0]


def run_and_say(assignment: Assignment, place: Place) -> bool:
    """Run one assignment and send its last word; False if this process is not fit for another one."""
    from batchscout.trainers.device.device import pick_device
    from batchscout.trainers.device.memory import memory_of

    memory = memory_of(pick_device())
    idle_bytes = memory.idle_bytes()
    last_word, clean = memory.without_after_effects(lambda: run_trial(assignment, place))
    if clean:  # otherwise the device may be unusable, and the process ends in any case
        ran_out = last_word is not None and last_word.outcome == "out_of_memory"
        clean = memory.is_fit(idle_bytes, ran_out=ran_out)
    if last_word is not None:
        place.say(assignment, last_word)
        ray.get(place.dispatcher.freed.remote(place.lane))
    elif not clean:  # the group ends with this process: no other trial begins here, and rank 0 may still save and say what came of this one
        place.heartbeat(leaving=True)
        place.wait_until_freed(assignment)
    return clean


def run_trial(assignment: Assignment, place: Place) -> tuple[Message | None, bool]:
    """Return the trial's last word, if this rank has it, and whether the process may go on.

    No exception outlives this frame: it would keep the whole model alive.
    """
    from batchscout.trainers.device.device import pick_device
    from batchscout.trainers.device.memory import memory_of
    from batchscout.trainers.device.out_of_memory import refusal_in
    from batchscout.trainers.loop import train as train_one

    config = TrialConfig.model_validate_json(assignment.config_json)
    if changed := _changed_code(config, place.code):
        reason = (
            f"{changed} changed while this study ran, and trials of old and new code do not compare; take the change back, or add "
            "--keep-finished to go on with both"
        )
        return Message(outcome="other_code", reason=reason), config.world_size == 1
    try:
        assignment = _on_this_machine(assignment, config, place.rank)
        reporter = Reporter(place.dispatcher, assignment)
        with _leaving_its_stack(crash_log(assignment.directory, place.rank, os.getpid())):
            answer = train_one(config, reporter, Path(assignment.directory), assignment.token, assignment.known)
        if place.rank == 0 and answer == "stop":
            reporter.publish()  # what it saved in order to stop, of which no report tells
    except StorageLost as error:
        return Message(outcome="no_storage", reason=str(error)), config.world_size == 1
    except BaseException as error:  # SystemExit, too: a process that ended of it would take its reason along
        # The limit no longer holds here, but the error keeps the run alive, and with it what was reserved.
        free_bytes = memory_of(pick_device()).free_bytes(config.memory_limit_bytes)
        if (refusal := refusal_in(error, free_bytes)) is not None:
            return Message(outcome="out_of_memory", reason=memory_reason(str(refusal), config)), config.world_size == 1
        write_traceback(assignment, place.rank)
        if (refused := storage_error(error)) is not None:  # every trial that reads there would fail of it
            reason = f"the storage failed under {assignment.trial_id}: {refused}"
            return Message(outcome="no_storage", reason=reason), config.world_size == 1
        if lost_a_peer(error):  # the rank that failed first reports why; if none does, the group died of this
            time.sleep(SECONDS_TO_TELL_OF_A_PEER)
            raise LaneRecycled(f"a collective failed: {first_line(error)}") from None
        remedy = where_paths_begin(error) or where_a_gpu_failed(error)
        failed = Message(outcome="failed", reason=failure_reason(error) + remedy)
        # Said before what the error refers to is freed: after a device assert CUDA aborts the process there.
        place.say(assignment, failed)
        return failed, False
    if place.rank != 0:
        return None, True
    if assignment.stored is not None:
        assignment.stored.leave(assignment.trial_id)
    return replace(reporter.last_message, outcome="stopped" if answer == "stop" else "complete"), True


def _changed_code(config: TrialConfig, before: Mapping[str, str]) -> str:
    """Return the names of the user's modules that this process is to run in place of what the driver found; empty where there are none. A
    process that has run a trial goes on with what it imported then."""
    from batchscout.trainers.checkpoints.made_with import code_when_first_asked

    now = code_when_first_asked(tuple(import_paths(config)))
    return ", ".join(name for name, digest in now.items() if before.get(name, digest) != digest)


@contextlib.contextmanager
def _leaving_its_stack(log: Path) -> Iterator[None]:
    """Write the stack of a crash (SIGSEGV, SIGABRT, SIGBUS, SIGFPE, SIGILL) into this file, which is gone without one."""
    with own_file(log):
        log.parent.mkdir(parents=True, exist_ok=True)
        file = log.open("w")
    faulthandler.enable(file)
    try:
        yield
    finally:
        faulthandler.enable(all_threads=False)  # as Ray had it
        file.close()
        with contextlib.suppress(OSError):  # an empty file that stays is no reason to lose the trial
            log.unlink(missing_ok=True)


def failure_reason(error: BaseException) -> str:
    """Return in a line what the user's code raised."""
    if isinstance(error, SystemExit):
        return exit_text(error)
    if isinstance(error, Exception):
        return raised_text(error)
    return raised_where(error)  # few expect that such a thing is raised, or know by whom


def where_paths_begin(error: BaseException) -> str:
    """Return where a relative path led to that was not there, and the remedy; nothing for any other error."""
    named = error.filename if isinstance(error, FileNotFoundError) else None
    if not isinstance(named, str | os.PathLike) or Path(named).is_absolute():
        return ""
    return (
        f" (relative paths begin at {quoted(Path.cwd())} on {socket.gethostname()}: on a cluster a copy of the directory that you ran in, "
        "without what .gitignore lists; give an absolute path, which leads there on every node)"
    )


def where_a_gpu_failed(error: BaseException) -> str:
    """Return how to find the call that made a GPU fail, which tells of it late; nothing for any other error."""
    said = said_by(error)
    if not isinstance(error, RuntimeError) or not re.search("CUDA error|device-side assert", said):
        return ""
    return (
        " (a GPU reports an error later than the call that caused it, most often with an index out of range, such as a token or a "
        "class that the model does not have; for a traceback of that call give CUDA_LAUNCH_BLOCKING=1 to the processes of the study, on a "
        "cluster where its nodes start Ray, and run the same command with --retry-failed)"
    )


def lost_a_peer(error: BaseException) -> bool:
    """True if a collective failed because another rank's process ended, which is no fault of what this rank ran."""
    gone = ("Connection closed by peer", "Connection reset by peer", "Broken pipe", "NCCL", "Gloo")
    return isinstance(error, RuntimeError) and any(text.lower() in said_by(error).lower() for text in gone)


def memory_reason(text: str, config: TrialConfig) -> str:
    """Return, for people, what did not fit into what, from the allocator's error message."""
    asked = re.search(r"allocate ([\d.]+) ?(bytes|[KMG]iB)", text)
    more = "what it asked for" if asked is None else f"{asked[1]} {asked[2]} more"
    if asked is not None and asked[2] == "bytes":
        more = f"{bytes_text(float(asked[1]))} more"
    limit = f"the limit of {bytes_text(config.memory_limit_bytes)}" if config.memory_limit_bytes else "the device"
    return f"{more} did not fit into {limit}"


def write_traceback(assignment: Assignment, rank: int) -> None:
    log = Path(assignment.directory) / f"error-rank{rank}.log"
    said = shortened(traceback.format_exc(), MOST_OF_A_TRACEBACK)
    try:
        log.parent.mkdir(parents=True, exist_ok=True)
        log.write_text(said)
    except OSError:  # a full disk must not end the lane: the traceback goes to Ray's own log instead
        print(said, file=sys.stderr)
        return
    if publication := publication_of(assignment):
        try:
            publication.add(log.name)
            if rank == 0:
                publication.add_what_it_tells()
        except StorageLost as error:  # the driver's next line halts the study; the trial failed of something else
            print(f"{error}; it holds:\n{said}", file=sys.stderr)


def _on_this_machine(assignment: Assignment, config: TrialConfig, rank: int) -> Assignment:
    """Have here what a trial of an object store's study goes on from or is compared with, and return its assignment with the directory that
    it has on this machine. Raises StorageLost where the store or the disk refuses."""
    if (stored := assignment.stored) is None:
        return assignment
    stored.store.expect_answers()  # the driver has just written there of this trial
    stored.fetch(assignment.trial_id, checkpoints_alone=rank > 0)
    for other in trials_read_by(config):
        stored.fetch(other, checkpoints_alone=True)
    return replace(assignment, directory=str(stored.directory(assignment.trial_id, assignment.directory)))


def trials_read_by(config: TrialConfig) -> set[str]:
    """Return the other trials of the study of which this one reads what they have saved."""
    read = [config.reference_weights, config.branch_from.directory if config.branch_from else None]
    return {Path(path).parts[1] for path in read if path is not None and Path(path).parts[0] == ".."}


def publication_of(assignment: Assignment) -> Publication | None:
    """Return where the files of a trial's directory are to be beside it: in the study's object store, if it has one."""
    stored = assignment.stored
    return stored and stored.publication(assignment.trial_id, Path(assignment.directory))


class Reporter:
    """Rank 0's report function: an evaluation waits for the driver's answer; reports between evaluations do not
    wait."""

    def __init__(self, dispatcher: DispatcherHandle, assignment: Assignment) -> None:
        self._dispatcher, self._key, self._publication = dispatcher, assignment.key, publication_of(assignment)
        self._answer: ray.ObjectRef | None = None
        self.last_message = Message()

    def publish(self) -> None:
        """Have what the trial has saved in the study's object store, if it has one. Raises StorageLost where that refuses."""
        if self._publication is not None:
            self._publication.update()

    def __call__(self, report: Report) -> str:
        if report.notice is not None:  # wait: should this process end next, it has been said
            return ray.get(self._dispatcher.say.remote(self._key, Message(notice=report.notice)))
        message = Message(report.metrics, report.rungs, report.steps, evaluated=report.kind == "milestone")
        if report.kind in ("milestone", "end"):
            self.publish()  # before it is said: what the journal tells of is then in the store
        if report.kind == "end":
            self.last_message = message
            return "go on"
        if report.kind == "milestone":  # wait: a rank that trains on overwrites the checkpoint that could repeat it
            return ray.get(self._dispatcher.ask.remote(self._key, message))
        before, self._answer = self._answer, self._dispatcher.say.remote(self._key, message)
        return "go on" if before is None else ray.get(before)
