"""The report while the study runs: written again now and then, by the driver itself."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from pathlib import Path

from batchscout.orchestrator.config.keys import StudyConfig
from batchscout.orchestrator.config.stages import StageKeys
from batchscout.orchestrator.decisions.observer import Observer
from batchscout.orchestrator.output.recommendation import recommend
from batchscout.orchestrator.study.state import Conclusion, Study
from batchscout.orchestrator.study.trial import Metrics, Trial
from batchscout.trainers.files import quoted

LEAST_SECONDS = 5.0
"""Two pages lie at least so far apart."""
MOST_SHARE = 0.01
"""Writing takes at most this share of the driver's time, however many trials there are: a page that takes longer is written more
rarely."""


class LiveReport(Observer):
    """Writes report.html when something has happened and the last page is old enough. The page reloads itself."""

    def __init__(
        self,
        config: StudyConfig,
        study: Study,
        run_dir: Path,
        say: Callable[[str], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """say: told where a page cannot be made. clock: in seconds, by which pages lie apart."""
        self._config, self._study, self._path, self._clock = config, study, run_dir / "report.html", clock
        self._say = say
        self._due = clock()
        self._every = LEAST_SECONDS

    def stage_began(self, stage: StageKeys) -> None:
        self._look()

    def started(self, trial: Trial) -> None:
        self._look()

    def evaluated(self, trial: Trial, metrics: Metrics) -> None:
        self._look()

    def waits(self, trial: Trial) -> None:
        self._look()

    def ended(self, trial: Trial) -> None:
        self._look()

    def concluded(self, conclusion: Conclusion) -> None:
        self._look()

    def _look(self) -> None:
        began = self._clock()
        if began < self._due:
            return
        try:
            from batchscout.orchestrator.output.report.page import write_report

            recommendation = recommend(self._config, self._study)
            write_report(self._path, self._config, self._study, recommendation, self._every, is_driven=True)
        except Exception as error:  # a full disk's, too: hours of training are worth more than a picture of them
            self._say(
                f"the live report failed ({type(error).__name__}: {error}), and no result is lost; batchscout report {quoted(self._path.parent)} writes one"
            )
            self._due = math.inf
            return
        ended = self._clock()
        self._every = max(LEAST_SECONDS, (ended - began) / MOST_SHARE)
        self._due = ended + self._every
