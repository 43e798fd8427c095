"""Who runs what: the one actor through which trials reach lanes and their words reach Tune.

It imports next to nothing: its process starts beside those of the first lane, on the same cores.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from dataclasses import replace
from typing import Any, Literal

from orchestrator.study.messages import HOST_RAN_OUT, Assignment, Blame, Host, Message

# An assignment under which its lane's processes died this often is at fault itself.
MAX_LANE_DEATHS = 2
# A lane whose processes end this often without taking a trial will not come up.
MAX_STARTS = 3


class _Line:
    """One trial in flight, as the Switchboard sees it."""

    def __init__(self, trial_id: str) -> None:
        self.trial_id = trial_id
        self.messages: deque[Message] = deque()
        self.arrived = asyncio.Event()
        self.dismissed = asyncio.Event()
        self.verdict = asyncio.Event()
        self.closed = False

    def end(self, message: Message) -> None:
        """Close the line with a last message, unless it has had one."""
        if not self.closed:
            self.messages.append(message)
            self.closed = True
            self.arrived.set()


class Switchboard:
    """Who runs what. An asyncio actor: calls wait without blocking each other."""

    def __init__(self, num_lanes: int, max_silent_seconds: float | None = None) -> None:
        """max_silent_seconds: after which a trial that has said nothing has hung; None: never."""
        self._num_lanes, self._max_silent_seconds = num_lanes, max_silent_seconds
        self._heard: dict[str, float] = {}
        """When each lane with an assignment last said something; absent while it waits for a verdict."""
        self._lost: dict[str, str] = {}
        self._deaths_since_take: dict[str, int] = {}
        self._runs_since_take: dict[str, int] = {}
        self._queue: deque[Assignment] = deque()
        self._lines: dict[str, _Line] = {}
        self._in_flight: dict[str, Assignment] = {}
        self._turns: dict[tuple[str, int], Assignment | None] = {}
        self._groups: dict[str, str] = {}
        self._replaced: set[str] = set()
        self._causes: dict[str, str] = {}
        self._blames: dict[str, Blame] = {}
        self._hosts: dict[str, Host] = {}
        self._placements: dict[str, Any] = {}
        self._leaving: set[str] = set()
        """Lanes of which a process was told to end."""
        self._changed = asyncio.Condition()
        self._closing = False

    # For the ranks of a lane

    async def introduce(self, lane: str, host: Host, placement: Any = None) -> None:
        """The lane has new processes, there, in that placement group."""
        before = self._hosts.get(lane, host)
        if before.name == host.name and before.memory_kills < host.memory_kills:
            self._blames[lane] = "memory"
        self._hosts[lane], self._placements[lane] = host, placement
        self._leaving.discard(lane)
        async with self._changed:
            self._changed.notify_all()

    async def take(self, lane: str, group: str, turn: int) -> Assignment | None:
        """Rank 0: the next assignment of this lane; None when the study is over, or the lane is to have other processes.
        One that the lane died under comes again."""
        left_over = self._in_flight.get(lane)
        if left_over is not None:
            self._after_lane_death(lane, left_over)
        self._blames.pop(lane, None)
        self._deaths_since_take[lane] = self._runs_since_take[lane] = 0
        async with self._changed:
            if self._groups.get(lane, group) != group:
                self._replaced.add(self._groups[lane])
            self._groups[lane] = group
            self._changed.notify_all()
            await self._changed.wait_for(lambda: self._next() or self._is_over(lane, group))
            assignment = None if self._is_over(lane, group) else self._next()
            if assignment is not None:
                self._queue.remove(assignment)
                self._in_flight[lane] = assignment
                self._heard[lane] = time.monotonic()
            self._turns = {key: kept for key, kept in self._turns.items() if key[0] not in (group, *self._replaced)}
            self._turns[(group, turn)] = assignment
            self._changed.notify_all()
        return assignment

    def _next(self) -> Assignment | None:
        """The first whose trial no other lane has still: two would write to one directory."""
        running = {assignment.trial_id for assignment in self._in_flight.values()}
        return next((waiting for waiting in self._queue if waiting.trial_id not in running), None)

    def _is_over(self, lane: str, group: str) -> bool:
        """A group that died while it waited must not take what its successor is to have."""
        return self._closing or self._groups[lane] != group or lane in self._leaving

    async def follow(self, group: str, turn: int) -> Assignment | None:
        """The other ranks: what rank 0 of their group took in this turn; None to a group that has a successor."""
        async with self._changed:
            await self._changed.wait_for(lambda: (group, turn) in self._turns or group in self._replaced)
            return self._turns.get((group, turn))

    async def until_freed(self, lane: str, key: str) -> None:
        """The other ranks, where their processes are to end: rank 0 has said its last word on that assignment."""
        async with self._changed:
            await self._changed.wait_for(lambda: getattr(self._in_flight.get(lane), "key", None) != key)

    async def say(self, key: str, message: Message) -> str:
        """Deliver a message; answers "stop" where the trial is no longer wanted."""
        self._hear(key)
        line = self._lines.get(key)
        if line is None or line.closed or line.dismissed.is_set():
            return "stop"
        if message.outcome == "stopped":  # and nobody dismissed it
            message = replace(message, outcome="interrupted", reason="interrupted: its processes were told to end")
        line.messages.append(message)
        line.closed = message.outcome is not None
        line.arrived.set()
        return "stop" if self._leaving.intersection(self._lanes_with(key)) else "go on"

    async def ask(self, key: str, message: Message) -> str:
        """Deliver a message and wait for the verdict on it."""
        line = self._lines.get(key)
        if line is None:
            return "stop"
        line.verdict.clear()
        answer = await self.say(key, message)
        if line.closed or line.dismissed.is_set():
            return "stop"
        for lane in self._lanes_with(key):
            del self._heard[lane]
        await line.verdict.wait()
        self._hear(key)
        return "stop" if line.dismissed.is_set() else answer

    def _hear(self, key: str) -> None:
        self._heard |= dict.fromkeys(self._lanes_with(key), time.monotonic())

    def _lanes_with(self, key: str) -> list[str]:
        return [lane for lane, assignment in self._in_flight.items() if assignment.key == key]

    async def freed(self, lane: str) -> None:
        """The lane is done with its assignment, whatever came of it."""
        async with self._changed:
            self._in_flight.pop(lane, None)
            self._changed.notify_all()

    async def give_back(self, lane: str, key: str) -> None:
        """The lane will have other processes before it runs its assignment: it is the next one again."""
        async with self._changed:
            assignment = self._in_flight.pop(lane, None)
            if assignment is not None and assignment.key == key and key in self._lines:
                self._queue.appendleft(assignment)
            self._changed.notify_all()

    async def cause_of_death(self, lane: str, cause: str, blame: Blame) -> None:
        """A group of the lane died; a lane whose groups never get as far as taking a trial is given up."""
        self._blame(lane, cause, blame)
        deaths = self._deaths_since_take[lane] = self._deaths_since_take.get(lane, 0) + 1
        await self._give_up_after(deaths, lane, cause)

    async def run_lost(self, lane: str, cause: str, blame: Blame) -> bool:
        """The lane's Train run is over before its time, and its processes are gone. Answers whether to start another."""
        self._blame(lane, cause, blame)
        if lane in self._in_flight:
            self._after_lane_death(lane, self._in_flight[lane])
        runs = self._runs_since_take[lane] = self._runs_since_take.get(lane, 0) + 1
        await self._give_up_after(runs, lane, cause)
        async with self._changed:
            self._changed.notify_all()
        return lane not in self._lost and not self._closing

    async def no_room(self, lane: str) -> bool:
        """The cluster has none for the lane's processes, for now: what they ran is for others. Answers whether to try again."""
        if lane in self._in_flight:
            self._after_lane_death(lane, self._in_flight[lane])
        async with self._changed:
            self._changed.notify_all()
        return not self._closing

    def _blame(self, lane: str, cause: str, blame: Blame) -> None:
        """What ends after it was told to has not died of its trial, however it looked."""
        told = blame == "trial" and lane in self._leaving
        self._causes[lane], self._blames[lane] = cause, "machine" if told else blame

    async def _give_up_after(self, starts: int, lane: str, cause: str) -> None:
        if starts >= MAX_STARTS and lane not in self._lost:
            await self._lose(lane, f"its processes ended {starts} times before they took a trial: {cause}")

    async def _lose(self, lane: str, cause: str) -> None:
        self._lost[lane] = cause
        if lane in self._in_flight:
            self._after_lane_death(lane, self._in_flight[lane])
        async with self._changed:
            self._changed.notify_all()
        for line in self._lines.values():
            self._end_without_lanes(line)

    def _end_without_lanes(self, line: _Line) -> None:
        if len(self._lost) == self._num_lanes:
            last = list(self._lost.values())[-1]
            line.end(Message(outcome="no_lane", reason=f"no lane is left; the last one said: {last}"))

    async def outlook(self, lane: str, *, leaving: bool = False) -> Literal["go on", "closed", "hung"]:
        """For every rank to ask beside its work: closed when the study is over, hung when its trial has been silent too long,
        which ends that trial. Fails when the driver is gone, as the Switchboard is then too.

        leaving: the rank's process was told to end; its trial is to save a checkpoint and to stop.
        """
        if self._closing:
            return "closed"
        if leaving and lane not in self._leaving:
            self._leaving.add(lane)
            async with self._changed:
                self._changed.notify_all()
        silent = time.monotonic() - self._heard[lane] if lane in self._heard and lane in self._in_flight else 0.0
        if self._max_silent_seconds is None or silent <= self._max_silent_seconds:
            return "go on"
        line = self._lines.get(self._in_flight.pop(lane).key)
        if line is not None:
            limit = f"kill.max_silent_seconds ({self._max_silent_seconds:g})"
            line.end(
                Message(outcome="failed", reason=f"failed: it said nothing for {silent:.0f} s, longer than {limit}")
            )
        async with self._changed:
            self._changed.notify_all()
        return "hung"

    # For the driver's side

    async def device(self) -> str:
        """What the first lane that comes up runs on; empty where none will."""
        async with self._changed:
            await self._changed.wait_for(lambda: self._hosts or len(self._lost) == self._num_lanes)
        return next((host.device for host in self._hosts.values()), "")

    async def placement(self, lane: str) -> Any:
        """The placement group of the lane's last processes; None before it had any."""
        return self._placements.get(lane)

    async def assign(self, assignment: Assignment) -> None:
        """An earlier handing over of the same trial, whose relay was lost, ends with this one."""
        for key in [key for key, line in self._lines.items() if line.trial_id == assignment.trial_id]:
            await self.dismiss(key)
        self._lines[assignment.key] = line = _Line(assignment.trial_id)
        self._end_without_lanes(line)
        async with self._changed:
            self._queue.append(assignment)
            self._changed.notify_all()

    async def next_message(self, key: str) -> Message:
        """The trial's next message; asking for it with none unread is the verdict "go on" on the last one."""
        line = self._lines[key]
        if not line.messages:
            line.verdict.set()
        while not line.messages:
            line.arrived.clear()
            await line.arrived.wait()
        return line.messages.popleft()

    async def dismiss(self, key: str) -> None:
        """The trial is not wanted any more, for now: it stops at its next word, and keeps its checkpoint."""
        line = self._lines.pop(key, None)
        if line is not None:
            line.dismissed.set()
            line.verdict.set()
        self._queue = deque(waiting for waiting in self._queue if waiting.key != key)

    async def dismiss_all(self) -> None:
        for key in list(self._lines):
            await self.dismiss(key)

    async def until_idle(self) -> None:
        """Returns when no lane has an assignment."""
        async with self._changed:
            await self._changed.wait_for(lambda: not self._in_flight)

    async def close(self) -> None:
        """No more assignments: idle ranks return, and their Train runs end."""
        await self.dismiss_all()
        async with self._changed:
            self._closing = True
            self._changed.notify_all()

    def _after_lane_death(self, lane: str, assignment: Assignment) -> None:
        """The group that had this assignment is gone without a word about it."""
        del self._in_flight[lane]
        cause = self._causes.pop(lane, "its processes died without a message")
        blame = self._blames.pop(lane, "trial")
        line = self._lines.get(assignment.key)
        if line is None or line.closed:
            return
        deaths = assignment.lane_deaths + 1
        if blame == "machine":
            line.end(Message(outcome="interrupted", reason=f"interrupted: {cause}"))
        elif deaths < MAX_LANE_DEATHS:
            self._queue.appendleft(replace(assignment, lane_deaths=deaths))
        elif blame == "memory":
            line.end(_ran_out_of_memory())
        else:
            line.end(Message(outcome="failed", reason=f"failed: it ended its lane {deaths} times; last: {cause}"))


def _ran_out_of_memory() -> Message:
    what = "and ended its process; lower memory_limit, or see what else takes memory there"
    return Message(outcome="out_of_memory", reason=f"{HOST_RAN_OUT} {what}")
