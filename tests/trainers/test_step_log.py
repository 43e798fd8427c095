"""A reader of steps.jsonl gets every step of the run once, however often the run was stopped or killed."""

from __future__ import annotations

import math
import resource
from pathlib import Path
from typing import Any

import pytest

from tests.support.tiny import config, cpu_run, in_fresh_process
from trainers import loop
from trainers.files import StorageLost
from trainers.loop import train
from trainers.report import Answer, Report
from trainers.step_log import Step, append, line_of, read_steps

FULL: dict[str, Any] = {"sample_budget": 96, "rungs": (40, 64), "evaluations": (96,), "warmup_samples": 32}


@pytest.fixture(autouse=True)
def short_intervals(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loop, "STEPS_PER_INTERVAL", 3)


def steps(*numbers: int, loss: float = 1.0) -> list[Step]:
    return [Step(number, 4 * number, loss, 0.5, 1e-3) for number in numbers]


def test_every_step_is_there_with_its_figures_to_seven_digits(tmp_path: Path) -> None:
    trial = config(**FULL)
    train(trial, lambda report: None, tmp_path)
    run, expected = cpu_run(trial), []
    for _ in range(24):
        run.step()
        expected += run.read()
    found = read_steps(tmp_path / "steps.jsonl")
    assert [(step.number, step.samples_seen) for step in found] == [(n, 4 * n) for n in range(1, 25)]
    for step, other in zip(found, expected, strict=True):
        assert (step.loss, step.gradient_norm) == pytest.approx((other.loss, other.gradient_norm), rel=1e-6)
        assert step.learning_rate == pytest.approx(other.learning_rate, rel=1e-6)
    assert found[3].learning_rate == pytest.approx(trial.learning_rate / 2), "in the middle of the warm-up"


def test_a_run_that_was_stopped_and_killed_tells_the_steps_of_one_that_was_not(tmp_path: Path) -> None:
    trial = config(**FULL)
    train(trial, lambda report: None, tmp_path / "whole")

    def die_at_64(report: Report) -> None:
        if report.samples_seen == 64:
            raise KeyboardInterrupt

    assert train(trial, lambda report: Answer.STOP, tmp_path / "parts") == Answer.STOP
    with pytest.raises(KeyboardInterrupt):
        train(trial, die_at_64, tmp_path / "parts")
    train(trial, lambda report: None, tmp_path / "parts")
    assert read_steps(tmp_path / "parts" / "steps.jsonl") == read_steps(tmp_path / "whole" / "steps.jsonl")


def test_what_a_killed_run_had_done_beyond_its_checkpoint_is_forgotten(tmp_path: Path) -> None:
    path = tmp_path / "steps.jsonl"
    append(path, [line_of(steps(1, 2, 3)), line_of(steps(4, 5, 6, loss=9.0)), line_of(steps(7, 8, 9, loss=9.0))])
    append(path, [line_of(steps(4, 5, loss=2.0))])
    assert read_steps(path) == [*steps(1, 2, 3), *steps(4, 5, loss=2.0)]


@pytest.mark.parametrize("missing", [1, 2, 40])
def test_half_a_line_is_passed_over_and_harms_no_other(tmp_path: Path, missing: int) -> None:
    """One byte short of its end a line is still a line: only its newline is missing."""
    path = tmp_path / "steps.jsonl"
    append(path, [line_of(steps(1, 2)), line_of(steps(3, 4))])
    path.write_bytes(path.read_bytes()[:-missing])
    left = steps(1, 2) if missing > 1 else steps(1, 2, 3, 4)
    assert read_steps(path) == left
    append(path, [line_of(steps(5, 6) if missing == 1 else steps(3, 4, 5, 6))])
    assert read_steps(path) == [*left, *(steps(5, 6) if missing == 1 else steps(3, 4, 5, 6))]


def test_a_figure_that_is_not_finite_is_null_in_the_file_and_nan_for_the_reader(tmp_path: Path) -> None:
    append(tmp_path / "steps.jsonl", [line_of([Step(1, 4, math.inf, math.nan, 1e-3)])])
    assert (tmp_path / "steps.jsonl").read_text().count("[null]") == 2
    (step,) = read_steps(tmp_path / "steps.jsonl")
    assert math.isnan(step.loss)
    assert math.isnan(step.gradient_norm)


def test_a_short_measurement_leaves_no_file(tmp_path: Path) -> None:
    train(config(sample_budget=64, rungs=(16,)), lambda report: None, tmp_path)
    assert not (tmp_path / "steps.jsonl").exists()
    assert read_steps(tmp_path / "steps.jsonl") == []


def test_a_step_costs_fewer_than_sixty_bytes() -> None:
    """A million steps are 60 MB at most."""
    line = line_of([Step(n, 512 * n, 160_000 / n, 9_000 / n, 26 / n) for n in range(70_001, 70_011)])
    assert len(line) / 10 < 60


def write_on_a_full_disk(directory: str) -> str:
    path = Path(directory) / "steps.jsonl"
    append(path, [line_of(steps(1, 2, 3))])
    resource.setrlimit(resource.RLIMIT_FSIZE, (path.stat().st_size + 10, resource.RLIM_INFINITY))
    with pytest.raises(StorageLost) as raised:
        append(path, [line_of(steps(4, 5, 6))])
    return str(raised.value)


@pytest.mark.slow
def test_a_full_disk_is_named_and_leaves_the_steps_before(tmp_path: Path) -> None:
    said = in_fresh_process(write_on_a_full_disk, str(tmp_path))
    assert said == f"{tmp_path}/steps.jsonl could not be written: File too large"
    assert read_steps(tmp_path / "steps.jsonl") == steps(1, 2, 3)
