"""What Tune runs, beside a real Dispatcher."""

from __future__ import annotations

from typing import Any

import pytest

from batchscout.orchestrator.execution.dispatcher import MAX_STARTS, Dispatcher
from batchscout.orchestrator.execution.relay import LaneTrainable
from batchscout.orchestrator.study.messages import Assignment, Message

pytestmark = [pytest.mark.ray, pytest.mark.usefixtures("ray_cluster")]


def test_a_trial_whose_dispatcher_has_died_says_that_there_are_no_lanes() -> None:
    import ray

    dispatcher: Any = ray.remote(Dispatcher).options(name="dying", num_cpus=0).remote(1)
    handed_over, new = (relay(trial_id) for trial_id in "ab")
    ray.get([dispatcher.run_lost.remote("lane", "its node is gone", "machine") for _ in range(MAX_STARTS)])
    assert "its node is gone" in handed_over.step()["message"].reason
    ray.kill(dispatcher)
    for _ in ("it dies while it is asked", "nobody knows its name any more"):
        said = new.step()
        message: Message = said["message"]
        assert said["done"]
        assert message.outcome == "no_lane"
        assert message.reason.startswith("the process that hands trials to the lanes has died")
    handed_over.stop()  # has nobody to take its trial back from


def relay(trial_id: str) -> LaneTrainable:
    return LaneTrainable({"dispatcher": "dying", "assignment": Assignment(trial_id, "{}", "/nowhere", "token")})
