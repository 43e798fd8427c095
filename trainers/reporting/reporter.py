"""`Reporter` decides when a run reports and saves, and brings all of its ranks to one answer."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from batchscout.trainers import step_log
from batchscout.trainers.checkpoints.checkpoint import keep_checkpoint, save_checkpoint
from batchscout.trainers.config import TrialConfig
from batchscout.trainers.device.device import pick_device
from batchscout.trainers.files import seen_from
from batchscout.trainers.metrics import METRICS
from batchscout.trainers.model.adding_up import loss_of_parts
from batchscout.trainers.model.equivalence import rho_to_file, save_weights, weights_of
from batchscout.trainers.model.parallel import reshard, several_ranks
from batchscout.trainers.noise.noise_curve import NOISE_CURVE_FILE, add_to_noise_curve
from batchscout.trainers.notices import heard_by
from batchscout.trainers.report import Answer, Report, ReportFunction, ReportKind
from batchscout.trainers.reporting.evaluation import evaluate, generalisation
from batchscout.trainers.reporting.noise_snapshot import take_snapshot
from batchscout.trainers.run import Run
from batchscout.trainers.speed.throughput import steps_to_time

SECONDS_BETWEEN_PROGRESS_REPORTS = 2.0
SECONDS_BETWEEN_CHECKPOINTS = 120.0
# Few, as they run in one piece, and without a gradient need no more memory than a step of one sample.
SAMPLES_TAKEN_APART = 4


class Reporter:
    """All ranks call the same methods at the same step; rank 0 alone reports, and the others learn its answer."""

    def __init__(self, run: Run, report: ReportFunction, directory: Path, token: str) -> None:
        self._run, self._report, self._directory, self._token = run, report, directory, token
        self._unreported_steps: list[step_log.Step] = []
        self._unwritten_lines: list[str] = []
        self._last_loss: float | None = None
        self._rungs_reported_to = self._saved_to = run.samples_seen
        self._last_report = self._last_checkpoint = time.monotonic()

    def progress(self) -> Answer:
        """Read the interval that ends here, report it where a report is due, and save where that is due or the run
        stops."""
        self._read()
        report_due = self._is_main and time.monotonic() - self._last_report >= SECONDS_BETWEEN_PROGRESS_REPORTS
        answer = self._tell("progress", self._run.metrics()) if report_due else Answer.GO_ON
        save_due = time.monotonic() - self._last_checkpoint >= SECONDS_BETWEEN_CHECKPOINTS
        stop, save = as_rank_0(answer is Answer.STOP, save_due)
        if stop or save:
            self._save(None)
        self._run.meter.clock.start()
        return Answer.STOP if stop else Answer.GO_ON

    def snapshot(self) -> None:
        """Measure the gradient noise at the weights as they are. The next report has its figures."""
        self._read()
        found = take_snapshot(self._run)
        if found is not None:
            self._run.meter.snapshot = found.metrics()
            if self._is_main:
                with notices_reported(self._report):  # it reads what was written before
                    add_to_noise_curve(self._directory / NOISE_CURVE_FILE, found)
        self._run.meter.clock.start()

    def milestone(self) -> Answer:
        """Evaluate, save, report, and wait for the answer."""
        self._read()
        metrics = self._run.metrics() | self._evaluation()
        rungs = rungs_crossed(self._run.config, self._rungs_reported_to, self._run.samples_seen)
        self._rungs_reported_to = self._run.samples_seen
        self._save({"metrics": metrics, "rungs": rungs})
        return self._ask(metrics, rungs)

    def repeat(self, unanswered: dict[str, Any]) -> Answer:
        """Report once more what was saved with the checkpoint: it may have been lost with the process that made it."""
        return self._ask(unanswered["metrics"], tuple(unanswered["rungs"]))

    def time_steps(self) -> None:
        """On a GPU take as many steps more as a timing asks for, beyond the budget."""
        seconds = self._run.config.gpu_timing_seconds
        if not seconds or self._run.device.type != "cuda":
            return
        self._read()
        had_statistics = self._run.norms is not None
        (num_steps,) = as_rank_0(steps_to_time(self._run.meter.pace, seconds, had_statistics=had_statistics))
        if num_steps:
            self._run.time_steps(num_steps)

    def last_metrics(self) -> dict[str, float]:
        """Read and evaluate the run at its budget; `final_loss` is the last step's, `loss` the mean since the last
        report."""
        self._read()
        final = {} if self._last_loss is None else {"final_loss": self._last_loss}
        evaluated, config = self._evaluation(), self._run.config
        found = self._run.metrics() | final | evaluated
        if evaluated and config.evaluations:
            found |= generalisation(self._run, evaluated["val_loss"])
        return found if config.dropout else found | {"num_dropouts_off": self._run.num_dropouts_off}

    def end(self, metrics: dict[str, float]) -> None:
        """Save and report the end of the run."""
        metrics = metrics | self._weights() | self._parts()
        # A short measurement is cheaper to repeat than to save.
        if self._run.config.evaluations or self._run.config.kept_checkpoints:
            self._save(None)
        self._tell("end", metrics)

    def _read(self) -> None:
        """Read the interval that ends here. Its steps are kept for the next report and, by a full run, in a file."""
        steps = self._run.read()
        if steps:
            self._last_loss = steps[-1].loss
        if self._is_main:
            self._unreported_steps += steps
        if self._is_main and steps and self._run.config.evaluations:
            self._unwritten_lines.append(step_log.line_of(steps))

    def _ask(self, metrics: dict[str, float], rungs: tuple[int, ...]) -> Answer:
        answer = self._tell("milestone", metrics, rungs)
        self._run.evaluated_at.append(self._run.samples_seen)
        (stop,) = as_rank_0(answer is Answer.STOP)
        self._run.meter.clock.start()
        return Answer.STOP if stop else Answer.GO_ON

    def _tell(self, kind: ReportKind, metrics: dict[str, float], rungs: tuple[int, ...] = ()) -> Answer:
        if not self._is_main:
            return Answer.GO_ON
        assert metrics.keys() <= METRICS.keys(), f"not in the table: {sorted(metrics.keys() - METRICS.keys())}"
        self._write_steps()
        steps, self._unreported_steps = tuple(self._unreported_steps), []
        answer = self._report(Report(kind, self._run.samples_seen, metrics, rungs, steps))
        self._last_report = time.monotonic()
        return Answer.STOP if answer == Answer.STOP else Answer.GO_ON

    def _evaluation(self) -> dict[str, float]:
        return evaluate(self._run) if self._run.config.evaluation_samples else {}

    def _weights(self) -> dict[str, float]:
        config = self._run.config
        if not (config.save_weights or config.reference_weights):
            return {}
        final = weights_of(self._run.module)
        if config.save_weights and self._is_main:
            save_weights(self._directory / "weights.pt", self._run.initial_weights(self._directory), final)
        if config.reference_weights and self._is_main:
            return {"rho": rho_to_file(final, seen_from(self._directory, config.reference_weights))}
        return {}

    def _parts(self) -> dict[str, float]:
        """Measure what a split does to the loss of the run's first samples."""
        run = self._run
        if not run.config.check_parts:
            return {}
        indices = run.order.indices(range(min(SAMPLES_TAKEN_APART, len(run.first_samples))))
        found = loss_of_parts(run.module, run.loss_function, run.first_samples, indices, run.device)
        reshard(run.module)
        return found

    def _write_steps(self) -> None:
        """Write what was read, before the report or the checkpoint that would make it the past."""
        lines, self._unwritten_lines = self._unwritten_lines, []
        if lines:
            step_log.append(self._directory / step_log.FILE_NAME, lines)

    def _save(self, report: dict[str, Any] | None) -> None:
        """Save a checkpoint, with the report that is still to be answered where there is one. What is to be kept is
        written first: a run that goes on from the other would not come by here again."""
        run, directory = self._run, self._directory / "checkpoints"
        state = run.state(report)
        if self._is_main:
            self._write_steps()
            step_log.settle(self._directory / step_log.FILE_NAME)
            for samples in crossed(run.config.kept_checkpoints, self._saved_to, run.samples_seen):
                keep_checkpoint(directory, samples, state)
            save_checkpoint(directory, self._token, run.samples_seen, state, run.config.keep_checkpoints)
        self._saved_to = run.samples_seen
        self._last_checkpoint = time.monotonic()

    @property
    def _is_main(self) -> bool:
        return self._run.rank == 0


def notices_reported(report: ReportFunction) -> contextlib.AbstractContextManager[None]:
    """Report the notices that are given in this block at once. Those of other ranks than 0 stay warnings."""
    if dist.is_initialized() and dist.get_rank() != 0:
        return contextlib.nullcontext()
    return heard_by(lambda notice: report(Report("notice", 0, {}, notice=notice)))


def rungs_crossed(config: TrialConfig, before: int, now: int) -> tuple[int, ...]:
    """Return the rungs in (before, now], below the budget."""
    return tuple(rung for rung in crossed(config.rungs, before, now) if rung < config.sample_budget)


def crossed(counts: Iterable[int], before: int, now: int) -> list[int]:
    """Return the sample counts in (before, now]."""
    return [count for count in sorted(counts) if before < count <= now]


def as_rank_0(*numbers: int) -> tuple[int, ...]:
    """Return rank 0's numbers, or flags, on every rank: if ranks stopped at different steps, a collective would wait for ever."""
    if not several_ranks():
        return numbers
    values = torch.tensor([int(number) for number in numbers], device=pick_device())
    dist.broadcast(values, src=0)
    return tuple(values.tolist())
