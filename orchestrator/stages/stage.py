"""What a stage offers: the one entry from which its trials, its conclusion and what it shows are found."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic

from orchestrator.stages.context import Keys, StageContext
from orchestrator.stages.figures import Figure
from orchestrator.study.state import Conclusion
from orchestrator.study.trial import Metrics, Proposal, Trial


def _none(context: object) -> None:
    return None


def _zero(context: object) -> int:
    return 0


def _no_figures(context: object) -> list[Figure]:
    return []


def _no_metrics(context: object, trial: Trial) -> Metrics:
    return {}


@dataclass(frozen=True)
class Stage(Generic[Keys]):
    """Pure functions of what is known of a study. Each stage's file ends with its own, named STAGE."""

    propose: Callable[[StageContext[Keys]], list[Proposal]]
    """Returns the trials that it wants so far; more may follow when these have ended. Raises ValueError where what earlier
    stages chose cannot be run."""
    conclude: Callable[[StageContext[Keys]], Conclusion]
    """Returns what it found; called when all its trials have ended."""
    describe: Callable[[StageContext[Keys]], list[str]]
    """Returns what it would do, in lines for people, before anything has run."""
    figures: Callable[[StageContext[Keys]], list[Figure]] = _no_figures
    """Returns what the report draws of it, whether or not its trials have ended."""
    columns: tuple[str, ...] = ()
    """The metrics in the table of its trials; one that no trial has is left out."""
    derived: Callable[[StageContext[Keys], Trial], Metrics] = _no_metrics
    """Returns the metrics that its findings add to what a trial measured."""
    winner: Callable[[StageContext[Keys]], str | None] = _none
    """Returns the id of the trial that it chose; None as long as it has chosen none."""
    precedence: int = 0
    """Of the full training runs that several stages have chosen, the study recommends that of the stage where this is
    highest; 0: what it chooses is no full training run."""
    num_full_runs: Callable[[StageContext[Keys]], int] = _zero
    """Returns how many full training runs it takes at most, for one seed."""
    proposes_once: bool = False
    """True if what its own trials bring never changes what it wants: then it is not asked again at every event."""
    step_seconds_limit: Callable[[StageContext[Keys]], float | None] = _none
    """Returns the seconds a step of its trials may take; None where its trials are no probes of what is usable."""
    fails_by_mode: bool = False
    """True if a model may fail in one mode of it and run in another: then failures say nothing of the trials to come."""
    reuses_measurements: bool = False
    """True if what an earlier study measured on this machine may stand for its trials."""

    @property
    def trains_candidates(self) -> bool:
        """True if its trials are full training runs, of which one may be recommended."""
        return self.precedence > 0
