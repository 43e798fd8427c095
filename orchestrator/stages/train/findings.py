"""What the train stage hands on: the best run, and what every batch would come to."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

from batchscout.orchestrator.stages.estimates.generalisation import Generalisation
from batchscout.orchestrator.stages.findings import found
from batchscout.orchestrator.study.state import Study


@dataclass(frozen=True)
class Ranked:
    """A candidate that finished."""

    name: str
    val_loss: float
    """The mean of its seeds."""
    score: float | None
    """Its score under the study's objective, the smaller the better; None if its loss was not falling to the target."""
    reached: bool = True
    """False if it never reached the target: then its score is a projection."""


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
    """The probability that no batch is better by more than a useful gain: the seeds' deviation, or 0.4 % if that is more."""
    num_runs: int
    num_runs_to_decide: float | None = 0.0
    """About how many more runs would tell whether it or its strongest rival is better; None where none would, since their
    speeds are not known well enough."""


@dataclass(frozen=True)
class Gain:
    """What one batch gains over another at equal cost, each at its best learning rate, in units of the score."""

    middle: float
    low: float
    high: float
    """The ends of the 90 % interval."""


@dataclass(frozen=True)
class TrainFindings:
    STAGE: ClassVar[str] = "train"

    winner: str
    """A trial: the first seed of the best run of the best batch."""
    val_loss: float
    ranking: tuple[Ranked, ...] = ()
    """The best first."""
    batches: tuple[BatchFindings, ...] = ()
    """The smallest first. Empty in a study of version 0.2."""
    seed_deviation: float | None = None
    """The deviation of a score from seed to seed."""
    seconds: float | None = None
    """The training time that each could take; None where all trained on the same samples."""
    expected_regret: float | None = None
    """What the choice costs on average against the batch that is the best, in units of the score. None in earlier studies."""
    gain_over_baseline: Gain | None = None
    """What the winner's batch gains over the baseline's; None where it is the baseline's, and in earlier studies."""
    most_to_gain: float | None = None
    """With a probability of 0.9 the best of all other batches gains no more than this over the winner's, in units of the score;
    None where there is no other, and in earlier studies."""
    generalisation: Generalisation | None = None
    """The generalisation gap of every batch that was trained to its end; None where no run measured one."""
    off_speed: dict[int, float] = field(default_factory=dict)
    """The batches whose runs did not have the speed that they were timed at, with the share of it that they had, beside what is
    usual among all runs."""

    def of_batch(self, effective_batch_size: int) -> BatchFindings | None:
        """Return what is known of a batch; None in a study of version 0.2."""
        return next((one for one in self.batches if one.effective_batch_size == effective_batch_size), None)


def loss_deviation(study: Study, objective: str) -> float | None:
    """Return the deviation of a loss from seed to seed, as the stage found it; None before it has, and where scores are seconds."""
    findings = found(study, TrainFindings)
    return findings.seed_deviation if findings and objective != "target" else None
