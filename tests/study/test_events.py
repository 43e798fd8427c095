"""What an event says of the lane that it came from, as it stands in the journal."""

from __future__ import annotations

import json

import pytest

from batchscout.orchestrator.study.events import Interrupted, parser
from batchscout.orchestrator.study.messages import Device, HeldLane

H100, A100 = Device("NVIDIA H100", 80 << 30, is_gpu=True), Device("NVIDIA A100", 40 << 30, is_gpu=True)


def written(lane: HeldLane | None) -> dict[str, object]:
    return json.loads(Interrupted(id="a", reason="", seconds=1.0, lane=lane).model_dump_json())


@pytest.mark.parametrize(
    "lane", [None, HeldLane(0, "a"), HeldLane(1, "a", (H100,)), HeldLane(0, "a", (H100, A100), ("a", "b"))]
)
def test_where_it_was_measured_is_read_back_as_it_was_written(lane: HeldLane | None) -> None:
    event = parser.validate_python(written(lane))
    assert isinstance(event, Interrupted)
    assert event.lane == lane
