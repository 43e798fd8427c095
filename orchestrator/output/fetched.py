"""What ranks on a cluster keep of their trials, fetched from the study's object store for those who read it: trackers and the report."""

from __future__ import annotations

from orchestrator.decisions.observer import Observer
from orchestrator.study.storage.stored_study import StoredStudy
from orchestrator.study.trial import Metrics, Trial


class TrialsFetched(Observer):
    """Comes before observers that read the files of a trial: then they are here."""

    def __init__(self, stored: StoredStudy) -> None:
        self._stored = stored

    def evaluated(self, trial: Trial, metrics: Metrics) -> None:
        self._stored.fetch_what_others_ran(trial.id)

    def ended(self, trial: Trial) -> None:
        self._stored.fetch_what_others_ran(trial.id)
