"""MLflow: each trial is a run below that of its study, in a database in the run directory or on the server that MLFLOW_TRACKING_URI names."""

from __future__ import annotations

import csv
import io
import logging
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from batchscout.orchestrator.output.tracking.names import STUDY_RUN, run_id, run_name, study_token
from batchscout.orchestrator.output.tracking.runs import End, Found, Row, finite
from batchscout.orchestrator.study.trial import Trial
from batchscout.trainers.files import naming_the_disk

if TYPE_CHECKING:
    from mlflow.entities import Metric  # pyright: ignore[reportMissingImports]  (an extra)
    from mlflow.tracking import MlflowClient  # pyright: ignore[reportMissingImports]  (an extra)

DATABASE = "mlflow.db"
"""In the run directory. MLflow takes no plain files for new runs any more (3.17)."""
ARTIFACTS = "mlflow-artifacts"
RUN_ID_TAG = "batchscout.run_id"
MOST_METRICS = 1_000
"""That MLflow takes in one call."""
LONGEST_PARAMETER = 6_000
LONGEST_TAG = 5_000
# How long, and how often, a server is tried that does not answer; MLflow's own would hold a study up for half an hour.
_PATIENCE = {"MLFLOW_HTTP_REQUEST_TIMEOUT": "20", "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "1"}


def server() -> str | None:
    """Return where the user has MLflow send runs; None where nothing says so."""
    return os.environ.get("MLFLOW_TRACKING_URI") or None


def database(run_dir: Path) -> str:
    """Return the URI of the run directory's own database."""
    return f"sqlite:///{run_dir.absolute() / DATABASE}"


class Mlflow:
    """Keeps runs in one experiment. Raises MlflowException where the server is not reached."""

    name = "MLflow"

    def __init__(self, uri: str, project: str, study_name: str, run_dir: Path) -> None:
        self._study_name, self._token = study_name, study_token(run_dir)
        self._client = _client(uri)
        with naming_the_disk(run_dir):
            self._experiment = self._experiment_of(project, run_dir if uri == database(run_dir) else None)
        self._parent = self._begun(STUDY_RUN, {"mlflow.note.content": f"the study {study_name}"})

    def _experiment_of(self, project: str, run_dir: Path | None) -> str:
        """Return the experiment's id. A server says itself where its artifacts lie."""
        found = self._client.get_experiment_by_name(project)
        if found is not None:
            return found.experiment_id
        lies_at = (run_dir / ARTIFACTS).absolute().as_uri() if run_dir else None
        return self._client.create_experiment(project, artifact_location=lies_at)

    def open(self, trial: Trial) -> MlflowRun:
        tags = {"mlflow.parentRunId": self._parent, "stage": trial.stage, "role": trial.role}
        run = MlflowRun(self._client, self._begun(run_name(trial), tags))
        run.configure(trial.config.model_dump(mode="json"))
        return run

    def tell_study(self, found: Found) -> None:
        run = MlflowRun(self._client, self._parent)
        numbers = {key: float(value) for key, value in found.summary.items() if isinstance(value, (int, float))}
        for name, table in found.tables.items():
            written = io.StringIO()
            csv.writer(written).writerows([table.columns, *table.rows])
            self._client.log_text(self._parent, written.getvalue(), f"{name}.csv")
        if found.report is not None:
            self._client.log_artifact(self._parent, str(found.report))
        self._client.set_tag(self._parent, "mlflow.note.content", str(found.summary.get("verdict"))[:LONGEST_TAG])
        run.end(End(found.summary, has_failed=False, untold=numbers))

    def _begun(self, name: str, tags: Mapping[str, str]) -> str:
        """Begin the run of this name, or go on with it where it was; return MLflow's id of it."""
        ours = run_id(self._study_name, name, self._token)
        there = self._client.search_runs([self._experiment], f"tags.`{RUN_ID_TAG}` = '{ours}'", max_results=1)
        if there:
            self._client.update_run(there[0].info.run_id, status="RUNNING")
            return there[0].info.run_id
        return self._client.create_run(self._experiment, run_name=name, tags={RUN_ID_TAG: ours, **tags}).info.run_id


class MlflowRun:
    """A run that is open. Its curves are over samples, which MLflow calls steps."""

    def __init__(self, client: MlflowClient, run: str) -> None:
        self._client, self._run = client, run

    def configure(self, config: Mapping[str, Any]) -> None:
        """Keep what the trial trains with: single values to compare runs by, and the whole."""
        from mlflow.entities import Param  # pyright: ignore[reportMissingImports]  (an extra)

        single = {key: str(value) for key, value in config.items() if not isinstance(value, (dict, list))}
        self._client.log_batch(
            self._run, params=[Param(key, text) for key, text in single.items() if len(text) <= LONGEST_PARAMETER]
        )
        self._client.log_dict(self._run, dict(config), "config.json")

    def log(self, rows: Sequence[Row]) -> None:
        metrics = list(self._metrics(rows))
        for first in range(0, len(metrics), MOST_METRICS):
            self._client.log_batch(self._run, metrics=metrics[first : first + MOST_METRICS])

    def _metrics(self, rows: Sequence[Row]) -> Iterator[Metric]:
        from mlflow.entities import Metric  # pyright: ignore[reportMissingImports]  (an extra)

        now = int(time.time() * 1000)
        for row in rows:
            for name, value in finite(row.figures).items():
                yield Metric(name, value, now, int(row.samples or 0))

    def end(self, end: End) -> None:
        from mlflow.entities import RunTag  # pyright: ignore[reportMissingImports]  (an extra)

        self.log([Row(end.untold, None)])
        tags = {name: str(value)[:LONGEST_TAG] for name, value in end.summary.items() if isinstance(value, str)}
        self._client.log_batch(self._run, tags=[RunTag(name, text) for name, text in tags.items()])
        self._client.set_terminated(self._run, "FAILED" if end.has_failed else "FINISHED")


def _client(uri: str) -> MlflowClient:
    for name, value in {**_PATIENCE, "MLFLOW_DISABLE_TELEMETRY": "true"}.items():
        os.environ.setdefault(name, value)
    from mlflow.tracking import MlflowClient  # pyright: ignore[reportMissingImports]  (an extra)

    # They tell of each table that is made, and of each attempt to reach a server, on whatever the terminal shows.
    for loud in ("mlflow", "alembic", "urllib3.connectionpool"):
        logging.getLogger(loud).setLevel(logging.ERROR)
    return MlflowClient(uri)
