"""What a person sees while a study runs: a line for each event in a log, and a panel on a terminal."""

from __future__ import annotations

import io
import json
import re
import subprocess
import sys

import numpy as np
import pytest
from rich.console import Console
from rich.text import Text

from batchscout.orchestrator.config.keys import StudyConfig
from batchscout.orchestrator.output.panel import Panel, rows_broken_off
from batchscout.orchestrator.output.progress import Progress
from batchscout.orchestrator.output.time_left import (
    SecondsLeft,
    estimated_seconds_left,
    most_seconds_left,
    seconds_left,
    sum_of,
)
from batchscout.orchestrator.stages.cost import SECONDS_OF_A_TRIAL, Cost, cost_of, samples_per_second
from batchscout.orchestrator.stages.probing import num_full_runs
from batchscout.orchestrator.study.causes import Cause
from batchscout.orchestrator.study.events import Ended, Evaluated, FactsRead, Paused, StageBegan, Started
from batchscout.orchestrator.study.facts import Facts
from batchscout.orchestrator.study.lines import read_lines
from batchscout.orchestrator.study.run_directory import load_stored_study
from batchscout.orchestrator.study.state import Conclusion, Study
from batchscout.orchestrator.study.trial import Metrics, TrialState
from batchscout.orchestrator.units import seconds_text
from batchscout.trainers.notices import Notice, NoticeKind
from tests.support.example_study import add_trial, end_trial, example_config, tell
from tests.support.outcome import RECORDED


@pytest.fixture
def config() -> StudyConfig:
    evaluated = {"evaluations": 2, "sample_budget": 1024}
    return example_config(stages=[{"type": "train"}, {"type": "learning_rate"}], **evaluated)


@pytest.fixture
def study(config: StudyConfig) -> Study:
    study = Study(config.name)
    tell(study, StageBegan(stage="train"))
    add_trial(study, config, "train-m1")
    add_trial(study, config, "train-m2")
    tell(study, Started(id="train-m1"))
    return study


def panel(progress: Progress) -> str:
    console = Console(file=io.StringIO(), width=200)
    console.print(progress.panel())
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def test_a_log_has_a_line_for_whatever_starts_waits_or_ends(
    config: StudyConfig, study: Study, capsys: pytest.CaptureFixture[str]
) -> None:
    with Progress(config, study) as progress:
        progress.stage_began(config.stages[0])
        progress.started(study.trials["train-m1"])
        tell(study, Evaluated(id="train-m1", metrics={"samples_seen": 512, "val_loss": 4.0}))
        progress.evaluated(study.trials["train-m1"], {"samples_seen": 512, "val_loss": 4.0})
        tell(study, Paused(id="train-m1", rung=512, reason="waiting at 512 samples", seconds=1.0))
        progress.waits(study.trials["train-m1"])
        end_trial(study, "train-m2", 3.0, {}, TrialState.PRUNED, Cause.DIVERGED, "the loss is nan")
        progress.ended(study.trials["train-m2"])
        progress.concluded(Conclusion("train", ok=True, reason="train-m1 ends first", notes=("a note",)))
    assert capsys.readouterr().out.splitlines() == [
        "train: Which batch ends best at equal cost?",
        "  train-m1: running",
        "  train-m1: paused  rung: waiting at 512 samples",
        "  train-m2: pruned  diverged: the loss is nan",
        "done train: train-m1 ends first",
        "     a note",
    ]


def test_a_notice_stands_whole_in_one_line(
    config: StudyConfig, study: Study, capsys: pytest.CaptureFixture[str]
) -> None:
    path = f"/{'a long folder/' * 10}000000000048-5e852b2a.pt"
    notice = Notice(NoticeKind.DAMAGED_CHECKPOINT, f"{path} is damaged: the run begins again")
    with Progress(config, study) as progress:
        progress.noticed(study.trials["train-m1"], notice)
        progress.noticed(None, notice)
    assert capsys.readouterr().out.splitlines() == [f"  train-m1: {notice.text}", f"  {notice.text}"]


def test_the_panel_shows_how_far_a_running_trial_said_it_is(config: StudyConfig, study: Study) -> None:
    """The journal does not hold what is said between evaluations."""
    progress = Progress(config, study, quiet=True)
    assert "train-m1" not in panel(progress)
    progress.stage_began(config.stages[0])
    assert "0 of 1,024 samples" in panel(progress)
    running = study.trials["train-m1"]
    progress.progressed(running, {"samples_seen": 100, "loss": 6.5})
    assert "100 of 1,024 samples" in panel(progress)
    assert "loss 6.500" in panel(progress)
    progress.evaluated(running, {"samples_seen": 512, "val_loss": 4.25})
    assert "512 of 1,024 samples" in panel(progress)
    assert "val loss 4.250" in panel(progress)
    assert "trials: 1 waiting, 1 running" in panel(progress)


def test_of_splits_of_one_batch_none_is_called_the_best() -> None:
    config = example_config(stages=[{"type": "equivalence"}, {"type": "train"}])
    known = Study(config.name)
    progress = Progress(config, known)
    for stage, is_named in zip(config.stages, (False, True), strict=True):
        add_trial(known, config, f"{stage.type}-m4k2")
        end_trial(known, f"{stage.type}-m4k2", 1.0, {"tokens_per_second": 100.0})
        progress.stage_began(stage)
        assert ("best: " in panel(progress)) is is_named


def test_a_trial_that_has_said_nothing_yet_is_shown_with_what_it_does_and_for_how_long(
    config: StudyConfig, study: Study, monkeypatch: pytest.MonkeyPatch
) -> None:
    progress, now = Progress(config, study), [100.0]
    monkeypatch.setattr("batchscout.orchestrator.output.progress.time.monotonic", lambda: now[0])
    progress.stage_began(config.stages[0])
    trial = study.trials["train-m1"]
    progress.started(trial)
    now[0] += 75
    doing = "builds and compiles its model" if trial.config.compile else "builds its model"
    assert f"train-m1  {doing}, 1 min 15 s so far" in panel(progress)
    progress.progressed(trial, {"samples_seen": 8.0})
    assert "so far, about" not in panel(progress)
    assert "train-m1  8 of 1,024 samples" in panel(progress)


def test_the_time_left_is_that_of_the_stage_and_of_the_whole_study(config: StudyConfig, study: Study) -> None:
    progress = Progress(config, study)
    progress.stage_began(config.stages[0])
    assert "0 s so far, the time left is not known yet" in panel(progress)
    end_trial(study, "train-m1", 60.0, {"val_loss": 3.0})
    left = seconds_left(study.of_stage("train"), {})
    most = most_seconds_left(study, num_full_runs(config, study))
    assert left is not None
    assert most is not None
    assert left.low < 60 < left.high < most
    assert f" so far, 5 to 115 s left in this stage, at most {seconds_text(most)} left" in panel(progress)


def test_until_a_full_run_has_ended_the_time_left_is_what_plan_estimates(config: StudyConfig, study: Study) -> None:
    progress = Progress(config, study)
    assert "the time left is not known yet" in panel(progress), "before a pass was timed"
    tell(study, FactsRead(facts=Facts(pass_seconds=(0.0, 0.01))))
    cost = cost_of(config, study.facts, samples_per_second(config, (0.0, 0.01)))
    assert f"about {seconds_text(cost.total)} left, by estimate" in panel(progress)
    progress.stage_began(config.stages[0])
    end_trial(study, "train-m1", 60.0, {"val_loss": 3.0}, TrialState.PRUNED, Cause.RUNG, "")
    left = cost.total - cost.run - SECONDS_OF_A_TRIAL
    assert f"about {seconds_text(left)} left, by estimate" in panel(progress)
    end_trial(study, "train-m2", 60.0, {"val_loss": 3.0})
    assert "estimate" not in panel(progress)


def test_of_an_estimate_that_goes_which_is_concluded_or_was_taken() -> None:
    config = example_config(stages=[{"type": "frontier"}, {"type": "throughput"}, {"type": "train"}])
    study, cost = Study(config.name), Cost(10.0, 2, {"frontier": 60.0, "throughput": 30.0})
    whole = 2 * (10.0 + SECONDS_OF_A_TRIAL) + 90.0
    assert estimated_seconds_left(study, cost, num_lanes=1, latest={}, elapsed={}) == pytest.approx(whole)
    assert estimated_seconds_left(study, cost, num_lanes=2, latest={}, elapsed={}) == pytest.approx(whole / 2)
    add_trial(study, config, "frontier-m1", evaluations=())
    end_trial(study, "frontier-m1", 45.0, {"tokens_per_second": 3.0})
    assert estimated_seconds_left(study, cost, num_lanes=1, latest={}, elapsed={}) == pytest.approx(whole - 45.0)
    add_trial(study, config, "frontier-m2", evaluations=())
    left = estimated_seconds_left(study, cost, num_lanes=1, latest={}, elapsed={"frontier-m2": 5.0})
    assert left == pytest.approx(whole - 50.0), "what runs has taken some of it"
    study.conclusions["frontier"] = Conclusion("frontier", ok=True, reason="")
    assert estimated_seconds_left(study, cost, num_lanes=1, latest={}, elapsed={}) == pytest.approx(whole - 60.0)


def test_an_estimate_takes_the_pace_of_the_runs_that_have_begun(config: StudyConfig, study: Study) -> None:
    """The pass that was timed before is one of a quiet machine, and tells nothing of how data are read."""
    tell(study, Started(id="train-m1"))
    trial, cost = study.trials["train-m1"].config, Cost(2.0, 2, {})
    steps = trial.sample_budget / trial.effective_batch_size
    heard: dict[str, Metrics] = {"train-m1": {"step_seconds": 60.0 / steps, "samples_seen": trial.sample_budget / 2}}
    assert estimated_seconds_left(study, cost, num_lanes=1, latest=heard, elapsed={}) == pytest.approx(
        1.5 * (60 + SECONDS_OF_A_TRIAL)
    )


def test_what_a_running_trial_has_done_is_not_left(study: Study) -> None:
    tell(study, Started(id="train-m2"))
    end_trial(study, "train-m1", 60.0, {"val_loss": 3.0})
    assert seconds_left(study.of_stage("train"), {}) == sum_of(1.0, [60.0], at_once=1)
    assert seconds_left(study.of_stage("train"), {"train-m2": {"samples_seen": 512.0}}) == sum_of(0.5, [60.0], 1)


@pytest.mark.parametrize("num_ended", [1, 2, 4, 16])
def test_four_times_in_five_the_range_holds_what_is_left(num_ended: int) -> None:
    """Of trials whose seconds are normal with a spread of 30 %; with few to go by it holds it somewhat more often or less."""
    random, held, rounds = np.random.default_rng(1), 0, 2_000
    for ended, coming in zip(
        random.normal(100, 30, (rounds, num_ended)), random.normal(100, 30, (rounds, 6)).sum(axis=1), strict=True
    ):
        left = sum_of(6, list(ended), at_once=1)
        held += left.low <= coming <= left.high
    assert 0.72 < held / rounds < 0.92


@pytest.mark.parametrize(("low", "high", "text"), [
    (0.0, 0.2, "less than 1 s"), (40, 59, "40 to 59 s"), (31.2, 31.7, "31 to 32 s"), (40, 130, "less than 3 min"),
    (0, 61, "less than 61 s"),
    (40, 70, "40 to 70 s"), (55 * 60, 61 * 60, "55 to 61 min"), (130, 290, "2 to 5 min"), (3600, 9000, "1 to 3 h"), (7200, 7201, "2 to 3 h"),
])  # fmt: skip
def test_a_range_of_seconds_in_words(low: float, high: float, text: str) -> None:
    assert str(SecondsLeft(low, high)) == text


def test_trials_at_rungs_are_counted_and_those_that_wait_there(config: StudyConfig, study: Study) -> None:
    progress = Progress(config, study)
    progress.stage_began(config.stages[0])
    assert "rung" not in panel(progress)
    for name in ("train-m1", "train-m2"):
        tell(study, Started(id=name))
        tell(study, Evaluated(id=name, metrics={"samples_seen": 256, "val_loss": 4.0}, rungs={256: 4.0}))
    tell(study, Paused(id="train-m1", rung=256, reason="waiting at 256 samples", seconds=1.0))
    tell(study, Evaluated(id="train-m2", metrics={"samples_seen": 512, "val_loss": 3.0}, rungs={512: 3.0}))
    assert "trials: 1 running, 1 paused, rung 1 reached by 2 trials (1 waiting), rung 2 reached by 1 trial" in panel(
        progress
    )


def test_while_runs_are_compared_a_log_and_the_panel_tell_which_batch_may_be_the_best(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a real study, as far as its journal had come after each of its runs."""
    monkeypatch.delenv("COLUMNS", raising=False)  # a log has no width
    config, study = load_stored_study(RECORDED / "study.yaml"), Study("quickstart")
    progress = Progress(config, study)
    for line in read_lines(RECORDED / "journal.jsonl"):
        study.apply(line.event)
        if isinstance(line.event, StageBegan):
            progress.stage_began(next(stage for stage in config.stages if stage.type == line.event.stage))
        if isinstance(line.event, Ended):
            progress.ended(study.trials[line.event.id])
            if study.trials[line.event.id].stage == "train" and progress.so_far:
                assert progress.so_far in panel(progress)
    said = [line for line in capsys.readouterr().out.splitlines() if "P(best)" in line]
    assert said
    for line in said:
        assert re.fullmatch(r"  P\(best\): (effective batch \d+ [<>]?[01]\.\d\d(, |$)){2,3}", line)
    found = json.loads((RECORDED / "recommendation.json").read_text())
    assert f"effective batch {found['effective_batch_size']} " in said[-1], "what is recommended is among the likeliest"


@pytest.mark.parametrize(("widths", "columns", "rows"), [
    ([10, 0, 80], 80, 0), ([10, 0, 80], 79, 1), ([10, 0, 80], 40, 1), ([81], 40, 2), ([], 1, 0),
])  # fmt: skip
def test_a_narrower_window_breaks_lines_into_rows(widths: list[int], columns: int, rows: int) -> None:
    assert rows_broken_off(widths, columns) == rows


def test_the_rows_that_a_narrower_window_has_made_are_removed_before_the_panel_is_drawn_anew() -> None:
    """In tmux, rich alone left them standing above the panel."""
    console = Console(file=io.StringIO(), force_terminal=True, width=100, height=20)
    shown = Panel(console, lambda: Text("x" * 90 + "\nshort"))
    console.print(shown.drawn())
    console.print(shown.drawn())
    assert isinstance(console.file, io.StringIO)
    assert UP not in console.file.getvalue(), "the window is as it was"
    console.width = 40
    console.print(shown.drawn())
    assert console.file.getvalue().count(UP) == 2, "90 columns are three rows of 40"
    console.print(shown.drawn())
    assert console.file.getvalue().count(UP) == 2, "rich has drawn rows of 40 since, and knows of them"


UP = "\x1b[1A"


def test_the_panel_marks_what_is_done_what_runs_and_what_failed(config: StudyConfig, study: Study) -> None:
    progress = Progress(config, study, quiet=True)
    progress.stage_began(config.stages[0])
    assert "* train  - learning_rate" in panel(progress)
    study.conclusions["train"] = Conclusion("train", ok=True, reason="")
    progress.stage_began(config.stages[1])
    assert "+ train  * learning_rate" in panel(progress)
    study.conclusions["learning_rate"] = Conclusion("learning_rate", ok=False, reason="")
    assert "+ train  ! learning_rate" in panel(progress)


SAYS = """
import sys
from batchscout.orchestrator.output.progress import Progress
from batchscout.orchestrator.study.state import Study
from tests.support.lane_player import study_of
with Progress(study_of(), Study("played")) as progress:
    progress.say("one")
    sys.stdin.readline()
    for number in range(3):
        progress.say("more")
print("the study goes on", file=sys.stderr)
"""


def test_a_study_goes_on_when_nobody_reads_what_it_says_any_more() -> None:
    """As behind `tee`, when that was killed. rich ends a program then."""
    pipe = subprocess.PIPE
    with subprocess.Popen([sys.executable, "-c", SAYS], stdin=pipe, stdout=pipe, stderr=pipe, text=True) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        assert process.stderr is not None
        assert process.stdout.readline() == "one\n"
        process.stdout.close()
        process.stdin.write("\n")
        process.stdin.close()
        said = process.stderr.read()
    assert (process.returncode, said) == (0, "the study goes on\n")
