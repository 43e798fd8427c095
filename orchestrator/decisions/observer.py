"""Observers hear what happens to a study: the terminal, and trackers such as W&B."""

from __future__ import annotations

from batchscout.orchestrator.config.stages import StageKeys
from batchscout.orchestrator.study.state import Conclusion
from batchscout.orchestrator.study.trial import Metrics, Trial
from batchscout.trainers.notices import Notice


class Observer:
    """Hears what happens, after it is journaled. This class ignores everything: override the methods that you want to
    hear."""

    def stage_began(self, stage: StageKeys) -> None:
        """A stage begins, or goes on in another run of the study."""

    def started(self, trial: Trial) -> None:
        """A trial starts, or goes on after a pause or a crash."""

    def progressed(self, trial: Trial, metrics: Metrics) -> None:
        """A running trial said how far it is; the journal does not hold that."""

    def evaluated(self, trial: Trial, metrics: Metrics) -> None:
        """A running trial evaluated itself."""

    def waits(self, trial: Trial) -> None:
        """A trial that ran is paused at a rung, or has lost its machine."""

    def ended(self, trial: Trial) -> None:
        """A trial has its final state, whether it ever started or not."""

    def noticed(self, trial: Trial | None, notice: Notice) -> None:
        """A trial, or the driver itself, met something amiss and has dealt with it."""

    def concluded(self, conclusion: Conclusion) -> None:
        """A stage has its result."""
