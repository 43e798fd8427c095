"""A study's trials as trackers are told of them, with the file of steps that a run keeps."""

from dataclasses import replace
from pathlib import Path
from typing import Any

from batchscout.orchestrator.config.keys import Tracking
from batchscout.orchestrator.decisions.observer import Observer
from batchscout.orchestrator.output.tracking import open_trackers
from batchscout.orchestrator.output.tracking.runs import Found, Table, TrialRuns
from batchscout.orchestrator.study.run_directory import trial_directory
from batchscout.orchestrator.study.trial import Metrics, Proposal, Trial, TrialState
from batchscout.trainers import step_log
from batchscout.trainers.config import DataConfig, ModelConfig, TrialConfig
from batchscout.trainers.notices import Notice


def opened(tracking: Tracking, run_dir: Path, study_name: str = "my-study") -> TrialRuns:
    """The only tracker that is asked for, of which nothing amiss is told."""
    notices: list[Notice] = []
    (tracker,) = open_trackers(tracking, study_name, run_dir, notices.append)
    assert notices == []
    return tracker


def trial(trial_id: str = "train-m2", **fields: Any) -> Trial:
    config = TrialConfig(
        model=ModelConfig(target="gpt"),
        data=DataConfig(target="python_stdlib"),
        micro_batch_size=2,
        learning_rate=1e-3,
        sample_budget=64,
    )
    return Trial(Proposal(trial_id, "train", config, candidate=trial_id), TrialState.RUNNING, **fields)


def evaluate(tracker: Observer, samples: float, val_loss: float, trial_id: str = "train-m2") -> None:
    metrics: Metrics = {"samples_seen": samples, "val_loss": val_loss}
    tracker.evaluated(trial(trial_id, metrics=metrics), metrics)


def keep_steps(run_dir: Path, numbers: range) -> None:
    steps = [step_log.Step(number, 2 * number, 4.0 / number, 0.5, 1e-3, 0.0) for number in numbers]
    step_log.append(trial_directory(run_dir, "train-m2") / step_log.FILE_NAME, [step_log.line_of(steps)])


def run_twice(tracking: Tracking, run_dir: Path) -> None:
    """A trial of eight steps and two evaluations; the driver dies after the first, and the run takes two steps again."""
    first = opened(tracking, run_dir)
    first.started(trial())
    keep_steps(run_dir, range(1, 7))
    evaluate(first, 8, 3.0)
    first.close()
    second = opened(tracking, run_dir)
    second.started(trial(history=({"samples_seen": 8, "val_loss": 3.0},)))
    keep_steps(run_dir, range(5, 9))
    evaluate(second, 8, 3.0)
    evaluate(second, 16, 2.0)
    second.ended(replace(trial(), state=TrialState.COMPLETE))


def found_in(run_dir: Path) -> Found:
    """What a study has found, with a report."""
    (report := run_dir / "report.html").write_text("<!doctype html><title>the report</title>")
    tables = {"trials": Table(["trial", "val_loss"], [["train-m2", 2.0], ["train-m4", None]])}
    return Found({"verdict": "Train with micro-batch 4", "micro_batch_size": 4}, tables, report)
