"""How studies end whose stages find what no sentence about a winner can say: their trials train for real, without Ray."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from batchscout.orchestrator.output.results import Ending, finish
from batchscout.orchestrator.study.state import Study
from batchscout.orchestrator.study.trial import TrialState
from tests.support.real_player import run_for_real
from tests.support.studies import grid, tiny_study


def finished(run_dir: Path, **changes: Any) -> tuple[Study, Ending]:
    config = tiny_study(**changes)
    study = run_for_real(config, run_dir)
    return study, finish(config, run_dir, study)


def test_a_limit_in_which_nothing_fits_is_bad_input(tmp_path: Path) -> None:
    stages = [{"type": "frontier", "smallest": 64, "compile": [False], "activation_checkpointing": ["none"]}]
    _, ending = finished(tmp_path, stages=stages, memory_limit="1MiB", sample_budget=4096)
    assert ending.exit_code == 2
    assert "not even micro-batch 64 fits into memory_limit (1 MiB)" in ending.message
    assert "raise memory_limit" in ending.message


@pytest.mark.slow
def test_a_failed_probe_is_exit_code_1_though_no_recommendation_was_asked_for(tmp_path: Path) -> None:
    modes = {"type": "frontier", "activation_checkpointing": ["none", "full"], "compile": [False], "largest": 1}
    modes |= {"rounds": 1, "finalists": 1}
    study, ending = finished(tmp_path, model={"target": "tests.support.studies:BatchNormModel"}, stages=[modes])
    assert study.conclusions["frontier"].ok
    assert ending.exit_code == 1
    assert ": failed: " in ending.message.splitlines()[-1]
    assert "needs repeated blocks" in ending.message


EQUIVALENCE = {"type": "equivalence", "micro_batch_sizes": [8, 4], "steps": 3}


@pytest.mark.slow
def test_a_model_whose_batch_cannot_be_split_is_a_finding_with_the_number_and_the_study_goes_on(tmp_path: Path) -> None:
    stages = [EQUIVALENCE, *grid()]
    study, ending = finished(tmp_path, model={"target": "tests.support.studies:BatchNormModel"}, stages=stages)
    assert ending.exit_code == 0, ending.message
    rho = study.trials["equivalence-m4k4"].measured("rho")
    assert rho > 1e-3
    assert study.trials["equivalence-m8k2-permuted1"].measured("rho") < 1e-4
    evidence = json.loads((tmp_path / "recommendation.json").read_text())["evidence"]
    assert f"rho = {rho:.1e}" in evidence["stages"]["equivalence"]
    assert "1 BatchNorm layer," in evidence["stages"]["equivalence"]
    assert any("comparable where their micro-batch size is the same" in note for note in evidence["notes"])


def test_a_loss_that_is_no_sum_fails_the_study_with_the_numbers(tmp_path: Path) -> None:
    data = {"target": "tests.support.tiny:data", "kwargs": {"padded": True}}
    loss = "tests.support.studies:over_the_longest"
    study, ending = finished(tmp_path, data=data, loss=loss, stages=[EQUIVALENCE, *grid()])
    assert ending.exit_code == 1
    trial = study.trials["equivalence-m8k2"]
    assert trial.state is TrialState.COMPLETE, trial.reason
    ratio = trial.measured("parts_loss_ratio")
    assert f"the losses add up to {ratio:.3f} x and the num_targets add up to 1.000 x that of all in" in ending.message
    assert "grid" not in study.conclusions, "the study does not get past a stage that failed"
