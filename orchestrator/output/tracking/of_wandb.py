"""Weights & Biases: each trial is a run, and all of a study one group."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from batchscout.orchestrator.output.tracking.names import STUDY_RUN, run_id, run_name, study_token
from batchscout.orchestrator.output.tracking.runs import End, Found, Row
from batchscout.orchestrator.study.trial import Trial

if TYPE_CHECKING:
    from wandb import Run

SECONDS_TO_REACH = 30.0
"""How long its server is waited for, when a run begins and when it ends. What has not been sent by then stays on the
disk, for `wandb sync`."""


class Wandb:
    """Opens runs in one project."""

    name = "W&B"

    def __init__(self, mode: Literal["offline", "online"], project: str, study_name: str, run_dir: Path) -> None:
        self._mode: Literal["offline", "online"] = mode
        self._project, self._study_name, self._run_dir = project, study_name, run_dir
        self._token = study_token(run_dir)

    def open(self, trial: Trial) -> WandbRun:
        config = trial.config.model_dump(mode="json") | {"stage": trial.stage, "role": trial.role}
        return WandbRun(self._begun(run_name(trial), job_type=trial.stage, config=config))

    def tell_study(self, found: Found) -> None:
        import wandb

        run = self._begun(STUDY_RUN, job_type=STUDY_RUN, config=None)
        shown: dict[str, Any] = {
            name: wandb.Table(list(table.columns), [list(row) for row in table.rows], allow_mixed_types=True)
            for name, table in found.tables.items()
        }
        if found.report is not None:
            shown["report"] = wandb.Html(str(found.report), inject=False)
        run.log(shown)
        run.summary.update(dict(found.summary))
        run.finish()

    def _begun(self, name: str, *, job_type: str, config: dict[str, Any] | None) -> Run:
        """Begin the run of this name, or go on with it where it was."""
        import wandb

        with _no_run_of_the_users():
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
                # Without output, and without what would describe the driver instead of the trial.
                settings=wandb.Settings(
                    silent=True,
                    quiet=True,
                    console="off",
                    init_timeout=SECONDS_TO_REACH,
                    finish_timeout=SECONDS_TO_REACH,
                    disable_git=True,
                    disable_code=True,
                    save_code=False,
                    symlink=False,
                    x_disable_stats=True,
                    x_save_requirements=False,
                ),
            )


class WandbRun:
    """A run that is open."""

    def __init__(self, run: Run) -> None:
        self._run = run
        run.define_metric("samples_seen")
        run.define_metric("*", step_metric="samples_seen")

    def log(self, rows: Sequence[Row]) -> None:
        for row in rows:
            # The samples as the step, too: it goes on where a resumed run left off, and W&B drops what it already has.
            self._run.log(dict(row.figures), step=None if row.samples is None else int(row.samples))

    def end(self, end: End) -> None:
        self._run.summary.update(dict(end.summary))
        self._run.finish(exit_code=1 if end.has_failed else 0)


_ONE_RUN = {
    "WANDB_RUN_ID": ("run_id", None),
    "WANDB_RESUME": ("resume", None),
    "WANDB_SWEEP_ID": ("sweep_id", None),
    "WANDB_SWEEP_PARAM_PATH": ("sweep_param_path", None),
    "WANDB_LAUNCH": ("launch", False),
    "WANDB_LAUNCH_CONFIG_PATH": ("launch_config_path", None),
    "WANDB_CONFIG": (None, None),
    "WANDB_CONFIG_PATHS": (None, None),
}
"""What says which run the user's own process is, in the environment, and as W&B keeps it from its first call on. In a sweep it
takes no id but that one, so that all trials would be one run."""


@contextmanager
def _no_run_of_the_users() -> Iterator[None]:
    """Hide what says which run the user's process is; their own run, which may be open beside the study's, is left as it is."""
    import wandb

    hidden = {name: os.environ.pop(name) for name in _ONE_RUN if name in os.environ}
    kept = wandb.setup().settings
    before = {name: getattr(kept, name) for name, _ in _ONE_RUN.values() if name is not None}
    try:
        for name, none in _ONE_RUN.values():
            if name is not None:
                setattr(kept, name, none)
        yield
    finally:
        for name, value in before.items():
            setattr(kept, name, value)
        os.environ |= hidden


def why_not_online() -> str:
    """Return why W&B's server takes nothing from here, in words; empty where it does. Never asks at the terminal."""
    import wandb
    from wandb.errors import AuthenticationError, UsageError

    try:
        logged_in = wandb.login(prompt=False)
    except (AuthenticationError, UsageError) as error:
        return f"W&B refused this login, or was not reached: {' '.join(str(error).split())}"
    return "" if logged_in else "there is no W&B API key that may be used here"
