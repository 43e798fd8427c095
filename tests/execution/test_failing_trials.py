"""A study on real Ray whose trials fail in every way: each fails alone, and the study goes on."""

from __future__ import annotations

from pathlib import Path

import pytest

from batchscout.orchestrator.run import RunOptions, run_study
from batchscout.orchestrator.study.journal import replay
from batchscout.orchestrator.study.run_directory import logs_of
from batchscout.orchestrator.study.trial import Trial, TrialState
from batchscout.trainers.notices import NoticeKind
from tests.support.processes import kernel_tells
from tests.support.studies import grid, tiny_study
from tests.support.study_runs import Ran, run

# A fixture is a whole study, and the first test that asks for it waits for it.
pytestmark = [pytest.mark.cluster, pytest.mark.usefixtures("ray_cluster"), pytest.mark.timeout(900)]

RAISES, DIES_ONCE, CRASHES_TWICE, HANGS, EXITS, WELL = 8, 4, 2, 1, 32, 16
MAX_SILENT_SECONDS = 60
"""Silence counts from when a lane takes a trial: a lane's own start is none, and building a model takes a second or two. On a machine that is
busy with other tests it has taken 25."""


@pytest.fixture(scope="module")
def failures(tmp_path_factory: pytest.TempPathFactory, ray_cluster: None) -> Ran:
    """Trials told apart by the size of their micro-batch, of which the last one is well. On two lanes, of which one waits for what
    hangs while the other takes the rest."""
    folder = tmp_path_factory.mktemp("failures")
    faults = {RAISES: ("raises", 1), HANGS: ("hangs", 1), DIES_ONCE: ("dies once", 1)}
    faults |= {CRASHES_TWICE: ("crashes twice", 2), EXITS: ("exits", 1)}
    kwargs = {"faults": {str(size): fault for size, fault in faults.items()}, "folder": str(folder)}
    model = {"target": "tests.support.studies:Misbehaves", "kwargs": kwargs}
    kill = {"max_silent_seconds": MAX_SILENT_SECONDS, "min_relative_throughput": None}
    lanes = {"lanes": 2, "cpus_per_rank": 1}
    return run(folder, model=model, kill=kill, placement=lanes, stages=grid(micro_batch_size=[*faults, WELL]))


def with_size(ran: Ran, size: int) -> Trial:
    return next(trial for trial in ran.study.trials.values() if trial.config.micro_batch_size == size)


def test_after_failures_the_study_goes_on_and_its_exit_code_is_1(failures: Ran) -> None:
    assert [*failures.study.trials][-1] == with_size(failures, WELL).id
    assert with_size(failures, WELL).state is TrialState.COMPLETE
    assert failures.study.conclusions["grid"].ok
    assert failures.ending.exit_code == 1, "failures that are no results"
    assert failures.ending.text("run").startswith("Train with  micro-batch ")
    assert "4 trials failed, the first of them " in failures.ending.message


def test_an_error_in_the_users_code_fails_its_trial_with_its_traceback(failures: Ran) -> None:
    trial = with_size(failures, RAISES)
    assert trial.state is TrialState.FAILED
    assert trial.explanation == "failed: ArithmeticError: my own mistake"
    log = (failures.run_dir / "trials" / trial.id / "error-rank0.log").read_text()
    assert 'studies.py", line' in log
    assert "ArithmeticError: my own mistake" in log
    assert "my own mistake" in failures.ending.message


def test_a_trial_goes_on_from_its_checkpoint_after_its_lane_died_once(failures: Ran) -> None:
    trial = with_size(failures, DIES_ONCE)
    assert trial.state is TrialState.COMPLETE, trial.reason
    assert [point["samples_seen"] for point in trial.history] == [32, 64, 96, 128]
    assert (failures.log.parent / "dies once").read_text() == "x"


@pytest.mark.parametrize("size", [DIES_ONCE, CRASHES_TWICE])
def test_a_death_that_a_trial_survives_is_told_with_its_cause(failures: Ran, size: int) -> None:
    trial = with_size(failures, size)
    (notice,) = failures.study.notices[trial.id]
    assert notice.kind is NoticeKind.LANE_DIED
    if kernel_tells():
        assert f"rank 0 was killed by {'SIGKILL' if size == DIES_ONCE else 'SIGSEGV'}" in notice.text
    stacks = [log for log in logs_of(failures.run_dir, trial.id) if f"(its stack is in {log})" in notice.text]
    assert len(stacks) == (size == CRASHES_TWICE)
    assert all('studies.py", line' in log.read_text() for log in stacks)


def test_a_trial_under_which_its_lane_died_twice_is_failed_and_names_its_stack(failures: Ran) -> None:
    trial = with_size(failures, CRASHES_TWICE)
    assert trial.state is TrialState.FAILED
    logs = logs_of(failures.run_dir, trial.id)
    how = "was killed by SIGSEGV" if kernel_tells() else "crashed"
    last = f"it ended its lane 2 times; last: rank 0 {how} (its stack is in "
    assert trial.reason in [f"{last}{log})" for log in logs]
    assert all('studies.py", line' in log.read_text() for log in logs)
    assert (failures.log.parent / "crashes twice").read_text() == "xx"


def test_a_trial_that_calls_sys_exit_is_failed_with_the_status_and_where(failures: Ran) -> None:
    trial = with_size(failures, EXITS)
    assert trial.state is TrialState.FAILED
    assert trial.explanation == "failed: exited with status 3 (sys.exit)"
    assert "SystemExit: 3" in (failures.run_dir / "trials" / trial.id / "error-rank0.log").read_text()


def test_a_trial_that_hangs_is_failed(failures: Ran) -> None:
    trial = with_size(failures, HANGS)
    assert trial.state is TrialState.FAILED
    assert trial.explanation.startswith("failed: it said nothing for ")
    assert trial.reason.endswith(f"longer than kill.max_silent_seconds ({MAX_SILENT_SECONDS})")
    assert trial.history[-1]["samples_seen"] == 32, "it hung long after its start"


def test_what_failed_runs_again_when_the_user_asks_and_the_study_ends_well(home: Path) -> None:
    (home / "marks").mkdir()
    kwargs = {"faults": {str(RAISES): ("raises", 1)}, "folder": "marks"}
    model = {"target": "tests.support.studies:Misbehaves", "kwargs": kwargs}
    first = run(home, model=model, stages=grid(micro_batch_size=[RAISES, WELL]))
    assert first.ending.exit_code == 1
    assert (home / "marks" / "raises").read_text() == "x", "a relative path is the same to ranks as to the checks"
    assert first.ending.message.endswith("(where there is nothing to fix: --retry-failed)")
    (trial,) = [trial for trial in first.study.trials.values() if trial.state is TrialState.FAILED]
    config = tiny_study(**first.changes)
    assert run_study(config, first.run_dir, RunOptions(quiet=True)) == first.ending, "nothing has changed"
    assert run_study(config, first.run_dir, RunOptions(quiet=True, retry_failed=True)).exit_code == 0
    study = replay(first.run_dir / "journal.jsonl", config.name)
    assert study.trials[trial.id].state is TrialState.COMPLETE
    assert study.trials[trial.id].explanation == "tried again; before it failed: ArithmeticError: my own mistake"
    assert (first.run_dir / "trials" / trial.id / "try1-error-rank0.log").exists()
    before, after = first.study.trials[with_size(first, WELL).id], study.trials[with_size(first, WELL).id]
    assert after == before
