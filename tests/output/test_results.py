"""How a study ends: the exit code that a script sees, the sentence that a person reads, and the files."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from batchscout.orchestrator.config.keys import StudyConfig
from batchscout.orchestrator.output.results import finish
from batchscout.orchestrator.output.status import print_status
from batchscout.orchestrator.stages.equivalence import EquivalenceFindings
from batchscout.orchestrator.stages.train import TrainFindings
from batchscout.orchestrator.study.causes import Cause
from batchscout.orchestrator.study.events import Concluded
from batchscout.orchestrator.study.state import Study
from batchscout.orchestrator.study.trial import TrialState
from tests.support.example_study import add_trial, conclude, end_trial, example_config, tell


def training_study(*, with_winner: bool) -> tuple[StudyConfig, Study]:
    config = example_config(stages=[{"type": "train"}])
    study = Study(config.name)
    add_trial(study, config, "train-m1")
    end_trial(study, "train-m1", 1.0, {"val_loss": 3.0})
    if with_winner:
        conclude(study, TrainFindings("train-m1", 3.0), "train-m1 is best")
    return config, study


def test_a_recommendation_is_success_and_leaves_both_files(tmp_path: Path) -> None:
    config, study = training_study(with_winner=True)
    ending = finish(config, tmp_path, study)
    assert ending.exit_code == 0
    assert ending.text("run").startswith("Train with  micro-batch 1,")
    assert {path.name for path in tmp_path.iterdir()} == {"recommendation.json", "report.html"}


def test_a_study_that_trains_and_recommends_nothing_is_no_success(tmp_path: Path) -> None:
    config, study = training_study(with_winner=False)
    ending = finish(config, tmp_path, study)
    assert (ending.exit_code, ending.message) == (1, "the study has no result yet")
    assert {path.name for path in tmp_path.iterdir()} == {"report.html"}


def test_the_star_in_the_status_is_at_the_trial_that_the_stage_chose(capsys: pytest.CaptureFixture[str]) -> None:
    """Not at the lowest loss: two batches may be alike, and one of them be chosen for another reason."""
    config, study = training_study(with_winner=False)
    add_trial(study, config, "train-m2")
    end_trial(study, "train-m2", 1.0, {"val_loss": 2.9})
    for winner, starred in ((None, "train-m2"), ("train-m1", "train-m1")):
        if winner is not None:
            conclude(study, TrainFindings(winner, 3.0), f"{winner} is best")
        print_status(config, study, is_driven=True)
        (line,) = [line for line in capsys.readouterr().out.splitlines() if line.startswith("*")]
        assert line.split()[1] == starred


def test_of_the_splits_of_one_batch_none_has_a_star(capsys: pytest.CaptureFixture[str]) -> None:
    config = example_config(stages=[{"type": "equivalence"}])
    study = Study(config.name)
    add_trial(study, config, "equivalence-m1")
    end_trial(study, "equivalence-m1", 1.0, {"tokens_per_second": 10.0})
    print_status(config, study, is_driven=True)
    printed = capsys.readouterr().out
    assert "  equivalence-m1 " in printed
    assert "* " not in printed


def test_a_study_that_trains_nothing_needs_no_recommendation(tmp_path: Path) -> None:
    config = example_config(stages=[{"type": "equivalence"}])
    study = Study(config.name)
    conclude(study, EquivalenceFindings(1e-4, {}), "all splits are the same")
    ending = finish(config, tmp_path, study)
    assert (ending.exit_code, ending.message) == (0, "equivalence: all splits are the same")


@pytest.mark.parametrize(("bad_input", "code"), [(True, 2), (False, 1)])
def test_a_failed_stage_says_whether_the_input_was_at_fault(tmp_path: Path, bad_input: bool, code: int) -> None:
    config, study = training_study(with_winner=False)
    tell(study, Concluded(stage="train", ok=False, reason="nothing fits", bad_input=bad_input))
    ending = finish(config, tmp_path, study)
    assert ending.exit_code == code
    assert ending.message == (
        "train: nothing fits\nNo trial failed. Where code or data are to blame, run the same command again: the stage train runs again "
        "once your code or data have changed (or at once, with --retry-failed); a changed study file needs another --dir"
    )


def test_failed_trials_are_no_success_and_are_named_with_their_reason(tmp_path: Path) -> None:
    config, study = training_study(with_winner=True)
    add_trial(study, config, "train-m2")
    end_trial(study, "train-m2", 1.0, {}, TrialState.FAILED, Cause.FAILED, "my own mistake")
    ending = finish(config, tmp_path, study)
    assert ending.exit_code == 1
    assert ending.message.splitlines()[-1] == (
        "train-m2: failed: my own mistake. Fix it, and run the same command with --keep-finished: what failed runs again, and what has ended "
        "is kept as it is, of the code and data before (where there is nothing to fix: --retry-failed)"
    )


def test_of_several_failures_the_first_is_named_with_its_log(tmp_path: Path) -> None:
    config, study = training_study(with_winner=False)
    for name in ("train-m2", "train-m4"):
        add_trial(study, config, name)
        end_trial(study, name, 1.0, {}, TrialState.FAILED, Cause.FAILED, "my own mistake")
    log = tmp_path / "trials" / "train-m2" / "error-rank0.log"
    log.parent.mkdir(parents=True)
    log.write_text("Traceback")
    for age, name in enumerate(("crash-rank0-9.log", "crash-rank0-1.log", "crash-rank0-5.log")):
        crash = log.with_name(name)
        crash.write_text("Fatal Python error")
        os.utime(crash, (100 - age, 100 - age))
    last = finish(config, tmp_path, study).message.splitlines()[-1]
    expected = f"2 trials failed, the first of them train-m2: failed: my own mistake. Its log: {log}. Fix it"
    assert last.startswith(expected)
    log.unlink()
    assert f"Its log: {log.with_name('crash-rank0-9.log')}." in finish(config, tmp_path, study).message, (
        "the last crash"
    )
