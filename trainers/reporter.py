"""When a run reports and saves, and how all of its ranks come to one verdict."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist

from trainers.checkpoint import save_checkpoint
from trainers.config import TrialConfig
from trainers.device import pick_device
from trainers.equivalence import rho_to_file, save_weights, weights_of
from trainers.evaluation import evaluate
from trainers.report import Report, ReportFunction, Verdict
from trainers.run import Run

SECONDS_BETWEEN_PROGRESS_REPORTS = 2.0
SECONDS_BETWEEN_CHECKPOINTS = 120.0


class Reporter:
    """Reads the run once per interval, saves it, tells rank 0's listener, and brings all ranks to one verdict."""

    def __init__(self, run: Run, report: ReportFunction, directory: Path, token: str) -> None:
        self._run, self._report, self._directory, self._token = run, report, directory, token
        self._step_losses: list[float] = []
        self._reported_rungs_to = run.samples_seen
        self._last_report = self._last_checkpoint = time.monotonic()

    def progress(self) -> Verdict:
        self._step_losses += self._run.read()
        due = self._is_main and time.monotonic() - self._last_report >= SECONDS_BETWEEN_PROGRESS_REPORTS
        verdict = self._tell("progress", self._run.metrics()) if due else "go on"
        save_due = time.monotonic() - self._last_checkpoint >= SECONDS_BETWEEN_CHECKPOINTS
        stop, save = agree(verdict == "stop", save_due)
        if stop or save:
            self._save(None)
        self._run.meter.clock.start()
        return "stop" if stop else "go on"

    def milestone(self) -> Verdict:
        self._step_losses += self._run.read()
        metrics = self._run.metrics() | self._evaluation()
        rungs = rungs_crossed(self._run.config, self._reported_rungs_to, self._run.samples_seen)
        self._reported_rungs_to = self._run.samples_seen
        self._save({"metrics": metrics, "rungs": rungs})
        return self._ask(metrics, rungs)

    def again(self, unheard: dict[str, Any]) -> Verdict:
        """Repeat the report that came with the checkpoint: it may have been lost with the process that made it."""
        return self._ask(unheard["metrics"], tuple(unheard["rungs"]))

    def last_metrics(self) -> dict[str, float]:
        losses = self._run.read()
        self._step_losses += losses
        final = {"final_loss": losses[-1]} if losses else {}  # `loss` is the mean since the last report
        return self._run.metrics() | final | self._evaluation()

    def end(self, metrics: dict[str, float]) -> None:
        metrics = metrics | self._weights()
        if self._run.config.evaluations:  # a short measurement is cheaper to repeat than to save
            self._save(None)
        self._tell("end", metrics)

    def _ask(self, metrics: dict[str, float], rungs: tuple[int, ...]) -> Verdict:
        verdict = self._tell("milestone", metrics, rungs)
        (stop,) = agree(verdict == "stop")
        self._run.meter.clock.start()
        return "stop" if stop else "go on"

    def _tell(
        self, kind: Literal["progress", "milestone", "end"], metrics: dict[str, float], rungs: tuple[int, ...] = ()
    ) -> Verdict:
        if not self._is_main:
            return "go on"
        losses, self._step_losses = tuple(self._step_losses), []
        answer = self._report(Report(kind, self._run.samples_seen, metrics, rungs, losses))
        self._last_report = time.monotonic()
        return "stop" if answer == "stop" else "go on"

    def _evaluation(self) -> dict[str, float]:
        return evaluate(self._run) if self._run.config.evaluation_samples else {}

    def _weights(self) -> dict[str, float]:
        config = self._run.config
        if not (config.save_weights or config.reference_weights):
            return {}
        final = weights_of(self._run.module)
        if config.save_weights and self._is_main:
            save_weights(self._directory / "weights.pt", self._run.initial_weights(), final)
        if config.reference_weights and self._is_main:
            return {"rho": rho_to_file(final, Path(config.reference_weights))}
        return {}

    def _save(self, report: dict[str, Any] | None) -> None:
        state = self._run.state(report)
        if self._is_main:
            save_checkpoint(
                self._directory / "checkpoints",
                self._token,
                self._run.samples_seen,
                state,
                self._run.config.keep_checkpoints,
            )
        self._last_checkpoint = time.monotonic()

    @property
    def _is_main(self) -> bool:
        return self._run.rank == 0


def rungs_crossed(config: TrialConfig, before: int, now: int) -> tuple[int, ...]:
    """The rungs in (before, now], below the budget."""
    return tuple(rung for rung in sorted(config.rungs) if before < rung <= now and rung < config.sample_budget)


def agree(*flags: bool) -> tuple[bool, ...]:
    """Rank 0's flags, on every rank: all of them stop at the same step, or a collective would wait for ever."""
    if not dist.is_initialized():
        return flags
    values = torch.tensor([float(flag) for flag in flags], device=pick_device())
    dist.broadcast(values, src=0)
    return tuple(bool(value) for value in values.tolist())
