"""A study whose driver is killed, or stopped with Ctrl-C, and run again by the same command."""

from __future__ import annotations

import json
import os
import re
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from orchestrator.journal import read_records, replay
from orchestrator.study import Study, TrialState
from tests.studies import TINY, grid

pytestmark = [pytest.mark.ray, pytest.mark.usefixtures("ray_cluster")]

# Slow enough to be caught in the act, and decided by nothing but losses.
STUDY = TINY | {
    "name": "resumed",
    "sample_budget": 512,
    "evaluations": 8,
    "kill": {"min_relative_throughput": None},
    "stages": grid(learning_rate=[1e-4, 1e-3, 3e-3], pruner={"type": "asha", "min_samples": 128}),
}
DECISIONS = ("promoted", "paused", "ended", "conclusion")
PATIENCE_SECONDS = 180


class Driver:
    """`batchscout run` in a process of its own, on the session's cluster."""

    def __init__(self, folder: Path) -> None:
        import ray

        (folder / "study.yaml").write_text(yaml.safe_dump(STUDY))
        self.run_dir = folder / "run"
        self._command = [
            sys.executable, "-m", "orchestrator", "run", str(folder / "study.yaml"), "--dir", str(self.run_dir),
            "--address", ray.get_runtime_context().gcs_address,
        ]  # fmt: skip
        self._process: subprocess.Popen[str] | None = None

    def start(self, max_file_bytes: int = resource.RLIM_INFINITY) -> None:
        """max_file_bytes: how long a file of the driver may get, as on a disk that is nearly full."""
        limits = (max_file_bytes, resource.RLIM_INFINITY)
        self._process = subprocess.Popen(
            self._command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=os.environ.copy(),
            preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, limits),
        )  # fmt: skip

    def wait_until(self, condition: Callable[[list[dict[str, Any]]], bool]) -> None:
        """Until the journal says so."""
        assert self._process is not None
        deadline = time.monotonic() + PATIENCE_SECONDS
        while not condition(self.records()):
            assert self._process.poll() is None, self._process.communicate()[0]
            assert time.monotonic() < deadline, "the study did not get there"
            time.sleep(0.05)

    def send(self, number: signal.Signals) -> tuple[int, str]:
        assert self._process is not None
        self._process.send_signal(number)
        return self.end()

    def end(self) -> tuple[int, str]:
        """(exit code, output)"""
        assert self._process is not None
        output, _ = self._process.communicate(timeout=PATIENCE_SECONDS)
        return self._process.returncode, output

    def records(self) -> list[dict[str, Any]]:
        return read_records(self.run_dir / "journal.jsonl")[0]

    def study(self) -> Study:
        return replay(self.run_dir / "journal.jsonl", "resumed")


def decisions(records: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [record for record in records if record["kind"] in DECISIONS]


def has(kind: str, count: int = 1) -> Callable[[list[dict[str, Any]]], bool]:
    return lambda records: sum(record["kind"] == kind for record in records) >= count


def check_nothing_was_lost_or_doubled(driver: Driver) -> None:
    """No trial ended twice, no evaluation made twice, and none missing."""
    records = driver.records()
    ended = [record["id"] for record in records if record["kind"] == "ended"]
    assert len(ended) == len(set(ended))
    for trial in driver.study().trials.values():
        seen = [point["samples_seen"] for point in trial.history]
        assert seen == [64 * (i + 1) for i in range(len(seen))]
        if trial.state is TrialState.COMPLETE:
            assert len(seen) == 8


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory, ray_cluster: None) -> Study:
    driver = Driver(tmp_path_factory.mktemp("undisturbed"))
    driver.start()
    code, output = driver.end()
    assert code == 0, output
    return driver.study()


@pytest.mark.parametrize(
    "moment",
    [has("result", 1), has("paused", 2), has("promoted", 2)],
    ids=["in the first trial", "with two trials paused", "after a promotion"],
)
def test_kill_9_of_the_driver_changes_no_decision_and_no_loss(
    tmp_path: Path, undisturbed: Study, moment: Callable[[list[dict[str, Any]]], bool]
) -> None:
    driver = Driver(tmp_path)
    driver.start()
    driver.wait_until(moment)
    driver.send(signal.SIGKILL)
    before = driver.records()
    driver.start()
    code, output = driver.end()
    assert code == 0, output
    assert decisions(driver.records())[: len(decisions(before))] == decisions(before)
    check_nothing_was_lost_or_doubled(driver)
    for trial_id, trial in driver.study().trials.items():
        assert trial.state == undisturbed.trials[trial_id].state
        losses = [point["val_loss"] for point in trial.history]
        assert losses == [point["val_loss"] for point in undisturbed.trials[trial_id].history], "to the bit"
    recommended = json.loads((driver.run_dir / "recommendation.json").read_text())
    assert recommended["learning_rate"] == undisturbed.trials[undisturbed.value("grid", "winner")].config.learning_rate


def test_ctrl_c_stops_cleanly_says_how_to_go_on_and_loses_nothing(tmp_path: Path) -> None:
    driver = Driver(tmp_path)
    driver.start()
    driver.wait_until(has("result", 2))
    code, output = driver.send(signal.SIGINT)
    assert code == 130, output
    assert "run the same command again" in output
    assert "Traceback" not in output
    driver.start()
    code, output = driver.end()
    assert code == 0, output
    check_nothing_was_lost_or_doubled(driver)


def test_a_second_run_in_the_same_directory_is_refused_while_the_first_goes_on(tmp_path: Path) -> None:
    driver = Driver(tmp_path)
    driver.start()
    driver.wait_until(has("result", 1))
    second = subprocess.run(driver._command, capture_output=True, text=True, timeout=PATIENCE_SECONDS)
    assert second.returncode == 2
    assert "another process is running the study" in second.stderr
    driver.send(signal.SIGKILL)


def test_a_full_disk_stops_the_study_clearly_and_it_goes_on_when_there_is_room(
    tmp_path: Path, undisturbed: Study
) -> None:
    driver = Driver(tmp_path)  # its data are tokenized since the undisturbed run
    driver.start(max_file_bytes=12_000)
    code, output = driver.end()
    assert code == 1, output
    assert re.search(rf"{driver.run_dir}\S* could not be written: File too large\. Nothing is lost", output), output
    assert "run the same command again" in output
    assert "Traceback" not in output
    before = driver.records()
    assert has("started")(before)
    driver.start()
    code, output = driver.end()
    assert code == 0, output
    assert driver.records()[: len(before)] == before
    check_nothing_was_lost_or_doubled(driver)
