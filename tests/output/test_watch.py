"""A status that is watched is shown again when something has changed, and not otherwise; in a terminal as much of it as fits."""

import math
import os
import pty
import subprocess
import sys

import pytest

from batchscout.orchestrator.config.keys import StudyConfig
from batchscout.orchestrator.output.loaded import load
from batchscout.orchestrator.output.status import status_in_a_window
from batchscout.orchestrator.output.watch import watch
from batchscout.orchestrator.study.lines import read_lines
from batchscout.orchestrator.study.state import Study
from tests.support.outcome import GOLDEN, RECORDED


def test_each_state_is_shown_once_until_the_study_is_over() -> None:
    states = iter("aabbbc")
    seen, shown = [], []

    def state() -> str:
        seen.append(next(states))
        return seen[-1]

    def show() -> bool:
        shown.append(seen[-1])
        return seen[-1] == "c"

    watch(lambda rows: ("", True), show, state, seconds=0)
    assert shown == ["a", "b", "c"]
    assert next(states, None) is None


def part_of_the_recorded_study(num_lines: int) -> tuple[StudyConfig, Study]:
    config, study = load(RECORDED).config, Study("quickstart")
    for line in list(read_lines(RECORDED / "journal.jsonl"))[:num_lines]:
        study.apply(line.event)
    return config, study


@pytest.mark.parametrize(("columns", "rows"), [(80, 24), (120, 40), (60, 16)])
def test_whatever_a_study_has_come_to_its_status_fits_the_window_and_names_what_runs(
    monkeypatch: pytest.MonkeyPatch, columns: int, rows: int
) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    num_lines = len((RECORDED / "journal.jsonl").read_text().splitlines())
    for number in range(2, num_lines, 7):
        config, study = part_of_the_recorded_study(number)
        lines = status_in_a_window(config, study, is_driven=True, rows=rows).splitlines()
        assert sum(max(1, math.ceil(len(line) / columns)) for line in lines) < rows, (
            f"after {number} lines of the journal"
        )
        running = [trial.id for trial in study.trials.values() if trial.state == "running"]
        assert all(any(name in line for line in lines) for name in running)
        assert all(any(line.startswith(f"{stage.type}: ") for line in lines) for stage in config.stages)


@pytest.mark.parametrize("columns", [80, 60])
def test_a_trial_whose_figures_are_wider_than_the_window_has_them_below_and_the_whole_still_fits(
    monkeypatch: pytest.MonkeyPatch, columns: int
) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    stopped = load(GOLDEN / "every_state")
    lines = status_in_a_window(stopped.config, stopped.replayed, is_driven=False, rows=24).splitlines()
    assert max(map(len, lines)) <= columns
    assert sum(max(1, math.ceil(len(line) / columns)) for line in lines) < 24


def test_of_trials_that_do_not_fit_the_number_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "120")
    config, study = part_of_the_recorded_study(40)
    (stage,) = {trial.stage for trial in study.trials.values()}
    shown = status_in_a_window(config, study, is_driven=True, rows=14).splitlines()
    (left_out,) = [int(line.split()[2]) for line in shown if line.startswith("  ... and ")]
    assert left_out + sum(stage in line[2:] and line[:2] in ("  ", "* ") for line in shown) == len(study.trials)


def test_a_terminal_keeps_what_was_printed_before() -> None:
    """It is watched on a screen of its own, which ends with Ctrl-C; nothing clears what can be scrolled back to."""
    here, there = pty.openpty()
    command = [sys.executable, "-m", "batchscout", "status", "--watch"]
    stopped = GOLDEN / "every_state"
    environment = {**os.environ, "COLUMNS": "80", "LINES": "24"}
    with subprocess.Popen(
        [*command, str(stopped)], stdout=there, stderr=there, stdin=there, env=environment
    ) as process:
        os.close(there)
        said = b""
        while b"\x1b[J" not in said:
            said += os.read(here, 4096)
        process.send_signal(2)
        while chunk := _read(here):
            said += chunk
    os.close(here)
    assert process.returncode == 130
    assert said.startswith(b"\x1b[?1049h")
    assert said.endswith(b"\x1b[?1049l")
    assert b"\x1b[2J" not in said
    assert b"\x1b[3J" not in said


def _read(terminal: int) -> bytes:
    try:
        return os.read(terminal, 4096)
    except OSError:  # the other end is closed
        return b""
