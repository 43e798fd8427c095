"""Why no memory is predicted is said once for all modes that it holds for."""

from __future__ import annotations

from batchscout.orchestrator.stages.frontier.unpredicted import WHAT_FOLLOWS, unpredicted_texts
from batchscout.trainers.errors import NotFollowed, Obstacle

READS = NotFollowed(Obstacle.READS_VALUES, "item(), or a condition on a tensor", "model.py, line 7")
ENDED = NotFollowed(Obstacle.ENDED, "exit code 3: nothing said")


def test_a_reason_of_all_modes_names_none_of_them() -> None:
    assert unpredicted_texts({"none": READS, "full": READS}, 2) == [
        "memory cannot be predicted for this model: a training step of it reads a tensor's values (item(), or a condition on a "
        f"tensor, in model.py, line 7), and a prediction knows their shapes alone; {WHAT_FOLLOWS}"
    ]


def test_reasons_of_some_modes_name_theirs() -> None:
    said = unpredicted_texts({"none": READS, "full": ENDED}, 3)
    assert [text.partition(": ")[0] for text in said] == [
        "memory cannot be predicted for this model in 1 of 3 modes (none)",
        "memory cannot be predicted for this model in 1 of 3 modes (full)",
    ]
    assert "the process that followed a training step of it ended (exit code 3: nothing said)" in said[1]


def test_nothing_is_said_where_all_is_predicted() -> None:
    assert unpredicted_texts({}, 3) == []
