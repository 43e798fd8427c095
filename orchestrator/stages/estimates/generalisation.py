"""The generalisation gap: by how much the loss over samples that a run has not met exceeds that over samples that it has.

A larger batch may widen it (Keskar et al. 2017, arXiv 1609.04836), in part because its run has fewer steps (Hoffer et al.
2017, arXiv 1705.08741). Pure.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from batchscout.orchestrator.stages.estimates import surface
from batchscout.orchestrator.stages.estimates.ranking import ALIKE, PRIOR_DEGREES, Standing, late_gain
from batchscout.orchestrator.stages.estimates.surface import Array
from batchscout.orchestrator.study.trial import Metrics, Trial
from batchscout.orchestrator.units import loss_text


@dataclass(frozen=True)
class Gap:
    """How well the best run of a batch generalises."""

    effective_batch_size: int
    sample_budget: int
    gap: float
    """Validation loss less training loss, the mean of its seeds."""


@dataclass(frozen=True)
class Generalisation:
    """The gaps of the batches that were trained to their end."""

    gaps: tuple[Gap, ...]
    """The smallest batch first."""
    deviation: float
    """The deviation of the difference of two gaps that seeds alone vary by."""

    def of_batch(self, effective_batch_size: int) -> Gap | None:
        """Return the gap of a batch; None where it was not measured."""
        return next((one for one in self.gaps if one.effective_batch_size == effective_batch_size), None)

    def is_wider(self, gap: Gap) -> bool:
        """True if it exceeds that of the smallest batch by more than the seeds vary."""
        return gap.gap - self.gaps[0].gap > self.deviation


def generalisation_of(ranking: Sequence[Standing]) -> Generalisation | None:
    """Return the gap of every batch at its best run; None where no run has measured one.

    ranking: the best first.
    """
    measured = [one for one in ranking if all(trial.metric("generalisation_gap") is not None for trial in one.trials)]
    best: dict[int, Standing] = {}
    for standing in measured:
        best.setdefault(standing.config.effective_batch_size, standing)
    if not best:
        return None
    runs = [best[batch] for batch in sorted(best)]
    return Generalisation(tuple(map(_gap, runs)), _deviation(runs))


def _gap(standing: Standing) -> Gap:
    config = standing.config
    return Gap(config.effective_batch_size, config.sample_budget, statistics.fmean(_gaps(standing)))


def _gaps(standing: Standing) -> list[float]:
    return [trial.measured("generalisation_gap") for trial in standing.trials]


def _deviation(runs: Sequence[Standing]) -> float:
    """Return the deviation of the difference of two batches' gaps: by what is left of the gaps without the effects of batch
    and seed, since runs of one seed are measured on the same samples. The prior of a loss's deviation counts beside it as in
    `ranking.seed_deviation`; with one seed it is all."""
    seeds = min(len(one.trials) for one in runs)
    gaps = np.array([_gaps(one)[:seeds] for one in runs])
    left = gaps - gaps.mean(axis=1, keepdims=True) - gaps.mean(axis=0, keepdims=True) + gaps.mean()
    degrees = (len(runs) - 1) * (seeds - 1)
    prior = surface.PRIOR.seed_deviation * late_gain(runs)
    variance = (PRIOR_DEGREES * prior**2 + float((left**2).sum())) / (PRIOR_DEGREES + degrees)
    return math.sqrt(2 / seeds * variance)


@dataclass(frozen=True)
class Overfitting:
    """A run whose validation loss rose while its training loss fell."""

    samples_seen: int
    """Where its validation loss was lowest."""
    lowest_val_loss: float
    val_loss: float
    """At its end."""
    loss_then: float
    """The training loss where the validation loss was lowest."""
    loss: float
    """The training loss at its end."""

    def __str__(self) -> str:
        return (
            f"validation loss was lowest after {self.samples_seen:,} samples ({loss_text(self.lowest_val_loss)}) and rose to "
            f"{loss_text(self.val_loss)} while training loss fell from {loss_text(self.loss_then)} to {loss_text(self.loss)}"
        )


EARLY = 0.5
"""A run whose loss is lowest before this share of it is longer than it need be, whatever it is trained with."""
CLEARLY = 4.0
"""By so many deviations of an evaluation a loss has to rise: on a plateau of white noise 3 of 100 runs do so by chance, however often they
are evaluated."""
FEWEST_BENDS = 4
"""Fewer do not tell what evaluations deviate by: a run of less than six evaluations is never said to overfit."""


def overfitting_of(trial: Trial) -> Overfitting | None:
    """Return where a run began to overfit; None where its validation loss did not clearly rise while its training loss fell."""
    points = _evaluations(trial)
    if not _clearly_rises(np.array([_known(point, "val_loss") for point in points])):
        return None
    lowest, last = min(points, key=lambda point: _known(point, "val_loss")), points[-1]
    found = Overfitting(
        int(_known(lowest, "samples_seen")),
        _known(lowest, "val_loss"),
        _known(last, "val_loss"),
        _known(lowest, "loss"),
        _known(last, "loss"),
    )
    rises = found.val_loss - found.lowest_val_loss > ALIKE * abs(found.lowest_val_loss)
    return found if rises and found.loss < found.loss_then else None


def long_overfitting_of(standing: Standing) -> Overfitting | None:
    """Return where the runs of a setting began to overfit, the first seed's, if that was in the first half of each: what they end at is then
    worse than what a part of them comes to, and says little of how fast the setting trains. None where it is not so."""
    found = [one for one in map(overfitting_of, standing.trials) if one is not None]
    early = [one for one in found if one.samples_seen <= EARLY * standing.config.sample_budget]
    return found[0] if len(early) == len(standing.trials) else None


def _clearly_rises(losses: Array) -> bool:
    """True if the last quarter of the losses lies above the lowest as many by more than single losses deviate by."""
    if len(losses) < FEWEST_BENDS + 2:
        return False
    num_last, first = max(2, len(losses) // 4), min(int(losses.argmin()), len(losses) - FEWEST_BENDS - 2)
    # A line has none; those of white noise have a deviation of sqrt(6) of its own.
    bends = np.abs(np.diff(losses[first:], 2))
    deviation = 1.48 * float(np.median(bends)) / math.sqrt(6)
    lowest_mean = np.lib.stride_tricks.sliding_window_view(losses, num_last).mean(axis=1).min()
    return bool(losses[-num_last:].mean() - lowest_mean > CLEARLY * deviation)


def _evaluations(trial: Trial) -> list[Metrics]:
    """Return the points at which validation and training loss are known; the last one, which the run ends with, once."""
    needed = ("samples_seen", "val_loss", "loss")
    known = [one for one in (*trial.history, trial.metrics) if all(one.get(key) is not None for key in needed)]
    return list({_known(one, "samples_seen"): one for one in known}.values())


def _known(point: Metrics, key: str) -> float:
    value = point[key]
    assert value is not None, key
    return value
