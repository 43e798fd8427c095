"""What the train stage hands on: the best run, and what every batch would come to."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

from batchscout.orchestrator.stages.estimates.generalisation import Generalisation, Overfitting
from batchscout.orchestrator.stages.findings import found, winner_of
from batchscout.orchestrator.study.state import Study


@dataclass(frozen=True)
class BatchFindings:
    """What is known of a batch at its best learning rate, whether or not it was run at just that."""

    effective_batch_size: int
    sample_budget: int
    learning_rate: float
    learning_rate_low: float
    learning_rate_high: float
    """Where its best rate lies, with the ends of the 90 % interval."""
    score: float
    score_low: float
    score_high: float
    """What it would come to with that rate, with the ends of the 90 % interval."""
    p_best: float
    """The probability that it is the best: those of all batches add up to 1."""
    num_runs: int


@dataclass(frozen=True)
class TimeGain:
    """What the winner saves of the training time of the user's own setting, as shares of that time."""

    trial: str
    """The run of the user's own setting: its first seed."""
    share: float
    low: float
    high: float
    """The share of the time in which the winner ends at the loss that the user's own setting ends at after all of it, with the ends
    of the 90 % interval; above 1 where it takes longer."""
    by_rate: float
    """The share that the user's batch needs with its own best learning rate."""
    p_better: float
    """The probability that the winner saves a useful gain."""
    by_speed: float | None = None
    """The share of the time that the winner's batch takes for the same samples. None where time does not count or no speeds are known:
    then it is part of what the batch makes."""

    @property
    def by_batch(self) -> float:
        """The share of the samples in which the winner's batch comes to the same loss, each batch at its best learning rate: the three
        parts multiplied are the whole."""
        return self.share / (self.by_rate * (self.by_speed or 1.0))


@dataclass(frozen=True)
class TrainFindings:
    STAGE: ClassVar[str] = "train"

    winner: str
    """A trial: the first seed of the best run of the best batch."""
    val_loss: float
    batches: tuple[BatchFindings, ...] = ()
    """The smallest first."""
    seed_deviation: float | None = None
    """The deviation of a score from seed to seed."""
    seconds: float | None = None
    """The training time that each could take; None where all trained on the same samples."""
    regret_time: float | None = None
    """The share of the training time that the winner wastes on average, against the setting that is the best. None where nothing was
    compared."""
    time: TimeGain | None = None
    """What the winner saves against the user's own setting; None where it is that one, or that one diverged."""
    keeps_own: bool = False
    """True if the winner is the user's own setting: none is shown to be better by a useful gain."""
    overfitting: Overfitting | None = None
    """Where the user's own setting began to overfit, long before its run ended: it is then the winner, as the ends of such runs do not tell
    settings apart. None where it did not."""
    generalisation: Generalisation | None = None
    """The generalisation gap of every batch that was trained to its end; None where no run measured one."""
    off_speed: dict[int, float] = field(default_factory=dict)
    """The batches whose runs did not have the speed that they were timed at, with the share of it that they had, beside what is
    usual among all runs."""

    def is_decided(self, useful_gain: float) -> bool:
        """True if another setting than the user's is chosen that wastes less than a useful gain on average."""
        return not self.keeps_own and self.regret_time is not None and self.regret_time <= useful_gain

    def of_batch(self, effective_batch_size: int) -> BatchFindings | None:
        """Return what is known of a batch; None if it was not compared."""
        return next((one for one in self.batches if one.effective_batch_size == effective_batch_size), None)


@dataclass(frozen=True)
class LearningRateFindings:
    """Of the stage that adds runs at train's winner: they are evidence of the same kind."""

    STAGE: ClassVar[str] = "learning_rate"

    learning_rate: float
    winner: str
    """A trial: the first seed of the best learning rate."""
    on_edge: bool
    """True if the best is the last one tried on its side."""
    losses: dict[str, float]
    """The validation loss by learning rate, which is written with three digits."""
    rule: float | None = None
    """The scaling rule's rate for this batch."""
    train: TrainFindings | None = None
    """What all full runs come to, these among them; None without a train stage."""


def trained(study: Study) -> TrainFindings | None:
    """Return what all full runs come to: as this stage found it once its own have ended, else as train did."""
    refined = found(study, LearningRateFindings)
    return refined.train if refined and refined.train else found(study, TrainFindings)


def chosen_run(study: Study) -> str | None:
    """Return the trial that the full runs speak for: the learning_rate stage's choice once it has made one, else train's."""
    return winner_of(study, LearningRateFindings) or winner_of(study, TrainFindings)


def loss_deviation(study: Study, objective: str) -> float | None:
    """Return the deviation of a loss from seed to seed, as the stage found it; None before it has, and where scores are seconds."""
    findings = found(study, TrainFindings)
    return findings.seed_deviation if findings and objective != "target" else None
