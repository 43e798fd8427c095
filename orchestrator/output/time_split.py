"""Where the seconds of a study went."""

from __future__ import annotations

from collections.abc import Sequence

from orchestrator.study.state import Study, Trial


def time_split(study: Study) -> dict[str, float]:
    """Where the seconds of all trials went. `start-up`: Ray, and a lane's own start inside its first trial; `measuring`:
    steps of the short stages; `training`: steps of full runs; `rest`: building models, evaluating, saving, handing over."""
    trials = list(study.trials.values())
    full = [trial for trial in trials if trial.config.evaluations]
    short = [trial for trial in trials if not trial.config.evaluations]
    parts = {
        "start-up": sum(study.startup_seconds),
        "compiling": _total(trials, "compile_seconds"),
        "measuring": _total(short, "train_seconds"),
        "training": _total(full, "train_seconds"),
    }
    held = sum(trial.seconds for trial in trials)
    return parts | {"rest": max(0.0, held - sum(parts.values()) + parts["start-up"])}


def _total(trials: Sequence[Trial], key: str) -> float:
    return sum(trial.metrics.get(key) or 0.0 for trial in trials)
