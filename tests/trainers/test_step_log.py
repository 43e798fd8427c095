"""A reader of steps.jsonl gets every step of the run once, however often the run was stopped or killed."""

from __future__ import annotations

import math
import re
import resource
from pathlib import Path
from typing import Any

import pytest

from batchscout.trainers import loop
from batchscout.trainers.files import StorageLost
from batchscout.trainers.loop import train
from batchscout.trainers.notices import Notice, NoticeKind, heard_by
from batchscout.trainers.report import Answer
from batchscout.trainers.step_log import Step, append, line_of, read_steps
from tests.support.damage import flipped
from tests.support.run_curves import steps_taken
from tests.support.storage import failing, on_failing_storage
from tests.support.tiny import config, cpu_run, in_fresh_process, train_until_killed

FULL: dict[str, Any] = {"sample_budget": 96, "rungs": (40, 64), "evaluations": (96,), "warmup_samples": 32}


@pytest.fixture(autouse=True)
def short_intervals(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loop, "STEPS_PER_INTERVAL", 3)


def steps(*numbers: int, loss: float = 1.0) -> list[Step]:
    return [Step(number, 4 * number, loss, 0.5, 1e-3, 0.25) for number in numbers]


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
    assert train(trial, lambda report: Answer.STOP, tmp_path / "parts") == Answer.STOP
    train_until_killed(trial, tmp_path / "parts", 64)
    train(trial, lambda report: None, tmp_path / "parts")
    parts, whole = (steps_taken(tmp_path / name / "steps.jsonl") for name in ("parts", "whole"))
    assert parts == whole


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


def told_of(path: Path) -> tuple[list[Step], list[Notice]]:
    met = list[Notice]()
    with heard_by(met.append):
        return read_steps(path), met


# The second line is of a run that was killed: the third takes its steps again.
TAKEN_AGAIN = [steps(1, 2, 3), steps(4, 5, 6, loss=9.0), steps(4, 5, loss=2.0), steps(6, 7, 8)]


@pytest.mark.slow
def test_no_flipped_bit_makes_another_step_and_a_step_that_is_lost_is_told(tmp_path: Path) -> None:
    """What was taken again is no true step either, though the line that says so be damaged."""
    path = tmp_path / "steps.jsonl"
    append(path, map(line_of, TAKEN_AGAIN))
    expected, met = told_of(path)
    assert (len(expected), met) == (8, [])
    content = path.read_bytes()
    for bit in range(8 * len(content)):
        path.write_bytes(damaged := flipped(content, bit))
        found, met = told_of(path)
        assert [step for step in expected if step in found] == found, damaged
        assert [notice.kind for notice in met] in ([NoticeKind.DAMAGED_CURVE], [])
        if found != expected:
            line = content[: bit // 8].count(b"\n") + 1
            assert re.match(rf"lines? (\d, )*{line}(, \d)* of {path} cannot be read as written", met[0].text), damaged


def test_a_damaged_line_costs_its_own_steps_alone(tmp_path: Path) -> None:
    path = tmp_path / "steps.jsonl"
    append(path, map(line_of, TAKEN_AGAIN))
    path.write_bytes(path.read_bytes().replace(b"[2.0, 2.0]", b"[2.0, 2.1]"))
    assert told_of(path)[0] == [*steps(1, 2, 3), *steps(6, 7, 8)]


def test_a_figure_that_is_not_finite_is_null_in_the_file_and_nan_for_the_reader(tmp_path: Path) -> None:
    append(tmp_path / "steps.jsonl", [line_of([Step(1, 4, math.inf, math.nan, 1e-3, 0.5)])])
    assert (tmp_path / "steps.jsonl").read_text().count("[null]") == 2
    (step,) = read_steps(tmp_path / "steps.jsonl")
    assert math.isnan(step.loss)
    assert math.isnan(step.gradient_norm)


def test_a_short_measurement_leaves_no_file(tmp_path: Path) -> None:
    train(config(sample_budget=64, rungs=(16,)), lambda report: None, tmp_path)
    assert not (tmp_path / "steps.jsonl").exists()
    assert read_steps(tmp_path / "steps.jsonl") == []


def test_a_step_costs_fewer_than_seventy_bytes() -> None:
    """A million steps are 70 MB at most."""
    line = line_of([Step(n, 512 * n, 160_000 / n, 9_000 / n, 26 / n, 13_000 / n**1.02) for n in range(70_001, 70_011)])
    assert len(line) / 10 < 70


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


def read_on_failing_storage(path: str) -> str:
    with failing("open", "steps.jsonl", "EACCES"), pytest.raises(StorageLost) as refused:
        read_steps(Path(path))
    return str(refused.value)


@pytest.mark.slow
def test_steps_that_cannot_be_read_are_the_storages_fault(tmp_path: Path) -> None:
    path = tmp_path / "steps.jsonl"
    append(path, [line_of(steps(1, 2))])
    assert on_failing_storage(read_on_failing_storage, str(path)) == f"{path} could not be read: Permission denied"
