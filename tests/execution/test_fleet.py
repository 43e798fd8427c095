"""Lanes that come and go, where what tells of them is gone: the study ends with a word, and does not wait for ever."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
import ray
from ray.exceptions import RayActorError

from batchscout.orchestrator.decisions.director import Wanted
from batchscout.orchestrator.execution.fleet import ClusterResources, Fleet
from batchscout.orchestrator.execution.nodes.node_kinds import Choice, Node
from batchscout.orchestrator.execution.nodes.placement import LaneShape
from batchscout.orchestrator.study.state import Halted
from tests.support.processes import until

pytestmark = [pytest.mark.ray, pytest.mark.usefixtures("ray_cluster")]


@ray.remote(num_cpus=0)
class TellsOfNoLanes:
    """A Dispatcher before its first lane."""

    async def lanes(self) -> dict[str, object]:
        return {}


def is_dead(dispatcher: Any) -> bool:
    """Whether it answers no more: it may do so for a moment after it was killed."""
    try:
        ray.get(dispatcher.lanes.remote())
    except RayActorError:
        return True
    return False


def never() -> str:
    raise AssertionError("a lane was opened that nobody could tell of")


def test_a_dispatcher_that_has_died_ends_the_study_with_a_word() -> None:
    dispatcher: Any = TellsOfNoLanes.remote()
    assert ray.get(dispatcher.lanes.remote()) == {}
    ray.kill(dispatcher)
    until(lambda: is_dead(dispatcher), "the dispatcher has died", 60)
    ground = ClusterResources(LaneShape(1, 1, 1, use_gpu=False), Choice((Node("a", 1),)), idle_release_seconds=60.0)
    fleet = Fleet(ground, dispatcher, never, print, seconds_to_recover=0.5)

    def is_told() -> bool:
        with contextlib.suppress(Halted):
            fleet.hear(Wanted(1, more_may_come=True))
            return False
        return True

    fleet.start()
    until(is_told, "the study is told", 60)
    with pytest.raises(Halted, match=r"no lane could be opened or given back for 0\.5 s: The actor died"):
        fleet.hear(Wanted(1, more_may_come=True))
