"""Trackers: where a study's curves are sent beside its run directory. A file for each; runs.py has what they share."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from pathlib import Path

from batchscout.orchestrator.config.keys import Tracking
from batchscout.orchestrator.output.tracking import of_mlflow
from batchscout.orchestrator.output.tracking.of_mlflow import Mlflow
from batchscout.orchestrator.output.tracking.of_tensorboard import TensorBoard
from batchscout.orchestrator.output.tracking.of_trackio import Trackio
from batchscout.orchestrator.output.tracking.of_wandb import Wandb, why_not_online
from batchscout.orchestrator.output.tracking.runs import Tracker, TrialRuns
from batchscout.trainers.files import quoted
from batchscout.trainers.notices import Notice, NoticeKind

Tell = Callable[[Notice], object]

EXTRAS = {
    "mlflow": {"mlflow-skinny": "mlflow", "sqlalchemy": "sqlalchemy", "alembic": "alembic"},
    "trackio": {"trackio": "trackio"},
}
"""What a tracker needs that batchscout does not bring itself, by its key, which is also the name of the extra: each package with what is
imported of it."""


def require_libraries(config: Tracking) -> None:
    """Raise ValueError, with the command that installs them, where the libraries of a tracker are not there."""
    for key, packages in EXTRAS.items():
        missing = [
            name for name in packages.values() if getattr(config, key) and importlib.util.find_spec(name) is None
        ]
        if missing:
            raise ValueError(
                f"tracking.{key} is true, but {' and '.join(missing)} cannot be imported; pip install {' '.join(packages)}, or set it to false"
            )


def open_trackers(config: Tracking, study_name: str, run_dir: Path, tell: Tell) -> list[TrialRuns]:
    """Return what hears of the study and its trials, for each tracker that the study file asks for. Where one's server is not reached
    its runs are kept here instead; tell: who hears of that, and of a tracker that fails later."""
    found: list[Tracker] = []
    if config.wandb != "off":
        found.append(_wandb(config, study_name, run_dir, tell))
    if config.tensorboard:
        found.append(TensorBoard(run_dir))
    if config.mlflow:
        found.append(_mlflow(config, study_name, run_dir, tell))
    if config.trackio:
        found.append(Trackio(config.project, study_name, run_dir))
    return [TrialRuns(tracker, run_dir, tell) for tracker in found]


def _wandb(config: Tracking, study_name: str, run_dir: Path, tell: Tell) -> Wandb:
    assert config.wandb != "off"
    why = why_not_online() if config.wandb == "online" else ""
    if why:
        remedy = "to send them, run `wandb login` (or set WANDB_API_KEY), and then"
        tell(_kept_here("tracking.wandb is online, but", why, run_dir / "wandb", f"{remedy} {_sync(run_dir)}"))
    return Wandb("offline" if why else config.wandb, config.project, study_name, run_dir)


def _mlflow(config: Tracking, study_name: str, run_dir: Path, tell: Tell) -> Mlflow:
    from mlflow.exceptions import MlflowException  # pyright: ignore[reportMissingImports]  (an extra)

    server, own = of_mlflow.server(), of_mlflow.database(run_dir)
    try:
        return Mlflow(server or own, config.project, study_name, run_dir)
    except MlflowException as error:
        if server is None:
            raise
        why = f"{server} does not answer: {' '.join(str(error).split())[:300]}"
        tell(_kept_here("MLFLOW_TRACKING_URI is set, but", why, run_dir / of_mlflow.DATABASE, _mlflow_ui(run_dir)))
        return Mlflow(own, config.project, study_name, run_dir)


def _kept_here(but: str, why: str, where: Path, how: str) -> Notice:
    return Notice(
        NoticeKind.TRACKER_LOST, f"{but} {why}; the study goes on, and its runs are kept in {quoted(where)}: {how}"
    )


def how_to_look(config: Tracking, run_dir: Path) -> dict[str, str]:
    """Return the commands that show what was tracked, or send it, each under what it does."""
    commands = {}
    if config.wandb != "off" and any((run_dir / "wandb").glob("offline-run-*")):
        commands["send to W&B"] = _sync(run_dir)
    if config.tensorboard:
        commands["look at curves"] = f"tensorboard --logdir {quoted(run_dir)}/tensorboard"
    if config.mlflow and (run_dir / of_mlflow.DATABASE).exists():
        commands["look in MLflow"] = _mlflow_ui(run_dir)
    if config.trackio:
        commands["look in Trackio"] = f"trackio show --project {quoted(config.project)}"
    return commands


def _sync(run_dir: Path) -> str:
    return f"wandb sync {quoted(run_dir)}/wandb/offline-run-*"


def _mlflow_ui(run_dir: Path) -> str:
    return f"mlflow ui --backend-store-uri sqlite:///{quoted(run_dir.absolute() / of_mlflow.DATABASE)}"
