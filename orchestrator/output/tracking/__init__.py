"""Trackers: where a study's curves are sent beside its run directory. A file for each; runs.py has what they share."""

from __future__ import annotations

import json
from pathlib import Path

from orchestrator.config.keys import Tracking
from orchestrator.output.tracking.of_tensorboard import TensorBoard
from orchestrator.output.tracking.of_wandb import Wandb, require_login
from orchestrator.output.tracking.runs import Tracker, TrialRuns, Value
from trainers.files import own_file, quoted


def open_trackers(config: Tracking, study_name: str, run_dir: Path) -> list[TrialRuns]:
    """Return what hears of the trials, for each tracker that the study file asks for. Raises ValueError for W&B online without a login."""
    if config.wandb == "online":
        require_login()
    return [TrialRuns(tracker, run_dir) for tracker in _trackers(config, study_name, run_dir)]


def track_verdict(config: Tracking, study_name: str, run_dir: Path, verdict: str) -> None:
    """Tell every tracker the verdict and the numbers of recommendation.json."""
    summary: dict[str, Value] = {"verdict": verdict, **_recommended(run_dir / "recommendation.json")}
    for tracker in _trackers(config, study_name, run_dir):
        tracker.tell_study(summary)


def how_to_look(config: Tracking, run_dir: Path) -> dict[str, str]:
    """Return the commands that show what was tracked, or send it, each under what it does."""
    commands = {}
    if config.wandb == "offline":
        commands["send to W&B"] = f"wandb sync {quoted(run_dir)}/wandb/offline-run-*"
    if config.tensorboard:
        commands["look at curves"] = f"tensorboard --logdir {quoted(run_dir)}/tensorboard"
    return commands


def _trackers(config: Tracking, study_name: str, run_dir: Path) -> list[Tracker]:
    found: list[Tracker] = []
    if config.wandb != "off":
        found.append(Wandb(config.wandb, config.project, study_name, run_dir))
    if config.tensorboard:
        found.append(TensorBoard(run_dir))
    return found


def _recommended(path: Path) -> dict[str, Value]:
    """Return what a recommendation says in single values."""
    with own_file(path, "read"):
        tree = json.loads(path.read_text()) if path.exists() else {}
    return {key: value for key, value in tree.items() if not isinstance(value, (dict, list)) and key != "verdict"}
