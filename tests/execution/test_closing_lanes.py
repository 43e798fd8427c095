"""Lanes end when the study does, whatever they are at."""

from __future__ import annotations

import threading
import time
from pathlib import Path

import pytest

from batchscout.orchestrator.execution import lanes
from batchscout.orchestrator.execution.nodes.placement import LaneShape
from batchscout.orchestrator.study.messages import FirstLane
from batchscout.orchestrator.study.state import Halted

pytestmark = [pytest.mark.ray, pytest.mark.usefixtures("ray_cluster")]

NUM_CPUS_OF_NOBODY = 1000


@pytest.mark.parametrize("seconds_to_close", [lanes.SECONDS_TO_CLOSE, 0])
def test_a_lane_that_waits_for_room_outlives_no_study(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seconds_to_close: float
) -> None:
    """Though the Dispatcher, which may still start, has not answered. Its thread would call Ray after the connection is closed, which ends the driver before its last word."""
    import ray
    from ray._private.state import state

    monkeypatch.setattr(lanes, "SECONDS_TO_GO_HOME", 1)
    monkeypatch.setattr(lanes, "SECONDS_TO_CLOSE", seconds_to_close)
    before = {*threading.enumerate()}
    shape = LaneShape(num_lanes=2, world_size=1, cpus_per_rank=NUM_CPUS_OF_NOBODY, use_gpu=False)

    def controllers() -> list[str]:
        job = ray.JobID.from_hex(ray.get_runtime_context().get_job_id())
        alive = state.actor_table(None, job_id=job, actor_state_name="ALIVE").values()
        return [one["ActorID"] for one in alive if one["ActorClassName"] == "TrainController"]

    earlier = controllers()
    with lanes.open_lanes(shape, lanes.Workplace(tmp_path), print):
        keepers = [one for one in threading.enumerate() if one not in before and "keep_alive" in one.name]
        while len(controllers()) < len(earlier) + 2:
            time.sleep(0.1)
    assert len(keepers) == 2
    assert not any(keeper.is_alive() for keeper in keepers)


def test_whoever_waits_for_a_lane_that_finds_no_room_hears_that_the_study_is_lost(tmp_path: Path) -> None:
    """Its directory may be gone: without a lane there is no trial, and nothing is journaled that would find that out."""
    shape = LaneShape(num_lanes=1, world_size=1, cpus_per_rank=NUM_CPUS_OF_NOBODY, use_gpu=False)

    def raise_if_lost() -> None:
        raise Halted("the directory is gone")

    with lanes.open_lanes(shape, lanes.Workplace(tmp_path), print) as opened, pytest.raises(Halted):
        opened.first(raise_if_lost)


def test_a_study_none_of_whose_lanes_comes_up_stops_before_it_has_read_or_proposed_anything() -> None:
    """What it would read of the machine may be what was amiss with it, and holds for all that follows."""
    import ray

    class GivenUp:
        def first_lane(self) -> FirstLane:
            return FirstLane()

        def given_up(self) -> list[str]:
            return ["another cause", "torch can use no GPU there"]

    dispatcher = ray.remote(GivenUp).options(num_cpus=0).remote()
    with pytest.raises(Halted, match=r"every lane has failed, the last one because torch can use no GPU there$"):
        lanes.Lanes(dispatcher, "of no relay").first()
