"""Trackio: each trial is a run, and all of a study one group, in Trackio's own directory, which `trackio show` shows."""

from __future__ import annotations

import contextlib
import io
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from batchscout.orchestrator.output.tracking.names import STUDY_RUN, run_id, run_name, study_token
from batchscout.orchestrator.output.tracking.runs import End, Found, Row, finite
from batchscout.orchestrator.study.trial import Trial

if TYPE_CHECKING:
    from trackio.run import Run  # pyright: ignore[reportMissingImports]  (an extra)


class Trackio:
    """Opens runs in one project. Its `init` has one run open at a time, and lanes have several: so runs are made without it."""

    name = "Trackio"

    def __init__(self, project: str, study_name: str, run_dir: Path) -> None:
        self._project, self._study_name, self._token = project, study_name, study_token(run_dir)

    def open(self, trial: Trial) -> TrackioRun:
        config = trial.config.model_dump(mode="json") | {"stage": trial.stage, "role": trial.role}
        return TrackioRun(self._begun(run_name(trial), config))

    def tell_study(self, found: Found) -> None:
        import trackio  # pyright: ignore[reportMissingImports]  (an extra)

        shown: dict[str, Any] = {
            name: trackio.Table(columns=list(table.columns), data=[list(row) for row in table.rows])
            for name, table in found.tables.items()
        }
        if found.report is not None:
            shown["report"] = trackio.Html(found.report, inject=False)
        run = self._begun(STUDY_RUN, {})
        run.log({**found.summary, **shown})
        _finish(run)

    def _begun(self, name: str, config: Mapping[str, Any]) -> Run:
        """Begin the run of this name, or go on with it where it was: a run is known by its id."""
        from trackio.run import Run  # pyright: ignore[reportMissingImports]  (an extra)

        return Run(
            url=None,
            project=self._project,
            client=None,
            name=f"{self._study_name}/{name}",
            run_id=run_id(self._study_name, name, self._token),
            group=self._study_name,
            config=dict(config),
        )


class TrackioRun:
    """A run that is open."""

    def __init__(self, run: Run) -> None:
        self._run = run

    def log(self, rows: Sequence[Row]) -> None:
        for row in rows:
            self._run.log(finite(row.figures), step=None if row.samples is None else int(row.samples))

    def end(self, end: End) -> None:
        """It has no place for a summary, so the last row has what no other had."""
        words = {name: value for name, value in end.summary.items() if isinstance(value, str)}
        self._run.log({**end.untold, **words})
        _finish(self._run)


def _finish(run: Run) -> None:
    with contextlib.redirect_stdout(io.StringIO()):  # it says so, on whatever the terminal shows
        run.finish()
