"""How many lanes a study is to have now, where an autoscaler starts and ends nodes. Pure: a decision is a value with its reason."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from batchscout.orchestrator.decisions.director import Wanted
from batchscout.orchestrator.units import counted


@dataclass(frozen=True)
class OpenLane:
    """A lane that has been opened, and neither released nor given up."""

    name: str
    idle_seconds: float | None = None
    """How long it has had no trial, its start included; None while it has one."""
    node: str = ""
    """The host of its rank 0; empty while it starts, and so takes nothing of a node yet."""


@dataclass(frozen=True)
class ScalingState:
    """What a decision goes by."""

    wanted: Wanted
    lanes: Sequence[OpenLane]
    room: int
    """The lanes that the nodes hold which are there."""
    most: int
    """The lanes that the nodes hold which there may be at once, without those that were given up."""
    idle_release_seconds: float
    """How long a lane may be idle that trials may yet come for."""


@dataclass(frozen=True)
class Growth:
    """What is to be done."""

    open: int = 0
    """How many lanes to open now."""
    ask: int = 0
    """For how many lanes in all the autoscaler is to have room; 0: for no more than there is, and nodes that are idle may go."""
    release: tuple[str, ...] = ()
    """Lanes that are to end."""
    reason: str = ""
    """For people; empty where there is nothing to do."""


def decide(state: ScalingState) -> Growth:
    """Return what brings the lanes to as many as there are trials for, and no further than nodes may hold them."""
    useful = min(state.wanted.num_trials, state.most)
    spare = len(state.lanes) - useful
    if spare > 0:
        return _released(state, spare)
    opened = max(0, min(useful, state.room) - len(state.lanes))
    # A node that has come is idle, and might end, until its lane has taken it.
    has_all = useful <= min(state.room, sum(bool(lane.node) for lane in state.lanes))
    ask = 0 if has_all else useful
    return Growth(opened, ask, (), _why_more(state, useful, opened, ask))


def _released(state: ScalingState, spare: int) -> Growth:
    """Give back lanes that no trial needs: at once if none can come for them, and else those that have waited long enough."""
    least = 0.0 if not state.wanted.more_may_come else state.idle_release_seconds
    idle = [lane for lane in state.lanes if lane.idle_seconds is not None and lane.idle_seconds >= least]
    busy = Counter(lane.node for lane in state.lanes if lane.idle_seconds is None)
    # First those that have no node, or have lost it: trials would wait for them. A node goes only once it has no lane, so
    # those beside trials go last.
    idle.sort(key=lambda lane: (bool(lane.node), busy[lane.node], -(lane.idle_seconds or 0.0), lane.name))
    released = tuple(lane.name for lane in idle[:spare])
    if not released:
        return Growth()
    return Growth(release=released, reason=_why_fewer(state, len(released)))


def _why_fewer(state: ScalingState, num_released: int) -> str:
    have, them = ("has", "it") if num_released == 1 else ("have", "them")
    lanes = counted(num_released, "lane")
    if state.wanted.more_may_come:
        return f"{lanes} {have} had no trial for {state.idle_release_seconds:g} s (placement.idle_release_seconds)"
    return f"no trial is left for {them}: {lanes} given back"


def _why_more(state: ScalingState, useful: int, opened: int, ask: int) -> str:
    runnable = f"{counted(state.wanted.num_trials, 'trial')} can run"
    if useful > state.room:
        return f"{runnable} and the nodes hold {counted(state.room, 'lane')}: the autoscaler is asked for room for {useful}"
    if opened:
        return f"{runnable}, and the nodes hold {counted(state.room, 'lane')}"
    return "a lane that starts is waited for" if ask else ""
