"""What a study has cost so far, and which trials its budget still holds.

A trial costs the time for which it holds its lane, start and compiling included, on every device of the lane.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from batchscout.orchestrator.config.keys import StudyConfig
from batchscout.orchestrator.study.state import Study
from batchscout.orchestrator.study.trial import PLANNED_RATE, Proposal, Trial
from batchscout.orchestrator.units import number_text, seconds_text


class Spending:
    """The lane time of a study: that of trials which have ended is in the journal, that of the running ones here."""

    def __init__(self, config: StudyConfig, study: Study, clock: Callable[[], float]) -> None:
        self._hours = config.budget.device_hours if config.budget else None
        self._world_size, self._study = config.world_size, study
        self._clock = clock
        self._started: dict[str, float] = {}

    def begin(self, trial_id: str) -> None:
        self._started[trial_id] = self._clock()

    def end(self, trial_id: str) -> float:
        """Return the seconds since the trial began to hold its lane; 0 for one that holds none."""
        return self._held(self._started.pop(trial_id, None))

    def _held(self, started: float | None) -> float:
        return 0.0 if started is None else self._clock() - started

    def left(self) -> float | None:
        """Return the seconds for which lanes may still be held, zero when the budget is spent; None without a budget."""
        if self._hours is None:
            return None
        running = sum(map(self._held, self._started.values()))
        return max(0.0, 3600 * self._hours / self._world_size - self._study.lane_seconds - running)

    @property
    def is_spent(self) -> bool:
        return self.left() == 0.0

    @property
    def reason(self) -> str:
        """Why a trial ends when the budget does."""
        return f"budget.device_hours ({number_text(self._hours or 0.0)}) is spent"

    def affordable(self, wanted: Sequence[Proposal], begun: Iterable[Trial]) -> list[Proposal]:
        """Return the first of the wanted trials that fit into what is left when those that have begun have ended.

        A trial whose rate is not known fits in while anything is left.
        """
        left = self.left()
        if left is None:
            return list(wanted)
        for trial in begun:
            held = trial.seconds + self._held(self._started.get(trial.id))
            left -= max(0.0, _planned_seconds(trial.proposal) - held)
        fitting: list[Proposal] = []
        for proposal in wanted:
            needed = _planned_seconds(proposal)
            if left <= 0 or needed > left:
                break
            fitting.append(proposal)
            left -= needed
        return fitting

    def left_out(self, proposal: Proposal) -> str:
        """Return why this trial was not run, nor those that might have followed it."""
        needed, left = _planned_seconds(proposal), seconds_text(self.left() or 0.0)
        takes = f"would take {seconds_text(needed)}, and" if needed else "was not run:"
        hours = number_text(self._hours or 0.0)
        return f"{proposal.id} {takes} {left} of budget.device_hours ({hours}) were left; raise it to go further"


def _planned_seconds(proposal: Proposal) -> float:
    """Return the seconds of training that are planned; 0 where that is not known."""
    rate, begin = proposal.expected.get(PLANNED_RATE), proposal.config.branch_from
    num_samples = proposal.config.sample_budget - (begin.samples if begin else 0)
    return num_samples / rate if rate else 0.0
