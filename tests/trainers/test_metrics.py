"""The table of metrics: a name that is read is in it, and so is one that is told."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import get_args

import pytest

from batchscout.orchestrator.config.stages import StageKeys
from batchscout.orchestrator.config.trial import base_trial
from batchscout.orchestrator.output.comparison import MEASURED
from batchscout.orchestrator.stages import stage_of
from batchscout.orchestrator.study.trial import Proposal, Trial
from batchscout.trainers.metrics import METRICS, metric_of
from tests.support.example_study import example_config
from tests.support.outcome import GOLDEN


def test_a_name_that_is_not_in_the_table_is_an_error_with_the_nearest() -> None:
    trial = Trial(Proposal("grid-a", "grid", base_trial(example_config(), None), candidate="grid-a"))
    assert trial.metric("val_loss") is None
    for read in (trial.metric, trial.measured, metric_of):
        with pytest.raises(KeyError, match="no metric 'val_los'; did you mean val_loss"):
            read("val_los")


def test_what_is_shown_anywhere_is_in_the_table() -> None:
    stages = [stage_of(keys()) for keys in get_args(StageKeys)]
    shown = {name for stage in stages for name in stage.columns} | {*MEASURED}
    assert shown <= METRICS.keys()


def test_what_golden_studies_were_told_is_in_the_table() -> None:
    lines = [json.loads(line) for path in GOLDEN.rglob("journal.jsonl") for line in path.read_text().splitlines()]
    told = {name for line in lines for key in ("metrics", "expected") for name in line.get(key) or ()}
    assert len(told) > 20
    assert told <= METRICS.keys()


def test_numbers_are_told_in_the_unit_that_stands_beside_them() -> None:
    assert METRICS["peak_memory_bytes"].text(86 * 2**20) == "86 MiB"
    assert METRICS["step_seconds"].text(0.0123) == "12.3 ms"
    assert METRICS["mfu"].text(0.4567) == "45.7 %"
    assert replace(METRICS["mfu"], unit="").text(0.4567) == "45.7"
    for name, metric in METRICS.items():
        assert metric.meaning.endswith("."), name
        assert (metric.per_unit == 1) or metric.unit, name


def test_a_loss_is_told_with_as_many_digits_as_tell_it_apart() -> None:
    loss, gap = metric_of("val_loss"), metric_of("generalisation_gap")
    assert [loss.number(value) for value in (5.0944, 0.00022, 3520398.0, 0.0)] == [
        "5.094",
        "0.00022",
        "3.52e+06",
        "0.000",
    ]
    assert metric_of("coherence").number(0.084) == "0.084", "which is no loss"
    assert [gap.number(value) for value in (0.2042, -0.000222)] == ["+0.2", "-0.00022"]
