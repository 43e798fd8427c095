"""One training run: `train()` is the loop; a newcomer starts there."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist

from trainers import memory
from trainers.checkpoint import save_checkpoint
from trainers.compilation import warm_up
from trainers.config import TrialConfig
from trainers.equivalence import rho_to_file, save_weights, weights_of
from trainers.evaluation import evaluate
from trainers.run import STEPS_PER_INTERVAL, Run

SECONDS_BETWEEN_PROGRESS_REPORTS = 2.0
SECONDS_BETWEEN_CHECKPOINTS = 120.0

Verdict = Literal["go on", "stop"]


@dataclass(frozen=True)
class Report:
    """What a run says of itself. `milestone` reports carry an evaluation and a checkpoint; `end` is the last one."""

    kind: Literal["progress", "milestone", "end"]
    samples_seen: int
    metrics: dict[str, float]
    rungs: tuple[int, ...] = ()
    """The rungs that were crossed here; the run waits for the verdict on them."""
    step_losses: tuple[float, ...] = ()
    """Of each step since the last report."""


ReportFunction = Callable[[Report], object]


def train(config: TrialConfig, report: ReportFunction, directory: Path, token: str = "local") -> Verdict:
    """Train until the budget ("go on") or until `report` answers "stop"; a later call goes on from the checkpoint.

    config: one trial, whose world_size is the process group's. report: called on rank 0 alone; anything but "stop"
    means go on. directory: this trial's own. token: who writes, see `trainers.checkpoint`.
    Raises the allocator's error where memory runs out, and whatever the user's model or data raise.
    """
    device = pick_device()
    compile_seconds = warm_up(config, device)
    idle_bytes = memory.idle_bytes(device)
    run = Run(config, device, compile_seconds)
    unheard = run.resume(directory)  # a checkpoint is in memory twice for a moment, which is no part of training
    run.meter.peak.forget()
    with memory.held_to(config.memory_limit_bytes, device, idle_bytes):
        reporter = Reporter(run, report, directory, token)
        if unheard and reporter.again(unheard) == "stop":
            return "stop"
        run.meter.clock.start()  # loading a checkpoint is no training either
        while ahead := milestones(config, run.samples_seen):
            while run.samples_seen < ahead[0]:
                run.step()
                # Not at the milestone: going on from a checkpoint saved there would leave its report out.
                due = run.num_steps % STEPS_PER_INTERVAL == 0 and run.samples_seen < ahead[0]
                if due and reporter.progress() == "stop":
                    return "stop"
            if run.samples_seen < config.sample_budget and reporter.milestone() == "stop":
                return "stop"
        last = reporter.last_metrics()
    reporter.end(last)  # outside of the limit: copies of the weights are no part of training
    return "go on"


def milestones(config: TrialConfig, samples_seen: int) -> list[int]:
    """The sample counts still ahead at which to evaluate and save; the budget is the last."""
    counts = sorted({*config.rungs, *config.evaluations, config.sample_budget})
    return [count for count in counts if samples_seen < count <= config.sample_budget]


def rungs_crossed(config: TrialConfig, before: int, now: int) -> tuple[int, ...]:
    """The rungs in (before, now], below the budget."""
    return tuple(rung for rung in sorted(config.rungs) if before < rung <= now and rung < config.sample_budget)


def pick_device() -> torch.device:
    """This rank's GPU where there is one, else the CPU."""
    return torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")


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


def agree(*flags: bool) -> tuple[bool, ...]:
    """Rank 0's flags, on every rank: all of them stop at the same step, or a collective would wait for ever."""
    if not dist.is_initialized():
        return flags
    values = torch.tensor([float(flag) for flag in flags], device=pick_device())
    dist.broadcast(values, src=0)
    return tuple(bool(value) for value in values.tolist())
