"""What every tracker is told: a run for each trial, with its evaluations and its steps, and one for the study. The driver tells it, since the
ranks of a pruned trial may just die."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Protocol

from orchestrator.decisions.observer import Observer
from orchestrator.study.run_directory import trial_directory
from orchestrator.study.trial import Metrics, Trial, TrialState
from trainers import step_log
from trainers.notices import heard_by

Value = str | float | None

STUDY_RUN = "study"
"""The run that holds what the study has found, beside those of its trials."""


class OpenRun(Protocol):
    """A trial's run in a tracker."""

    def log(self, figures: Mapping[str, float | None], samples: float | None) -> None:
        """Log figures at a sample count, which is never below that of the call before; None: at none."""
        ...

    def end(self, summary: Mapping[str, Value], *, has_failed: bool) -> None: ...


class Tracker(Protocol):
    """Where runs are kept."""

    def open(self, trial: Trial) -> OpenRun:
        """Begin the trial's run, or go on with it where it was."""
        ...

    def tell_study(self, summary: Mapping[str, Value]) -> None:
        """Keep what the study has found, in a run of its own."""
        ...


class TrialRuns(Observer):
    """Tells a tracker of a study's trials."""

    def __init__(self, tracker: Tracker, run_dir: Path) -> None:
        self._tracker, self._run_dir = tracker, run_dir
        self._open: dict[str, OpenRun] = {}
        """The open run of each started trial."""
        self._told: dict[str, float] = {}
        """The last samples_seen told of each trial."""

    def started(self, trial: Trial) -> None:
        """Open the trial's run, or go on with it where it is open or was."""
        if trial.id in self._open:
            return
        self._open[trial.id] = self._tracker.open(trial)
        seen = [samples for point in trial.history if (samples := point.get("samples_seen")) is not None]
        self._told[trial.id] = max(seen, default=-1)

    def evaluated(self, trial: Trial, metrics: Metrics) -> None:
        """Log the steps since the evaluation before, and this one; leave out what a resumed trial repeats."""
        run, samples = self._open[trial.id], metrics.get("samples_seen")
        if samples is None:
            run.log(metrics, None)
        elif samples > self._told[trial.id]:
            for step in self._steps_after(trial, self._told[trial.id], samples):
                run.log(_figures_of(step), step.samples_seen)
            self._told[trial.id] = samples
            run.log(metrics, samples)

    def _steps_after(self, trial: Trial, told: float, samples: float) -> Iterator[step_log.Step]:
        """Yield the steps between two sample counts, where this machine sees the file that the trial keeps of them."""
        with heard_by(lambda _: None):  # what is damaged in it is told in the report
            steps = step_log.read_steps(trial_directory(self._run_dir, trial.id) / step_log.FILE_NAME)
        yield from (step for step in steps if told < step.samples_seen <= samples)

    def ended(self, trial: Trial) -> None:
        """End the run: only `failed` is a failure, the other ends are results."""
        self.started(trial)
        summary: dict[str, Value] = {**trial.metrics, "state": str(trial.state), "reason": trial.explanation}
        self._open.pop(trial.id).end(summary, has_failed=trial.state is TrialState.FAILED)

    def close(self) -> None:
        """Mark the runs that are still open as cut off; the same run goes on when the study does."""
        cut_off: dict[str, Value] = {
            "state": str(TrialState.WAITING),
            "reason": "stopped: run the study again to go on",
        }
        while self._open:
            _, run = self._open.popitem()
            run.end(cut_off, has_failed=True)


def _figures_of(step: step_log.Step) -> dict[str, float | None]:
    figures = {
        "samples_seen": step.samples_seen,
        "step_loss": step.loss,
        "step_gradient_norm": step.gradient_norm,
        "step_learning_rate": step.learning_rate,
        "step_data_wait": step.data_wait,
    }
    return {name: value for name, value in figures.items() if math.isfinite(value)}
