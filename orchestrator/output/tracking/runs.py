"""What every tracker is told: a run for each trial, with its evaluations and its steps, and one for the study. The driver tells it, since the
ranks of a pruned trial may just die."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from batchscout.orchestrator.decisions.observer import Observer
from batchscout.orchestrator.study.run_directory import trial_directory
from batchscout.orchestrator.study.trial import Metrics, Trial, TrialState
from batchscout.trainers import step_log
from batchscout.trainers.files import StorageLost
from batchscout.trainers.notices import Notice, NoticeKind, heard_by

Value = str | float | None


@dataclass(frozen=True)
class Row:
    """Figures at a point of a run: of a step, or of an evaluation, which alone has `val_loss`."""

    figures: Mapping[str, float | None]
    samples: float | None
    """The samples seen there; None where the run does not count them."""


@dataclass(frozen=True)
class End:
    """How a run ended."""

    summary: Mapping[str, Value]
    """Its last figures, its state and the reason."""
    has_failed: bool
    untold: Mapping[str, float] = field(default_factory=dict)
    """The figures of the summary that no row had."""


@dataclass(frozen=True)
class Table:
    """A table of the study."""

    columns: Sequence[str]
    rows: Sequence[Sequence[Value]]


@dataclass(frozen=True)
class Found:
    """What a study has found."""

    summary: Mapping[str, Value]
    """The verdict, and the numbers of the recommendation."""
    tables: Mapping[str, Table]
    report: Path | None
    """report.html; None if it could not be written."""


class OpenRun(Protocol):
    """A trial's run in a tracker."""

    def log(self, rows: Sequence[Row]) -> None:
        """Log figures. The samples never fall from one row to the next, nor from one call to the next."""
        ...

    def end(self, end: End) -> None: ...


class Tracker(Protocol):
    """Where runs are kept. What goes wrong there may be raised as anything: the study goes on without the tracker."""

    @property
    def name(self) -> str:
        """What people call it."""
        ...

    def open(self, trial: Trial) -> OpenRun:
        """Begin the trial's run, or go on with it where it was."""
        ...

    def tell_study(self, found: Found) -> None:
        """Keep what the study has found, in a run of its own."""
        ...


class TrialRuns(Observer):
    """Tells a tracker of a study and its trials. If the tracker fails, that is said once, and it is told no more: hours of
    training are worth more than their curves in another place."""

    def __init__(self, tracker: Tracker, run_dir: Path, tell: Callable[[Notice], object]) -> None:
        self._tracker, self._run_dir, self._tell = tracker, run_dir, tell
        self._is_lost = False
        self._open: dict[str, OpenRun] = {}
        """The open run of each started trial."""
        self._told: dict[str, float] = {}
        """The last samples_seen told of each trial."""

    def started(self, trial: Trial) -> None:
        """Open the trial's run, or go on with it where it is open or was."""
        self._do(lambda: self._start(trial))

    def evaluated(self, trial: Trial, metrics: Metrics) -> None:
        """Log the steps since the evaluation before, and this one; leave out what a resumed trial repeats."""
        self._do(lambda: self._evaluate(trial, metrics))

    def ended(self, trial: Trial) -> None:
        """End the run: only `failed` is a failure, the other ends are results."""
        self._do(lambda: self._end(trial))

    def close(self) -> None:
        """Mark the runs that are still open as cut off; the same run goes on when the study does."""
        self._do(self._cut_off)

    def tell_study(self, found: Found) -> None:
        """Tell what the study has found."""
        self._do(lambda: self._tracker.tell_study(found))

    def _do(self, act: Callable[[], None]) -> None:
        if self._is_lost:
            return
        try:
            act()
        except StorageLost:  # the run directory's own storage, without which the study cannot go on
            raise
        except Exception as error:
            self._is_lost = True
            self._open.clear()
            why = " ".join(f"{type(error).__name__}: {error}".split())[:300]
            goes_on = "the study goes on without it, and nothing is missing in its own directory"
            self._tell(Notice(NoticeKind.TRACKER_LOST, f"{self._tracker.name} has failed ({why}): {goes_on}"))

    def _start(self, trial: Trial) -> None:
        if trial.id in self._open:
            return
        self._open[trial.id] = self._tracker.open(trial)
        seen = [samples for point in trial.history if (samples := point.get("samples_seen")) is not None]
        self._told[trial.id] = max(seen, default=-1)

    def _evaluate(self, trial: Trial, metrics: Metrics) -> None:
        run, samples = self._open[trial.id], metrics.get("samples_seen")
        if samples is None:
            run.log([Row(metrics, None)])
        elif samples > (told := self._told[trial.id]):
            with heard_by(lambda _: None):  # what is damaged in the file of the steps is told in the report
                steps = step_log.read_steps(trial_directory(self._run_dir, trial.id) / step_log.FILE_NAME)
            since = (step for step in steps if told < step.samples_seen <= samples)
            run.log([*(Row(_figures_of(step), step.samples_seen) for step in since), Row(metrics, samples)])
            self._told[trial.id] = samples

    def _end(self, trial: Trial) -> None:
        self._start(trial)
        told = {name for point in trial.history for name in point}
        untold = {name: value for name, value in trial.metrics.items() if value is not None and name not in told}
        summary: dict[str, Value] = {**trial.metrics, "state": str(trial.state), "reason": trial.explanation}
        self._open.pop(trial.id).end(End(summary, trial.state is TrialState.FAILED, untold))

    def _cut_off(self) -> None:
        cut_off: dict[str, Value] = {
            "state": str(TrialState.WAITING),
            "reason": "stopped: run the study again to go on",
        }
        while self._open:
            _, run = self._open.popitem()
            run.end(End(cut_off, has_failed=True))


def _figures_of(step: step_log.Step) -> dict[str, float | None]:
    figures = {
        "samples_seen": step.samples_seen,
        "step_loss": step.loss,
        "step_gradient_norm": step.gradient_norm,
        "step_learning_rate": step.learning_rate,
        "step_data_wait": step.data_wait,
    }
    return {name: value for name, value in figures.items() if math.isfinite(value)}


def finite(figures: Mapping[str, float | None]) -> dict[str, float]:
    """Return the figures that a curve can show."""
    return {name: value for name, value in figures.items() if value is not None and math.isfinite(value)}
