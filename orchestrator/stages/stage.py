"""Stage, what every stage offers: its trials, its conclusion and what it shows are all found from this one entry."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Generic

from batchscout.orchestrator.stages.context import Keys, StageContext
from batchscout.orchestrator.stages.figures import Figure
from batchscout.orchestrator.study.state import Conclusion
from batchscout.orchestrator.study.trial import Metrics, Proposal, Trial
from batchscout.trainers.config import TrialConfig


@dataclass(frozen=True)
class Change:
    """The one thing in which a stage's winner differs from the run that was chosen before. Neither field below is given where the batch
    grows: that is the winner's ramp."""

    source: str
    """The trial that was chosen before."""
    model: Mapping[str, float] = field(default_factory=dict[str, float])
    """An argument of the model, with the winner's value."""
    optimizer: Mapping[str, float] = field(default_factory=dict[str, float])
    """A key of the optimizer, with the winner's value, which is a multiple of the source's."""

    def in_words(self, trial: TrialConfig) -> str:
        """Return what is changed, with the value of a run that has it: a weight decay may follow batch and rate."""
        values = {**self.model, **{key: getattr(trial.optimizer, key) for key in self.optimizer}}
        return ", ".join(f"{key.replace('_', ' ')} {value:g}" for key, value in values.items())


@dataclass(frozen=True)
class Stage(Generic[Keys]):
    """Pure functions of what is known of a study. The file of each stage ends with one of these, named STAGE."""

    propose: Callable[[StageContext[Keys]], list[Proposal]]
    """Returns the trials that the stage wants so far; it may want more when these have ended. Raises ValueError if the
    choice of earlier stages cannot be run."""
    conclude: Callable[[StageContext[Keys]], Conclusion]
    """Returns the stage's result; called when all its trials have ended."""
    describe: Callable[[StageContext[Keys]], list[str]]
    """Returns lines that tell people what the stage would do, before anything has run."""
    figures: Callable[[StageContext[Keys]], list[Figure]] = lambda _: []
    """Returns what the report draws, whether or not the stage's trials have ended."""
    columns: tuple[str, ...] = ()
    """The metrics in the table of the stage's trials; a metric that no trial has is left out."""
    derived: Callable[[StageContext[Keys], Trial], Metrics] = lambda *_: {}
    """Returns metrics that the stage's findings add to those that a trial measured."""
    so_far: Callable[[StageContext[Keys]], str] = lambda _: ""
    """Returns what the trials that have ended speak for, while others run; empty where they say nothing yet."""
    winner: Callable[[StageContext[Keys]], str | None] = lambda _: None
    """Returns the id of the trial that the stage chose; None if it has not chosen one."""
    change: Callable[[StageContext[Keys]], Change | None] = lambda _: None
    """Returns in what that trial differs from the run that earlier stages chose, for a stage that trains this run again with one thing
    changed; None if it has chosen none, and for all other stages."""
    precedence: int = 0
    """If several stages have chosen a full training run, the study recommends that of the stage with the highest
    precedence. 0 for a stage none of whose runs is recommended."""
    num_full_runs: Callable[[StageContext[Keys]], int] = lambda _: 0
    """Returns how many full training runs the stage takes at most, for one seed, as far as that is known before it begins."""
    proposes_once: bool = False
    """True if the results of its own trials never change what it proposes: then it is asked once, not at every
    event."""
    step_seconds_limit: Callable[[StageContext[Keys]], float | None] = lambda _: None
    """Returns the seconds that a step of its trials may take; None if the stage has no such limit."""
    too_slow_to_win: Callable[[StageContext[Keys], Trial], str | None] = lambda *_: None
    """Returns why a trial that was just evaluated is too slow to win, whatever it comes to; None while it may."""
    fails_by_mode: bool = False
    """True if its trials run in different modes: a model may fail in one and run in another, so it is never given up
    early."""
    reuses_measurements: bool = False
    """True if measurements of an earlier study on this machine may stand in for its trials."""
    disturbed: Callable[[StageContext[Keys]], tuple[str, ...]] = lambda _: ()
    """Returns the trials that something else on the machine slowed down, once the stage has concluded: later studies
    measure them again."""

    @property
    def trains_candidates(self) -> bool:
        """True if its trials are full training runs, of which one may be recommended."""
        return self.precedence > 0
