"""What a study's state says of its trials."""

from __future__ import annotations

from typing import Any

import pytest

from batchscout.orchestrator.config.trial import base_trial
from batchscout.orchestrator.study.events import StageBegan, proposed
from batchscout.orchestrator.study.state import Study
from batchscout.orchestrator.study.trial import Proposal
from tests.support.example_study import example_config, tell


@pytest.mark.parametrize(
    ("changes", "are_rivals"),
    [
        ({"micro_batch_size": 2, "gradient_accumulation_steps": 4}, True),
        ({"activation_checkpointing": "full"}, True),
        ({"memory_knobs": ("bfloat16_weights",)}, True),
        ({"model": {"target": "gpt", "kwargs": {"cross_entropy": "chunked"}}}, True),
        ({"micro_batch_size": 16}, False),
        ({"learning_rate": 1e-4}, False),
        ({"seed": 1}, False),
    ],
)
def test_who_runs_a_batch_in_another_way_is_a_rival_in_speed(changes: dict[str, Any], are_rivals: bool) -> None:
    config, study = example_config(), Study("rivals")
    tell(study, StageBegan(stage="grid"))
    one = base_trial(config, None).model_copy(update={"micro_batch_size": 8, "gradient_accumulation_steps": 1})
    one = type(one).model_validate(one.model_dump() | {"model": {"target": "gpt", "kwargs": {}}})
    for name, trial in {"one": one, "other": type(one).model_validate(one.model_dump() | changes)}.items():
        tell(study, proposed(Proposal(name, "grid", trial, candidate=name)))
    found = [rival.id for rival in study.speed_rivals(study.trials["one"])]
    assert found == (["other"] if are_rivals else [])
