"""One training run: `train()` is the loop. Start reading the package here, then `Run.step` in run.py."""

from __future__ import annotations

import contextlib
from pathlib import Path

from batchscout.trainers.before.compilation import warm_up
from batchscout.trainers.config import TrialConfig, left_as_it_is
from batchscout.trainers.device.determinism import deterministic
from batchscout.trainers.device.device import pick_device
from batchscout.trainers.device.memory import memory_of
from batchscout.trainers.device.tensor_float import tensor_float_32
from batchscout.trainers.report import Answer, Known, ReportFunction
from batchscout.trainers.reporting.reporter import Reporter, crossed, notices_reported
from batchscout.trainers.run import STEPS_PER_INTERVAL, Run


def train(
    config: TrialConfig, report: ReportFunction, directory: Path, token: str = "local", known: Known | None = None
) -> Answer:
    """Train until the budget is reached (GO_ON) or until `report` returns STOP. A later call resumes from the
    checkpoint; where there is none yet, a branch begins from that of another run.

    config: one trial, with the world_size of the process group. report: called on rank 0 alone.
    directory: where this trial, and no other, saves its files. token: who writes them, see
    `batchscout.trainers.checkpoints.checkpoint`. known: what a study's journal knows of the run; None where there is no journal.
    Raises the allocator's error where memory runs out, and whatever the user's model or data raise.
    """
    device = pick_device()
    with deterministic(config.deterministic), tensor_float_32(config.allow_tf32), notices_reported(report):
        with left_as_it_is():
            compile_seconds = warm_up(config, device)
        idle_bytes = memory_of(device).idle_bytes()
        with contextlib.closing(Run(config, device, compile_seconds)) as run:
            return _train(run, report, directory, token, known, idle_bytes)


def _train(
    run: Run, report: ReportFunction, directory: Path, token: str, known: Known | None, idle_bytes: int
) -> Answer:
    """idle_bytes: what the process held before the run was built."""
    config, device = run.config, run.device
    unanswered = run.resume(directory, token, known)
    run.meter.peak.forget()  # while a checkpoint is loaded it is in memory twice, which is no part of training
    with memory_of(device).held_to(config.memory_limit_bytes, idle_bytes):
        reporter = Reporter(run, report, directory, token)
        if unanswered and reporter.repeat(unanswered) is Answer.STOP:
            return Answer.STOP
        run.meter.clock.start()  # the seconds of loading a checkpoint are no part of training either
        while ahead := milestones(config, run.samples_seen):
            while run.samples_seen < ahead[0]:
                before = run.samples_seen
                run.step()
                if crossed(config.noise_snapshots, before, run.samples_seen):
                    reporter.snapshot()
                ends_interval = run.num_steps % STEPS_PER_INTERVAL == 0 or run.ends_phase()
                # Not at the milestone itself: a run that resumed from a checkpoint saved there would skip its report.
                if ends_interval and run.samples_seen < ahead[0] and reporter.progress() is Answer.STOP:
                    return Answer.STOP
            if run.samples_seen < config.sample_budget and reporter.milestone() is Answer.STOP:
                return Answer.STOP
        reporter.time_steps()
        last_metrics = reporter.last_metrics()
    reporter.end(last_metrics)  # outside of the limit: its copies of the weights are no part of training
    return Answer.GO_ON


def milestones(config: TrialConfig, samples_seen: int) -> list[int]:
    """Return the sample counts still ahead at which the run evaluates and saves; the budget is the last."""
    counts = sorted({*config.rungs, *config.evaluations, *config.kept_checkpoints, config.sample_budget})
    return [count for count in counts if samples_seen < count <= config.sample_budget]
