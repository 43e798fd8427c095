"""Trackers: each trial is a W&B run, which the driver opens and ends, since the ranks of a pruned trial may just
die."""

from __future__ import annotations

import json
import re
import secrets
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal
from zlib import crc32

from orchestrator.config.keys import Tracking
from orchestrator.decisions.observer import Observer
from orchestrator.study.trial import Metrics, Trial, TrialState
from trainers.files import own_file, quoted

if TYPE_CHECKING:
    from wandb import Run, Settings


def open_tracker(config: Tracking, study_name: str, run_dir: Path) -> Observer:
    """Return the tracker that the study file asks for. Raises ValueError for W&B online without a login."""
    if config.wandb == "off":
        return Observer()
    if config.wandb == "online":
        require_login()
    return WandbTracker(config.wandb, config.project, study_name, run_dir)


STUDY_RUN = "study"
"""The run that holds what the study has found, beside those of its trials."""


def track_verdict(config: Tracking, study_name: str, run_dir: Path, verdict: str) -> None:
    """Put the verdict and the numbers of recommendation.json into the summary of a run of the study's own, if it is tracked."""
    if config.wandb == "off":
        return
    import wandb

    run = wandb.init(
        project=config.project,
        group=study_name,
        name=STUDY_RUN,
        id=run_id(study_name, STUDY_RUN, study_token(run_dir)),
        job_type=STUDY_RUN,
        dir=str(run_dir),
        mode=config.wandb,
        resume="allow",
        reinit="create_new",
        settings=_quiet(),
    )
    run.summary.update({"verdict": verdict} | _recommended(run_dir / "recommendation.json"))
    run.finish()


def how_to_sync(config: Tracking, run_dir: Path) -> str:
    """Return the command that sends to W&B what was written offline; empty where there is nothing to send."""
    return f"wandb sync {quoted(run_dir)}/wandb/offline-run-*" if config.wandb == "offline" else ""


def _recommended(path: Path) -> dict[str, Any]:
    """Return what a recommendation says in single values."""
    with own_file(path, "read"):
        tree = json.loads(path.read_text()) if path.exists() else {}
    return {key: value for key, value in tree.items() if not isinstance(value, (dict, list)) and key != "verdict"}


def require_login() -> None:
    """Raise ValueError, with the remedy, where W&B has no valid API key; never ask at the terminal."""
    import wandb
    from wandb.errors import AuthenticationError, UsageError

    remedy = "run `wandb login` (or set WANDB_API_KEY), or set tracking.wandb: offline"
    try:
        logged_in = wandb.login(prompt=False)
    except (AuthenticationError, UsageError) as error:
        raise ValueError(f"tracking.wandb is online, but W&B refused this login: {error}; {remedy}") from error
    if not logged_in:
        raise ValueError(f"tracking.wandb is online, but there is no W&B API key that may be used here; {remedy}")


class WandbTracker(Observer):
    """One W&B run for each trial, in one group for the study."""

    def __init__(self, mode: Literal["offline", "online"], project: str, study_name: str, run_dir: Path) -> None:
        self._mode: Literal["offline", "online"] = mode
        self._project = project
        self._study_name = study_name
        self._run_dir = run_dir
        self._token = study_token(run_dir)
        self._runs: dict[str, Run] = {}
        """The open run of each started trial."""
        self._samples: dict[str, float] = {}
        """The last samples_seen logged of each trial."""

    def started(self, trial: Trial) -> None:
        """Open the trial's run, or go on with it where it is open or was."""
        if trial.id in self._runs:
            return
        import wandb

        self._runs[trial.id] = run = wandb.init(
            project=self._project,
            group=self._study_name,
            name=trial.id,
            id=run_id(self._study_name, trial.id, self._token),
            job_type=trial.stage,
            config=trial.config.model_dump(mode="json") | {"stage": trial.stage, "role": trial.role},
            dir=str(self._run_dir),
            mode=self._mode,
            resume="allow",
            reinit="create_new",
            settings=_quiet(),
        )
        run.define_metric("samples_seen")
        run.define_metric("*", step_metric="samples_seen")
        seen = [samples for point in trial.history if (samples := point.get("samples_seen")) is not None]
        self._samples[trial.id] = max(seen, default=-1)

    def evaluated(self, trial: Trial, metrics: Metrics) -> None:
        """Log a row of history at the trial's samples_seen; leave out what a resumed trial repeats."""
        samples = metrics.get("samples_seen")
        if samples is None:
            self._runs[trial.id].log(dict(metrics))
        elif samples > self._samples[trial.id]:
            self._samples[trial.id] = samples
            # As the step, too: it goes on where a resumed run left off, and W&B drops what it already has.
            self._runs[trial.id].log(dict(metrics), step=int(samples))

    def ended(self, trial: Trial) -> None:
        """Finish the run: only `failed` is a failure, the other ends are results."""
        self.started(trial)
        run = self._runs.pop(trial.id)
        run.summary.update(trial.metrics | {"state": str(trial.state), "reason": trial.explanation})
        run.finish(exit_code=1 if trial.state is TrialState.FAILED else 0)

    def close(self) -> None:
        """Mark the runs that are still open as cut off; the same run goes on when the study does."""
        while self._runs:
            _, run = self._runs.popitem()
            run.summary.update({"state": str(TrialState.WAITING), "reason": "stopped: run the study again to go on"})
            run.finish(exit_code=1)


def run_id(study_name: str, trial_id: str, token: str) -> str:
    """Return `<study>-<trial id>-<token>` in letters and length that W&B takes; no two trials share one."""
    wanted = f"{study_name}-{trial_id}"
    allowed = re.sub(r"[^A-Za-z0-9_-]", "-", wanted)[:100]
    return f"{allowed}-{token}" if allowed == wanted else f"{allowed}-{crc32(wanted.encode()):08x}-{token}"


def study_token(run_dir: Path) -> str:
    """Return six letters that belong to the run directory: the same study in another directory must not add to its
    runs."""
    file = run_dir / "wandb" / "study-token"
    with own_file(file):
        if not file.exists():
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(secrets.token_hex(3))
    with own_file(file, "read"):
        return file.read_text()


def _quiet() -> Settings:
    """Return settings without output, and without what would describe the driver instead of the trial."""
    import wandb

    return wandb.Settings(
        silent=True,
        quiet=True,
        console="off",
        disable_git=True,
        disable_code=True,
        save_code=False,
        symlink=False,
        x_disable_stats=True,
        x_save_requirements=False,
    )
