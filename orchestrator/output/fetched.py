"""What ranks on a cluster keep of their trials, fetched from the study's object store for those who read it: trackers and the report."""

from __future__ import annotations

import contextlib

from batchscout.orchestrator.decisions.observer import Observer
from batchscout.orchestrator.study.storage.stored_study import StoredStudy
from batchscout.orchestrator.study.trial import Metrics, Trial
from batchscout.trainers.files import StorageLost


class TrialsFetched(Observer):
    """Stands before the observers that read the files of a trial, so that these are on this machine. Where the store does not answer, those tell
    less; all is fetched again when the study ends, and a store that stays away halts it at the next line of the journal."""

    def __init__(self, stored: StoredStudy) -> None:
        self._stored = stored

    def evaluated(self, trial: Trial, metrics: Metrics) -> None:
        self._fetch(trial)

    def ended(self, trial: Trial) -> None:
        self._fetch(trial)

    def _fetch(self, trial: Trial) -> None:
        with contextlib.suppress(StorageLost):
            self._stored.fetch_what_others_ran(trial.id)
