"""Weights & Biases: each trial is a run, and all of a study one group."""

from __future__ import annotations

import re
import secrets
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal
from zlib import crc32

from orchestrator.output.tracking.runs import STUDY_RUN, Value
from orchestrator.study.trial import Trial
from trainers.files import own_file

if TYPE_CHECKING:
    from wandb import Run, Settings


class Wandb:
    """Opens runs in one project."""

    def __init__(self, mode: Literal["offline", "online"], project: str, study_name: str, run_dir: Path) -> None:
        self._mode: Literal["offline", "online"] = mode
        self._project, self._study_name, self._run_dir = project, study_name, run_dir
        self._token = study_token(run_dir)

    def open(self, trial: Trial) -> WandbRun:
        config = trial.config.model_dump(mode="json") | {"stage": trial.stage, "role": trial.role}
        return WandbRun(self._begun(trial.id, job_type=trial.stage, config=config))

    def tell_study(self, summary: Mapping[str, Value]) -> None:
        run = self._begun(STUDY_RUN, job_type=STUDY_RUN, config=None)
        run.summary.update(dict(summary))
        run.finish()

    def _begun(self, name: str, *, job_type: str, config: dict[str, Any] | None) -> Run:
        """Begin the run of this name, or go on with it where it was."""
        import wandb

        return wandb.init(
            project=self._project,
            group=self._study_name,
            name=name,
            id=run_id(self._study_name, name, self._token),
            job_type=job_type,
            config=config,
            dir=str(self._run_dir),
            mode=self._mode,
            resume="allow",
            reinit="create_new",
            settings=_quiet(),
        )


class WandbRun:
    """A run that is open."""

    def __init__(self, run: Run) -> None:
        self._run = run
        run.define_metric("samples_seen")
        run.define_metric("*", step_metric="samples_seen")

    def log(self, figures: Mapping[str, float | None], samples: float | None) -> None:
        # The samples as the step, too: it goes on where a resumed run left off, and W&B drops what it already has.
        self._run.log(dict(figures), step=None if samples is None else int(samples))

    def end(self, summary: Mapping[str, Value], *, has_failed: bool) -> None:
        self._run.summary.update(dict(summary))
        self._run.finish(exit_code=1 if has_failed else 0)


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
