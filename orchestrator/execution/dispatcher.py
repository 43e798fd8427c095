"""The Dispatcher: the one actor through which trials reach lanes, and what trials say reaches Tune.

It knows lanes (`_Lane`; docs/architecture.md draws their states) and trials that were handed over (`_Handover`).
It imports next to nothing: its process starts beside those of the first lane, on the same cores.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import time
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

from batchscout.orchestrator.decisions.decision import Action
from batchscout.orchestrator.decisions.kill_rules import judge_silence
from batchscout.orchestrator.execution import process_endings
from batchscout.orchestrator.study.causes import Cause
from batchscout.orchestrator.study.messages import Assignment, Blame, Device, FirstLane, HeldLane, Host, Message
from batchscout.orchestrator.units import counted, ending_text
from batchscout.trainers.files import quoted
from batchscout.trainers.notices import Notice, NoticeKind

if TYPE_CHECKING:
    from ray.util.placement_group import PlacementGroup

# If a lane's processes have died under the same trial this often, the trial is at fault.
MAX_LANE_DEATHS = 2
# If a lane's processes end this often without taking a trial, the lane will not come up.
MAX_STARTS = 3
# What keeps a lane from coming up may pass, as a disk does that is full for a moment.
SECONDS_BEFORE_THE_LAST_START = 20.0
# Ray may say that a process is gone a moment before the kernel does.
SECONDS_TO_END = 1.0

DispatcherHandle: TypeAlias = Any
"""Ray's handle of the actor: Ray makes its methods at run time (`handle.take.remote(...)`), so no type knows them."""


class LaneState(Enum):
    """What a lane is doing, as far as its ranks and Ray Train have said."""

    STARTING = "starting"
    """Ray Train is to start its processes, for the first time or after the last ones died."""
    IDLE = "idle"
    """Its processes run no trial: they wait for one, or are about to ask for one."""
    RUNNING = "running"
    """Its processes run a trial; at a rung or an evaluation that trial waits for its answer."""
    LEAVING = "leaving"
    """Its processes were told to end, or are to as their trial hangs: one that they run is to save and to stop, and no other begins there."""
    GIVEN_UP = "given up"
    """Its processes ended again and again before they asked for a trial, are on another kind of GPU, or do not see the run directory."""
    RELEASED = "released"
    """It had no trial and gets no other: its processes go home, so that its node may."""


@dataclass(frozen=True)
class LaneTold:
    """The status of a lane, by which lanes are opened and released."""

    state: LaneState
    idle_seconds: float | None
    """How long it has had no trial; None while it has one, or gives one back."""
    node: str
    """The host of its rank 0; empty before that has introduced itself."""


@dataclass(frozen=True)
class _Death:
    """What the processes of a lane died of."""

    cause: str = "its processes died without a message"
    blame: Blame = "trial"
    exit_codes: tuple[int, ...] = ()
    """How those ended that were lost, as far as the kernel tells."""
    processes: str = "processes"
    """Which ones, in words."""

    def may_be_for_want_of_memory(self) -> bool:
        """True unless it is known that the kernel did not kill a process: it does that with SIGKILL."""
        return not self.exit_codes or -signal.SIGKILL in self.exit_codes

    def survived(self, what_then: str) -> Notice:
        """Return what is told of it where no trial ends of it."""
        cause = "the host ran out of memory and ended one" if self.blame == "memory" else self.cause
        return Notice(NoticeKind.LANE_DIED, f"its lane's {self.processes} died: {cause}; {what_then}")


class _Process:
    """The process of a rank, watched if it runs where this one can see it."""

    def __init__(self, host: Host) -> None:
        self.host = host
        is_seen = host.pid_namespace != "" and host.pid_namespace == process_endings.pid_namespace()
        self._pidfd = process_endings.open_process(host.process_id) if is_seen else None

    async def exit_code(self) -> int | None:
        """Return how it ended, as `subprocess` does; None if that is not known."""
        deadline = time.monotonic() + SECONDS_TO_END
        while self._pidfd is not None:
            is_over = process_endings.was_waited_for(self._pidfd)
            code = process_endings.exit_code(self._pidfd)
            if code is not None or is_over or time.monotonic() > deadline:
                return code
            await asyncio.sleep(0.01)
        return None

    def forget(self) -> None:
        if self._pidfd is not None:
            os.close(self._pidfd)
        self._pidfd = None


class _Handover:
    """One handing over of a trial: from `assign` to the trial's last word, or until it is dismissed."""

    def __init__(self, assignment: Assignment) -> None:
        self.assignment = assignment
        self.is_wanted = True
        """False once it is dismissed."""
        self.has_ended = False
        """True once its last word has come."""
        self.lane: HeldLane | None = None
        """The lane that has it, or had it last; None before the first."""
        self.heard_at: float | None = None
        """When its lane last said something about it; None while it waits in the queue or for an answer."""
        self._unread: deque[Message] = deque()
        self._has_unread = asyncio.Event()
        self._answered = asyncio.Event()

    def hear(self) -> None:
        self.heard_at = time.monotonic()

    def deliver(self, message: Message) -> None:
        """Keep a message for the driver, unless the last word has come already."""
        if not self.has_ended:
            self._unread.append(replace(message, lane=self.lane))
            self.has_ended = message.outcome is not None
            self._has_unread.set()

    async def next_message(self) -> Message:
        if not self._unread:
            self._answered.set()
        while not self._unread:
            self._has_unread.clear()
            await self._has_unread.wait()
        return self._unread.popleft()

    def expect_answer(self) -> None:
        """Forget the last answer: it was to an earlier message, and the driver has yet to answer the next one."""
        self._answered.clear()

    async def answer(self) -> Literal["go on", "stop"]:
        """Wait for the driver's answer to the last message. Time spent waiting here does not count as silence."""
        self.heard_at = None
        await self._answered.wait()
        self.hear()
        return "go on" if self.is_wanted else "stop"

    def dismiss(self) -> None:
        self.is_wanted = False
        self._answered.set()


class _Lane:
    """One lane, and all that is known of it. Its methods are the only transitions between its states."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.state = LaneState.STARTING
        self.trial: _Handover | None = None
        """The trial it took, until its ranks are done with it. If they die it stays here until their death is dealt
        with."""
        self.processes: dict[int, _Process] = {}
        """Those that introduced themselves last, by rank."""
        self._memory_kills: dict[str, int] = {}
        """Of every host that a process of the lane has run on, as it was last told."""
        self.placement: PlacementGroup | None = None
        """The placement group of its last processes."""
        self.is_unfit = False
        """True once a rank of it was on another kind of device than the study measures on, or on a node that does not see the run directory:
        it is given up, and gets no trial."""
        self.given_up_because = ""
        """Kept if the lane comes up after all: such a lane runs trials, but the study does not count on it."""
        self.idle_since = time.monotonic()
        """When it had a trial last; before its first, since when it is known."""
        self.group = ""
        """The processes whose rank 0 asked last."""
        self._former_groups: set[str] = set()
        self._turn, self._taken = 0, None
        self._death = _Death()
        self._untold: list[Notice] = []
        """Of deaths while it had no trial: the next one that it has tells of them."""
        self._deaths_since_take = self._lost_runs_since_take = 0

    def come_up(self, rank: int, host: Host, placement: PlacementGroup | None) -> None:
        """Note that the lane has a new process; if it is rank 0's, nobody has told it and the others to end.

        If a host's kernel has ended a process for want of memory meanwhile, that is what the last ones died of.
        """
        kills_before = self._memory_kills.get(host.name, host.memory_kills)
        if kills_before < host.memory_kills and self._death.may_be_for_want_of_memory():
            self._death = replace(self._death, blame="memory")
        self._memory_kills[host.name] = host.memory_kills
        if rank in self.processes:
            self.processes[rank].forget()
        self.processes[rank] = _Process(host)
        if rank > 0:
            return
        self.placement = placement
        if self.state is LaneState.LEAVING:
            self.state = LaneState.STARTING

    def ask_for_trial(self, group: str) -> None:
        """Note that rank 0 of this group asks for a trial: a different group that asked before has been replaced."""
        if group != self.group:
            self._former_groups.add(self.group)
            self.group, self._turn = group, 0
        self._death, self._deaths_since_take, self._lost_runs_since_take = _Death(), 0, 0
        if self.state not in (LaneState.LEAVING, LaneState.RELEASED) and not self.is_unfit:
            self.state = LaneState.IDLE

    def waits(self, group: str) -> bool:
        """True if a trial can begin there: the group is neither dead nor replaced nor told to end."""
        return self.state is LaneState.IDLE and self.group == group

    def begin(self, trial: _Handover) -> None:
        assert self.state is LaneState.IDLE, f"a trial began on a lane that was {self.state.value}"
        self.state, self.trial = LaneState.RUNNING, trial
        trial.lane = self.held() if 0 in self.processes else None
        trial.hear()
        while self._untold:
            trial.deliver(Message(notice=self._untold.pop(0)))

    def held(self) -> HeldLane:
        """Return what a trial is told by that has it: its rank 0, at least, has introduced itself."""
        hosts = [self.processes[rank].host for rank in sorted(self.processes)]
        devices = tuple(host.hardware for host in hosts if host.hardware is not None)
        nodes = tuple(host.name for host in hosts)
        return HeldLane(
            self.number,
            nodes[0],
            devices[:1] if len(set(devices)) == 1 else devices,
            nodes if len(set(nodes)) > 1 else (),
        )

    def as_first(self) -> FirstLane:
        """Return what a study is told of it that runs on lanes like this one."""
        host, hosts = self.processes[0].host, [process.host for process in self.processes.values()]
        free = min((one.free_bytes for one in hosts if one.free_bytes is not None), default=None)
        return FirstLane(host.device, host.hardware, len({one.name for one in hosts}), free)

    def let_go(self) -> _Handover | None:
        """Part with its trial, if it has one, and return it."""
        trial, self.trial = self.trial, None
        if trial is not None:
            self.idle_since = time.monotonic()
        if self.state is LaneState.RUNNING:
            self.state = LaneState.IDLE
        return trial

    def leave(self) -> None:
        """Note that one of the lane's processes was told to end."""
        if self.state is not LaneState.RELEASED:
            self.state = LaneState.LEAVING

    def release(self) -> bool:
        """Give it no other trial, if it has none; return whether it will end."""
        if self.trial is None and self.state in (LaneState.STARTING, LaneState.IDLE):
            self.state = LaneState.RELEASED
        return self.is_released

    @property
    def is_released(self) -> bool:
        return self.state is LaneState.RELEASED

    def has_lost_all(self, ranks: Sequence[int]) -> bool:
        """True if these are all the ranks that have introduced themselves."""
        return bool(self.processes) and self.processes.keys() <= set(ranks)

    def told(self) -> LaneTold:
        may_wait = self.trial is None and self.state is not LaneState.LEAVING
        idle_seconds = time.monotonic() - self.idle_since if may_wait else None
        return LaneTold(self.state, idle_seconds, self.processes[0].host.name if 0 in self.processes else "")

    def lose_processes(self) -> None:
        """Note that the lane has no processes. It keeps its trial, whose fate depends on what the processes died of."""
        if self.state in (LaneState.IDLE, LaneState.RUNNING):
            self.state = LaneState.STARTING

    async def endings(self, ranks: Iterable[int]) -> dict[int, int | None]:
        """Return how the processes of these ranks ended, by rank, as `subprocess` does; None where nobody knows."""
        return {rank: await self.processes[rank].exit_code() for rank in ranks if rank in self.processes}

    def die(self, cause: str, blame: Blame, endings: Mapping[int, int | None]) -> str:
        """Lose the lane's processes to this cause, or rather to their endings, where these are known. Return which.

        If they were told to end, their trial is not to blame, however it looks.
        """
        told = blame == "trial" and self.state is LaneState.LEAVING
        cause = "; ".join(filter(None, (self._ending(rank, code) for rank, code in endings.items()))) or cause
        codes = tuple(code for code in endings.values() if code is not None)
        numbers = [str(process.host.process_id) for _, process in sorted(self.processes.items())]
        processes = f"{'process' if len(numbers) == 1 else 'processes'} {', '.join(numbers)}".strip()
        self._death = _Death(cause, "machine" if told else blame, codes, processes)
        self.lose_processes()
        return cause

    def note_death_without_trial(self) -> None:
        """Have it told that processes died which ran nothing, and were not to end."""
        if self.trial is None and self._death.blame != "machine":
            self._untold.append(
                self._death.survived("that was between two trials, and this one began in fresh processes")
            )

    def _ending(self, rank: int, code: int | None) -> str:
        """Return how the process of a rank ended, with the stack that it may have left behind; empty if nobody knows."""
        number = self.processes[rank].host.process_id
        stack = crash_log(self.trial.assignment.directory, rank, number) if self.trial else None
        where = f" (its stack is in {quoted(stack)})" if stack and stack.exists() and stack.stat().st_size else ""
        if code is None:
            return f"rank {rank} crashed{where}" if where else ""
        return f"rank {rank} {ending_text(code)}{where}"

    def give_up(self, cause: str) -> None:
        self.state, self.given_up_because = LaneState.GIVEN_UP, cause

    def count_death(self) -> int:
        """Return how many groups of its processes have died since one asked for a trial."""
        self._deaths_since_take += 1
        return self._deaths_since_take

    def count_lost_run(self) -> int:
        """Return how many of its Train runs were lost since one asked for a trial."""
        self._lost_runs_since_take += 1
        return self._lost_runs_since_take

    def pop_death(self) -> _Death:
        """Return what the lane's processes died of, and forget it: the caller deals with it."""
        death, self._death = self._death, _Death()
        return death

    def note_taken(self, turn: int, taken: Assignment | None) -> None:
        self._turn, self._taken = turn, taken

    def has_turn(self, group: str, turn: int) -> bool:
        """True if it is known what the group runs in that turn: what its rank 0 took, or nothing if it was replaced."""
        return (self.group, self._turn) == (group, turn) or group in self._former_groups

    def taken(self, group: str) -> Assignment | None:
        return self._taken if group == self.group else None


class Dispatcher:
    """Hands trials to lanes, and passes messages and answers on. An asyncio actor: calls wait without blocking each
    other.

    A `key` names one handing over of a trial. The same trial may be handed over again; what a rank then still says
    under the earlier key is answered "stop", and kept for nobody.
    """

    def __init__(
        self, num_lanes: int, max_silent_seconds: float | None = None, measured_on: Device | None = None
    ) -> None:
        """max_silent_seconds: a trial that has said nothing for longer has hung; None: trials may be silent for
        ever. measured_on: what the study has measured on; None: what the first rank says that comes up."""
        self._num_lanes, self._max_silent_seconds, self._measured_on = num_lanes, max_silent_seconds, measured_on
        self._lanes: defaultdict[str, _Lane] = defaultdict(lambda: _Lane(len(self._lanes)))
        self._given_up: list[_Lane] = []
        """In the order in which they were given up."""
        self._wanted: dict[str, _Handover] = {}
        """By their keys, without those that were dismissed, which a lane may still have."""
        self._queue: deque[_Handover] = deque()
        self._changed = asyncio.Event()
        self._is_closing = False

    # For the ranks of a lane

    async def introduce(self, lane: str, host: Host, placement: PlacementGroup | None = None, rank: int = 0) -> None:
        """Note that a rank of the lane has a new process on this host, in this placement group.

        All ranks must have been here before rank 0 asks for a trial: what their predecessors died of is judged then. A
        lane with a rank on another kind of GPU than the study measures on, or on a node that does not see the run
        directory, is given up.
        """
        self._lanes[lane].come_up(rank, host, placement)
        self._measured_on = self._measured_on or host.hardware
        if (why := _unfit(rank, host, self._measured_on)) and not self._lanes[lane].is_unfit:
            self._lanes[lane].is_unfit = True
            self._give_up(self._lanes[lane], why)
        self._tell()

    async def take(self, lane: str, group: str, turn: int) -> Assignment | None:
        """Wait for this lane's next assignment; None if the study is over or the group was replaced. For rank 0.

        A trial that the lane's former processes died under is dealt with first: it is the next one again, or it ends.
        """
        taker = self._lanes[lane]
        self._deal_with_death(taker)
        taker.ask_for_trial(group)
        self._tell()
        await self._until(lambda: self._next() or self._is_closing or not taker.waits(group))
        trial = None if self._is_closing or not taker.waits(group) else self._next()
        if trial is not None:
            self._queue.remove(trial)
            taker.begin(trial)
        taken = trial.assignment if trial else None
        if taker.group == group:
            taker.note_taken(turn, taken)
        self._tell()
        return taken

    async def follow(self, lane: str, group: str, turn: int) -> Assignment | None:
        """Wait for what rank 0 of this group takes in this turn; None if the group was replaced. Called by the other
        ranks."""
        followed = self._lanes[lane]
        await self._until(lambda: followed.has_turn(group, turn))
        return followed.taken(group)

    async def say(self, key: str, message: Message) -> Literal["go on", "stop"]:
        """Deliver a message. Returns "stop" if the trial is no longer wanted, or its lane's processes are to end."""
        lane, trial = self._lane_with(key), self._wanted.get(key)
        if lane is not None and lane.trial is not None:
            lane.trial.hear()
        if trial is None or trial.has_ended:
            return "stop"
        if message.outcome == "stopped":  # though nobody dismissed it
            message = replace(message, outcome="interrupted", reason="its processes were told to end")
        trial.deliver(message)
        return "stop" if lane is not None and lane.state is LaneState.LEAVING else "go on"

    async def ask(self, key: str, message: Message) -> Literal["go on", "stop"]:
        """Deliver a message and wait for the answer to it."""
        trial = self._wanted.get(key)
        if trial is None:
            return "stop"
        trial.expect_answer()
        answer = await self.say(key, message)
        if trial.has_ended or await trial.answer() == "stop":
            return "stop"
        return answer

    async def freed(self, lane: str) -> None:
        """Note that the lane is done with its assignment, whatever came of it."""
        self._lanes[lane].let_go()
        self._tell()

    async def give_back(self, lane: str, key: str) -> None:
        """Put the lane's assignment first in the queue again: it needs fresh processes, and the lane replaces its
        own."""
        trial = self._lanes[lane].let_go()
        if trial is not None and trial.assignment.key == key and trial.is_wanted:
            self._queue.appendleft(trial)
        self._tell()

    async def until_freed(self, lane: str, key: str) -> None:
        """Wait until rank 0 has said the assignment's last word. Called by the other ranks before their processes
        end."""
        await self._until(lambda: self._lane_with(key) is not self._lanes[lane])

    async def heartbeat(self, lane: str, *, leaving: bool = False) -> Literal["go on", "closed", "hung"]:
        """Return closed if the study is over, and hung if the lane's trial was silent for too long, which ends the
        trial.

        Every rank calls this again and again beside its work. The call fails when the driver is gone, since the
        Dispatcher is then gone as well. leaving: the rank's process was told to end, so its trial is to save and stop.
        """
        asked = self._lanes[lane]
        if self._is_closing or asked.is_released:
            return "closed"
        if leaving and asked.state is not LaneState.LEAVING:
            asked.leave()
            self._tell()
        if asked.trial is None or not self._end_if_silent(asked.trial):
            return "go on"
        asked.let_go()
        asked.leave()
        self._tell()
        return "hung"

    # For those who keep a lane alive

    async def group_died(self, lane: str, cause: str, blame: Blame, lost_ranks: Sequence[int] = ()) -> None:
        """Note that a group of the lane's processes died; give the lane up if its groups never get as far as a
        trial. lost_ranks: those whose processes Ray has found gone. Returns when another group is to be started."""
        dead = self._lanes[lane]
        cause = dead.die(cause, blame, await dead.endings(lost_ranks))
        num_deaths = dead.count_death()
        if lost_ranks:  # the others have ended by themselves, since their lane wants fresh ones
            dead.note_death_without_trial()
        if num_deaths > 1 or (blame == "machine" and dead.has_lost_all(lost_ranks)):
            self._deal_with_death(dead)  # no process has its trial any more, and another lane may have it now
        self._give_up_after(num_deaths, dead, cause)
        self._tell()
        await self._until_another_start(num_deaths, dead)

    async def run_lost(self, lane: str, cause: str, blame: Blame) -> bool:
        """Note that the lane's Train run has ended too early, and its processes with it. True, once it is time, if another is to be
        started."""
        dead = self._lanes[lane]
        dead.die(cause, blame, {})
        self._deal_with_death(dead)
        num_lost = dead.count_lost_run()
        self._give_up_after(num_lost, dead, cause)
        self._tell()
        await self._until_another_start(num_lost, dead)
        return not dead.given_up_because and not dead.is_released and not self._is_closing

    async def no_room(self, lane: str) -> bool:
        """Note that the cluster has no room for the lane's processes now. True if the caller is to try again.

        The trial that they ran is free for other lanes.
        """
        self._lanes[lane].lose_processes()
        self._deal_with_death(self._lanes[lane])
        self._tell()
        return not self._lanes[lane].is_released and not self._is_closing

    async def placement(self, lane: str) -> PlacementGroup | None:
        """Return the placement group of the lane's last processes; None before it had any."""
        return self._lanes[lane].placement

    # For whoever opens lanes and releases them

    async def lanes(self) -> dict[str, LaneTold]:
        """Return what is known of each lane that has been heard of, by its name."""
        return {name: lane.told() for name, lane in self._lanes.items()}

    async def release(self, lane: str) -> bool:
        """Have a lane end that has no trial, and return whether it will. While a trial waits for a lane none is released: it may be this
        one that takes it."""
        is_released = not self._queue and self._lanes[lane].release()
        self._tell()
        return is_released

    # For the driver and the trials' relays

    async def first_lane(self) -> FirstLane:
        """Wait for the first lane that comes up with all its ranks, and return what it runs on."""
        await self._until(lambda: self._up() or self._no_lane_is_left())
        first = next(iter(self._up()), None)
        return first.as_first() if first else FirstLane()

    async def given_up(self) -> list[str]:
        """Return why lanes were given up, in the order in which they were."""
        return [lane.given_up_because for lane in self._given_up]

    async def assign(self, assignment: Assignment) -> None:
        """Queue a trial. This dismisses an earlier handing over of the same trial, whose relay must have been lost."""
        for key, trial in list(self._wanted.items()):
            if trial.assignment.trial_id == assignment.trial_id:
                await self.dismiss(key)
        self._wanted[assignment.key] = trial = _Handover(assignment)
        self._end_without_lanes(trial)
        self._queue.append(trial)
        self._tell()

    async def next_message(self, key: str) -> Message:
        """Wait for the trial's next message. A call that finds none unread answers the last one with "go on"."""
        return await self._wanted[key].next_message()

    async def dismiss(self, key: str) -> None:
        """Withdraw a trial for now: it is told to stop at its next message, and keeps its checkpoint."""
        trial = self._wanted.pop(key, None)
        if trial is not None:
            trial.dismiss()
        self._queue = deque(waiting for waiting in self._queue if waiting.assignment.key != key)

    async def dismiss_all(self) -> None:
        """Dismiss every trial, and wait until no lane has one: those that ran have saved a checkpoint by then."""
        await self._dismiss_every_one()
        await self._until(lambda: not any(lane.trial for lane in self._lanes.values()))

    async def close(self) -> None:
        """Give out no more assignments, so that idle ranks return and their Train runs end."""
        await self._dismiss_every_one()
        self._is_closing = True
        self._tell()

    # Consequences

    def _tell(self) -> None:
        """Wake every waiting call to look again: something has changed."""
        self._changed.set()
        self._changed = asyncio.Event()

    async def _until(self, holds: Callable[[], object]) -> None:
        while not holds():
            await self._changed.wait()

    async def _dismiss_every_one(self) -> None:
        for key in list(self._wanted):
            await self.dismiss(key)

    def _up(self) -> list[_Lane]:
        """Return the lanes whose ranks have all introduced themselves, and that may run trials."""
        return [lane for lane in self._lanes.values() if lane.group and lane.processes and not lane.is_unfit]

    def _next(self) -> _Handover | None:
        """Return the first in the queue whose trial is on no lane: two lanes would write to one directory."""
        on_a_lane = {lane.trial.assignment.trial_id for lane in self._lanes.values() if lane.trial}
        return next((waiting for waiting in self._queue if waiting.assignment.trial_id not in on_a_lane), None)

    def _lane_with(self, key: str) -> _Lane | None:
        return next((lane for lane in self._lanes.values() if lane.trial and lane.trial.assignment.key == key), None)

    def _deal_with_death(self, lane: _Lane) -> None:
        """Queue the lane's trial again, or end it: the processes that ran it are gone and gave no last word.

        Does nothing if the lane has no trial.
        """
        trial = lane.let_go()
        if trial is None:
            return
        death = lane.pop_death()
        if not trial.is_wanted or trial.has_ended:
            return
        deaths = trial.assignment.lane_deaths + 1
        if death.blame != "machine" and deaths < MAX_LANE_DEATHS:
            trial.assignment = replace(trial.assignment, lane_deaths=deaths)
            trial.deliver(Message(notice=death.survived("it runs again in fresh processes, from its last checkpoint")))
            self._queue.appendleft(trial)
        else:
            trial.deliver(_last_word(death, deaths))

    def _give_up_after(self, num_starts: int, lane: _Lane, cause: str) -> None:
        if num_starts < MAX_STARTS or lane.given_up_because or lane.is_released:
            return
        self._give_up(lane, f"its processes ended {counted(num_starts, 'time')} before they took a trial: {cause}")

    async def _until_another_start(self, num_starts: int, lane: _Lane) -> None:
        if num_starts != MAX_STARTS - 1:
            return
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(SECONDS_BEFORE_THE_LAST_START):
                await self._until(lambda: lane.given_up_because or lane.is_released or self._is_closing)

    def _give_up(self, lane: _Lane, cause: str) -> None:
        lane.give_up(cause)
        if lane not in self._given_up:
            self._given_up.append(lane)
        self._deal_with_death(lane)
        for trial in self._wanted.values():
            self._end_without_lanes(trial)

    def _no_lane_is_left(self) -> bool:
        return len(self._given_up) == self._num_lanes

    def _end_without_lanes(self, trial: _Handover) -> None:
        if self._no_lane_is_left():
            last = self._given_up[-1].given_up_because
            trial.deliver(
                Message(
                    outcome="no_lane",
                    reason=f"every lane has failed, the last one because {last}",
                )
            )

    def _end_if_silent(self, trial: _Handover) -> bool:
        """End a trial that has said nothing for too long, and return whether it has."""
        if trial.heard_at is None:
            return False
        decision = judge_silence(time.monotonic() - trial.heard_at, self._max_silent_seconds)
        if decision.action is not Action.STOP:
            return False
        trial.deliver(Message(outcome="failed", cause=decision.cause, reason=decision.reason))
        return True


def crash_log(directory: str, rank: int, process_id: int) -> Path:
    """Return where a rank that crashes leaves its stack: of each process for itself, since the trial may survive the first."""
    return Path(directory) / f"crash-rank{rank}-{process_id}.log"


def _unfit(rank: int, host: Host, measured_on: Device | None) -> str:
    """Return in words why a lane with this rank must run nothing; empty if it may."""
    if not host.sees_run_directory:
        return (
            f"its rank {rank} runs on {host.name}, which does not see the run directory: mount there the storage that the other nodes "
            "see, or take the node out of the cluster"
        )
    here = host.hardware
    # On a CPU what fits is bounded by the study's own limit, and only how fast it is depends on the kind.
    if here is None or measured_on is None or not here.is_gpu or here.is_like(measured_on):
        return ""
    return (
        f"its rank {rank} runs on {here} of {host.name}, and the study measures on {measured_on}: measurements of one kind of GPU are "
        "not valid for another"
    )


def _last_word(death: _Death, num_deaths: int) -> Message:
    """Return the last word on a trial under which its lane's processes died."""
    if death.blame == "machine":
        return Message(outcome="interrupted", reason=death.cause)
    if death.blame == "memory":
        said = (
            "the host ran out of memory and ended its process; lower memory_limit, or see what else takes memory there"
        )
        return Message(outcome="out_of_memory", cause=Cause.HOST_MEMORY, reason=said)
    return Message(outcome="failed", reason=f"it ended its lane {counted(num_deaths, 'time')}; last: {death.cause}")
