"""What ranks on a cluster keep of their trials, fetched from the study's object store for those who read it: trackers and the report."""

from __future__ import annotations

import contextlib

from batchscout.orchestrator.decisions.observer import Observer
from batchscout.orchestrator.study.storage.stored_study import StoredStudy
from batchscout.orchestrator.study.trial import Metrics, Trial
from batchscout.trainers.files import StorageLost


class TrialsFetched(Observer):
    """Comes before observers that read the files of a trial: then they are here. Where the store does not answer they tell of less; a line of
    the journal that does not get there halts the study, and at its end all is fetched again."""

    def __init__(self, stored: StoredStudy) -> None:
        self._stored = stored

    def evaluated(self, trial: Trial, metrics: Metrics) -> None:
        self._fetch(trial)

    def ended(self, trial: Trial) -> None:
        self._fetch(trial)

    def _fetch(self, trial: Trial) -> None:
        with contextlib.suppress(StorageLost):
            self._stored.fetch_what_others_ran(trial.id)
