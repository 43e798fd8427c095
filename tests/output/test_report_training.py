"""What the report draws of the files that single runs keep: their steps, and their gradient noise."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import pytest

from batchscout.orchestrator.output.report.training import (
    MOST_POINTS,
    NUM_MEANS,
    RunCurves,
    read_curves,
    step_figures,
    training_section,
)
from batchscout.orchestrator.study.run_directory import trial_directory
from batchscout.orchestrator.study.state import Study
from batchscout.trainers import step_log
from batchscout.trainers.noise.noise_curve import NOISE_CURVE_FILE, NoiseSnapshot, add_to_noise_curve
from batchscout.trainers.step_log import Step
from tests.support.example_study import example_config, example_recommendation, example_study
from tests.support.run_curves import snapshot, steps


@pytest.fixture
def study() -> Study:
    return example_study(example_config())


def keep(run_dir: Path, trial_id: str, some: list[Step], snapshots: list[NoiseSnapshot]) -> None:
    directory = trial_directory(run_dir, trial_id)
    step_log.append(directory / step_log.FILE_NAME, [step_log.line_of(some)])
    for one in snapshots:
        add_to_noise_curve(directory / NOISE_CURVE_FILE, one)


def test_the_recommended_run_and_the_baseline_are_shown_from_their_own_files(study: Study, tmp_path: Path) -> None:
    winner = example_recommendation().evidence.trial
    baseline = next(trial.id for trial in study.trials.values() if trial.protected)
    assert winner != baseline
    keep(tmp_path, winner, steps(30), [])
    keep(tmp_path, baseline, steps(50), [snapshot(40, 12.0), snapshot(400, 60.0)])
    curves = read_curves(tmp_path, study, winner)
    assert [(one.name, len(one.steps), len(one.snapshots)) for one in curves] == [
        ("recommended", 30, 0),
        ("baseline", 50, 2),
    ]
    assert [one.name for one in read_curves(tmp_path, study, baseline)] == ["baseline"], "each run once"
    section = training_section(curves)
    assert section is not None
    assert len(section.findall(".//svg")) == 6, "loss, gradient norm, waiting, noise scale, coherence, SNR"
    cells = [[cell.text for cell in row.findall("td")] for row in section.findall(".//tbody/tr")]
    assert len(cells) == 4, "two sums at each of two snapshots"
    assert cells[2] == ["400", "2", "8", "0.25", "0.04", "1.5", "1e-05", "0.0002", "0.2", "-", "0.003"]


def test_how_long_each_step_waited_for_data_is_drawn() -> None:
    some = [replace(step, data_wait=0.3) for step in steps(4)]
    figures = step_figures([RunCurves("baseline", some, [])])
    assert [figure.y.label for figure in figures][-1] == "share of the step waiting for data"
    assert [mark.y for mark in figures[-1].series[0].marks] == [0.3] * 4
    assert figures[-1].caption == (
        "From 10% on the run is input-bound: more data.workers would make it faster, and another batch would not."
    )


def test_what_is_damaged_is_said_above_the_figures_and_ends_no_report(study: Study, tmp_path: Path) -> None:
    """Though it be all that the run has kept."""
    baseline = next(trial.id for trial in study.trials.values() if trial.protected)
    keep(tmp_path, baseline, steps(5), [snapshot(40, 12.0)])
    for name in (step_log.FILE_NAME, NOISE_CURVE_FILE):
        file = trial_directory(tmp_path, baseline) / name
        file.write_bytes(file.read_bytes().replace(b"samples_seen", b"samples_seem", 1))
    (curves,) = read_curves(tmp_path, study, None)
    assert (curves.steps, curves.snapshots) == ([], [])
    section = training_section([curves])
    assert section is not None
    said = [note.text or "" for note in section.findall("./ul/li")]
    assert len(said) == 2
    for name, text in zip((step_log.FILE_NAME, NOISE_CURVE_FILE), said, strict=True):
        assert text.startswith(f"baseline: line 1 of {trial_directory(tmp_path, baseline) / name} cannot be read as")


def test_a_study_whose_runs_kept_nothing_has_no_such_section(study: Study, tmp_path: Path) -> None:
    assert read_curves(tmp_path, study, None) == []
    assert training_section([]) is None


def test_a_run_that_diverged_does_not_flatten_the_other() -> None:
    huge = [replace(one, loss=one.loss * 10**6) for one in steps(8)]
    loss, *_ = step_figures([RunCurves("recommended", steps(20), []), RunCurves("baseline", huge, [])])
    assert loss.y.top == 3.0, "the highest of the other"
    assert "8 steps above 3 are not shown" in loss.caption


def test_a_long_run_is_thinned_and_its_spike_stays() -> None:
    loss, norm, _ = step_figures([RunCurves("baseline", steps(50_000, spike_at=31_234), [])])
    marks = loss.series[0].marks
    assert MOST_POINTS / 2 <= len(marks) <= MOST_POINTS
    assert max(marks, key=lambda mark: mark.y).x == 8 * 31_234
    assert marks[0].x < marks[-1].x
    assert [mark.x for mark in marks] == sorted(mark.x for mark in marks)
    assert len(norm.series[0].marks) <= MOST_POINTS


def test_a_long_run_has_its_means_over_its_faint_steps_and_a_short_one_its_steps_alone() -> None:
    long, short = RunCurves("recommended", steps(20 * NUM_MEANS), []), RunCurves("baseline", steps(20), [])
    for figure in step_figures([long, short]):
        raw, means, few = figure.series
        assert [one.faint for one in figure.series] == [True, False, False]
        assert raw.label == means.label == "recommended"
        assert len(means.marks) == NUM_MEANS
        assert "Faint: single steps" in figure.caption
        assert len(few.marks) == 20
    loss = step_figures([long])[0].series[1].marks
    first = [step.loss for step in long.steps[:20]]
    assert loss[0].y == pytest.approx(sum(first) / 20)


def test_a_loss_that_is_not_finite_and_a_noise_scale_that_cannot_be_told_leave_gaps() -> None:
    some = [*steps(4), Step(5, 40, math.inf, math.nan, 1e-3, 0.0)]
    section = training_section([RunCurves("baseline", some, [snapshot(16, None), snapshot(32, 8.0)])])
    assert section is not None
    assert len(section.findall(".//svg")) == 5
    (single,) = [one for one in section.iter("p") if one.get("class") == "single"]
    assert str(single.text).startswith("noise scale: baseline 8 samples (from 4 to 16), at samples seen 32"), (
        "one point is no chart"
    )


def test_a_noise_scale_without_an_upper_end_is_drawn_with_an_arrow() -> None:
    """A bar that is left out would look like a value that is known."""
    open_ended = replace(snapshot(32, 8.0), noise_scale_high=None)
    section = training_section([RunCurves("baseline", steps(4), [snapshot(16, 8.0), open_ended])])
    assert section is not None
    (figure,) = [one for one in section.iter("figure") if one.get("id", "").endswith("-noise_curve")]
    bars = [path for path in figure.iter("path") if path.get("class") == "interval"]
    assert len(bars) == 2
    assert bars[0].get("d", "").endswith("m-3,0h6")
    assert bars[1].get("d", "").endswith("m-3,5l3,-5l3,5")
    assert [one.get("data-high") for one in figure.iter("path") if one.get("data-y")] == ["16", "no upper end"]
