"""A study whose driver is killed, stopped with Ctrl-C or left without disk space, and run again by the same command."""

from __future__ import annotations

import json
import re
import resource
import shutil
import signal
import subprocess
from pathlib import Path

import pytest

from batchscout.orchestrator.stages.grid import GridFindings
from batchscout.orchestrator.study.events import Event
from batchscout.orchestrator.study.state import Study
from batchscout.trainers.notices import NoticeKind
from tests.faults.driver import PATIENCE_SECONDS, Driver, check_nothing_was_lost_or_doubled, decisions, has
from tests.support.damage import flipped
from tests.support.outcome import found_by
from tests.support.studies import TINY, grid

# Damage to storage is rare, and what a test of it takes is a whole study: it belongs to the third tier.
pytestmark = [pytest.mark.usefixtures("ray_cluster"), pytest.mark.timeout(600)]

# Slow enough to be caught in the act, and decided by nothing but losses.
STUDY = TINY | {
    "name": "resumed",
    "sample_budget": 512,
    "evaluations": 8,
    "kill": {"min_relative_throughput": None},
    "stages": grid(learning_rate=[1e-4, 1e-3, 3e-3], pruner={"type": "asha", "min_samples": 128}),
}
# How long a file of the driver may get, as on a disk with so much left.
NEARLY_FULL = (12_000, resource.RLIM_INFINITY)


def new_driver(folder: Path) -> Driver:
    import ray

    return Driver(folder, STUDY, ray.get_runtime_context().gcs_address)


def check_it_ends_as_undisturbed(driver: Driver, before: list[Event], undisturbed: Study) -> None:
    """Run again to the end: what was in the journal stays, and nothing is lost, doubled or decided otherwise."""
    driver.start()
    code, output = driver.end()
    assert code == 0, output
    assert driver.events()[: len(before)] == before
    check_nothing_was_lost_or_doubled(driver.events(), driver.study())
    for trial_id, trial in driver.study().trials.items():
        assert trial.state == undisturbed.trials[trial_id].state
        losses = [point["val_loss"] for point in trial.history]
        assert losses == [point["val_loss"] for point in undisturbed.trials[trial_id].history], "to the bit"
    recommended = json.loads((driver.run_dir / "recommendation.json").read_text())
    grid_found = found_by(undisturbed, GridFindings)
    assert recommended["learning_rate"] == undisturbed.trials[grid_found.winner].config.learning_rate


@pytest.fixture(scope="module")
def undisturbed_driver(tmp_path_factory: pytest.TempPathFactory, ray_cluster: None) -> Driver:
    driver = new_driver(tmp_path_factory.mktemp("undisturbed"))
    driver.start()
    code, output = driver.end()
    assert code == 0, output
    return driver


@pytest.fixture(scope="module")
def undisturbed(undisturbed_driver: Driver) -> Study:
    return undisturbed_driver.study()


@pytest.mark.ray
def test_kill_9_with_two_trials_paused_changes_nothing_and_while_it_ran_no_second_run_was_let_in(
    tmp_path: Path, undisturbed: Study
) -> None:
    driver = new_driver(tmp_path)
    driver.start()
    driver.wait_until(has("started"))
    second = subprocess.run(
        driver.command, capture_output=True, text=True, timeout=PATIENCE_SECONDS, env=driver.environment
    )
    assert second.returncode == 2
    assert re.search(r"another process \(process \d+ on .* is running the study", second.stderr)
    driver.wait_until(has("paused", 2))
    driver.send(signal.SIGKILL)
    before = driver.events()
    assert len(decisions(before)) >= 2
    check_it_ends_as_undisturbed(driver, before, undisturbed)


@pytest.mark.cluster
def test_without_its_journal_a_study_begins_again_and_takes_no_checkpoint_for_its_own(
    tmp_path: Path, undisturbed_driver: Driver, undisturbed: Study
) -> None:
    driver = new_driver(tmp_path)
    shutil.copytree(undisturbed_driver.run_dir, driver.run_dir)
    (driver.run_dir / "journal.jsonl").unlink()
    left = {path.parts[-3] for path in driver.run_dir.glob("trials/*/checkpoints/*.pt")}
    assert left
    check_it_ends_as_undisturbed(driver, [], undisturbed)
    notices = driver.study().notices
    assert notices.keys() == left
    assert {notice.kind for of_trial in notices.values() for notice in of_trial} == {NoticeKind.FOREIGN_CHECKPOINT}


@pytest.mark.cluster
def test_a_flipped_bit_in_a_checkpoint_changes_no_loss_and_is_told_in_the_report(
    tmp_path: Path, undisturbed_driver: Driver, undisturbed: Study
) -> None:
    driver = new_driver(tmp_path)
    shutil.copytree(undisturbed_driver.run_dir, driver.run_dir)
    trial_id = forget_the_last_end(driver.run_dir / "journal.jsonl")
    before = driver.events()
    (checkpoint,) = (driver.run_dir / "trials" / trial_id / "checkpoints").glob("*.pt")
    content = checkpoint.read_bytes()
    checkpoint.write_bytes(flipped(content, 8 * (len(content) // 2)))
    check_it_ends_as_undisturbed(driver, before, undisturbed)
    ((_, (notice,)),) = driver.study().notices.items()
    assert notice.kind is NoticeKind.DAMAGED_CHECKPOINT
    assert f"{trial_id}: {notice.text}" in (driver.run_dir / "report.html").read_text()


def forget_the_last_end(journal: Path) -> str:
    """Cut the journal before the last trial that completed; returns its id."""
    lines = journal.read_bytes().splitlines(keepends=True)
    number = max(i for i, line in enumerate(lines) if b'"ended"' in line and b'"complete"' in line)
    journal.write_bytes(b"".join(lines[:number]))
    return json.loads(lines[number])["id"]


@pytest.mark.cluster
def test_a_full_disk_and_then_ctrl_c_stop_the_study_clearly_and_it_goes_on(tmp_path: Path, undisturbed: Study) -> None:
    driver = new_driver(tmp_path)  # its data are tokenized since the undisturbed run
    driver.start(preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, NEARLY_FULL))
    code, output = driver.end()
    assert code == 1, output
    assert re.search(rf"{driver.run_dir}\S* could not be written: File too large\. Nothing is lost", output), output
    assert "run the same command again" in output
    assert "Traceback" not in output
    before = driver.events()
    assert has("started")(before)
    driver.start()  # there is room again
    driver.wait_until(lambda events: has("evaluated", 2)(events[len(before) :]))
    code, output = driver.send(signal.SIGINT)
    assert code == 130, output
    assert "run the same command again" in output
    assert "Traceback" not in output
    assert driver.events()[: len(before)] == before
    check_it_ends_as_undisturbed(driver, driver.events(), undisturbed)


@pytest.mark.cluster
def test_a_study_whose_directory_is_deleted_halts_and_says_so(tmp_path: Path) -> None:
    driver = new_driver(tmp_path)
    driver.start()
    driver.wait_until(has("evaluated"))
    away = driver.run_dir.rename(tmp_path / "away")  # at once: a checkpoint may be written while a folder is emptied
    shutil.rmtree(away)
    code, output = driver.end()
    assert code == 1, output
    assert f"{driver.run_dir}/journal.jsonl was deleted, moved or replaced while the study ran" in output
    assert "Traceback" not in output
    assert not (driver.run_dir / "report.html").exists()
