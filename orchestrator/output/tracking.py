"""Each trial as a W&B run, made and ended on the driver: workers of a pruned trial may die without a word."""

from __future__ import annotations

import re
import secrets
from pathlib import Path
from typing import Any, Literal, Protocol
from zlib import crc32

from orchestrator.config.keys import Tracking
from orchestrator.study.state import Trial, TrialState


class Tracker(Protocol):
    def started(self, trial: Trial) -> None:
        """A trial starts, or goes on after a pause or a crash."""

    def result(self, trial_id: str, metrics: dict[str, float]) -> None:
        """Metrics of a started trial."""

    def ended(self, trial: Trial) -> None:
        """A trial has its final state, whether it ever started or not."""

    def close(self) -> None:
        """The driver ends; trials without a final state go on when the study is run again."""


def open_tracker(config: Tracking, study: str, run_dir: Path) -> Tracker:
    """The tracker that the study file asks for. Raises ValueError where it asks for W&B online without a login."""
    if config.wandb == "off":
        return NoTracker()
    if config.wandb == "online":
        require_login()
    return WandbTracker(config.wandb, config.project, study, run_dir)


def require_login() -> None:
    """Raises ValueError, with the remedy, where W&B has no valid API key; never asks at the terminal."""
    import wandb
    from wandb.errors import AuthenticationError, UsageError

    remedy = "run `wandb login` (or set WANDB_API_KEY), or set tracking.wandb: offline"
    try:
        logged_in = wandb.login(prompt=False)
    except (AuthenticationError, UsageError) as error:
        raise ValueError(f"tracking.wandb is online, but W&B refused this login: {error}; {remedy}") from error
    if not logged_in:
        raise ValueError(f"tracking.wandb is online, but there is no W&B API key that may be used here; {remedy}")


class NoTracker:
    def started(self, trial: Trial) -> None:
        pass

    def result(self, trial_id: str, metrics: dict[str, float]) -> None:
        pass

    def ended(self, trial: Trial) -> None:
        pass

    def close(self) -> None:
        pass


class WandbTracker:
    def __init__(self, mode: Literal["offline", "online"], project: str, study: str, run_dir: Path) -> None:
        self._mode: Literal["offline", "online"] = mode
        self._project = project
        self._study = study
        self._run_dir = run_dir
        self._token = study_token(run_dir)
        self._runs: dict[str, Any] = {}
        self._samples: dict[str, float] = {}
        """The last samples_seen logged of each trial."""

    def started(self, trial: Trial) -> None:
        """Open the trial's run, or go on with it where it is open or was."""
        if trial.id in self._runs:
            return
        import wandb

        self._runs[trial.id] = run = wandb.init(
            project=self._project,
            group=self._study,
            name=trial.id,
            id=run_id(self._study, trial.id, self._token),
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
        self._samples[trial.id] = max((point.get("samples_seen", -1) for point in trial.history), default=-1)

    def result(self, trial_id: str, metrics: dict[str, float]) -> None:
        """A row of history at the trial's samples_seen; what a resumed trial repeats is left out."""
        samples = metrics.get("samples_seen")
        if samples is None:
            self._runs[trial_id].log(metrics)
        elif samples > self._samples[trial_id]:
            self._samples[trial_id] = samples
            # As the step, too: it goes on where a resumed run left off, and W&B drops what it already has.
            self._runs[trial_id].log(metrics, step=int(samples))

    def ended(self, trial: Trial) -> None:
        """Finish the run: only `failed` is a failure, the other ends are results."""
        self.started(trial)
        run = self._runs.pop(trial.id)
        run.summary.update(trial.metrics | {"state": str(trial.state), "reason": trial.reason})
        run.finish(exit_code=1 if trial.state is TrialState.FAILED else 0)

    def close(self) -> None:
        """Runs still open are marked as cut off; the same run goes on when the study does."""
        while self._runs:
            _, run = self._runs.popitem()
            run.summary.update({"state": str(TrialState.WAITING), "reason": "stopped: run the study again to go on"})
            run.finish(exit_code=1)


def run_id(study: str, trial_id: str, token: str) -> str:
    """`<study>-<trial id>-<token>` in the letters and length that W&B takes; different trials never share one."""
    wanted = f"{study}-{trial_id}"
    allowed = re.sub(r"[^A-Za-z0-9_-]", "-", wanted)[:100]
    return f"{allowed}-{token}" if allowed == wanted else f"{allowed}-{crc32(wanted.encode()):08x}-{token}"


def study_token(run_dir: Path) -> str:
    """Six letters that belong to the run directory: a study begun afresh elsewhere must not add to this one's runs."""
    file = run_dir / "wandb" / "study-token"
    if not file.exists():
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(secrets.token_hex(3))
    return file.read_text()


def _quiet() -> Any:
    """W&B without output, and without what would describe the driver instead of the trial."""
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
