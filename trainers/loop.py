"""One training run: `train()` is the loop; a newcomer starts there."""

from __future__ import annotations

from pathlib import Path

from trainers import memory
from trainers.compilation import warm_up
from trainers.config import TrialConfig
from trainers.device import pick_device
from trainers.report import ReportFunction, Verdict
from trainers.reporter import Reporter
from trainers.run import STEPS_PER_INTERVAL, Run


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
