"""The critical batch at a point, and whether it grew, from what branches with larger batches ended at. Pure.

At a point the critical batch is the largest whose loss, after the same samples, comes back to that of the chosen batch
(Merrill et al. 2025, arXiv 2505.23971). A loss has come back where it is higher by no more than the seeds' spread: the
deviation of the difference of two runs that differ in their seeds alone. The branches of a seed begin with the same weights
and take the same samples, so losses are compared within seeds.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from batchscout.orchestrator.config.stages import Branch
from batchscout.orchestrator.stages.branch.findings import BranchLoss, Growth, PointFindings
from batchscout.orchestrator.stages.branch.source import Source, rescaled_rate
from batchscout.orchestrator.stages.context import StageContext
from batchscout.orchestrator.stages.estimates.ranking import seed_deviation, standings
from batchscout.orchestrator.stages.estimates.surface import FAR
from batchscout.orchestrator.stages.train.choice import full_runs
from batchscout.orchestrator.study.causes import Cause
from batchscout.orchestrator.study.trial import Trial, TrialState
from batchscout.trainers.noise.student_t import t_quantile

PAIRED = 0.5
"""How much two branches of one seed differ by chance, as a share of the deviation from seed to seed, where there is but one
seed: they have their first weights and all samples in common. Two small language models with 2 and 3 seeds had 0.4 and 0.6."""


CONFIDENCE = 0.9
"""An excess is told from none with this probability."""
DECISIVE = 1.28
"""The standard normal quantile of it."""


@dataclass(frozen=True)
class _Excess:
    """How much higher than the chosen batch's a larger batch's losses are, seed by seed."""

    by_seed: tuple[float, ...]

    @property
    def mean(self) -> float:
        return statistics.fmean(self.by_seed)


@dataclass(frozen=True)
class _Yardstick:
    """What an excess is held against."""

    seed_deviation: float
    """How far a run's loss deviates from seed to seed."""
    error: float
    """How far an excess near 0 deviates, with one seed."""
    reach: float
    """So many standard errors make a probability of 0.9."""

    @property
    def spread(self) -> float:
        """What two runs differ by that differ in their seeds alone: an excess within it is none."""
        return math.sqrt(2) * self.seed_deviation

    def error_of(self, excess: _Excess) -> float:
        return self.error * _scale(excess, self.seed_deviation) / math.sqrt(len(excess.by_seed))

    def comes_back(self, excess: _Excess) -> bool | None:
        margin = self.reach * self.error_of(excess)
        if excess.mean + margin <= self.spread:
            return True
        return False if excess.mean - margin > self.spread else None


def _scale(excess: _Excess, deviation: float) -> float:
    """Return how uncertain an excess is, beside one near 0: what lies far above is less exact."""
    return math.hypot(1.0, FAR * excess.mean / deviation) if deviation else 1.0


def _yardstick(excesses: Sequence[_Excess], deviation: float) -> _Yardstick:
    """Return the yardstick that the seeds make: all points and batches together, as each has few of them.

    With one seed the error is a share of the deviation from seed to seed.
    """
    degrees = sum(len(one.by_seed) - 1 for one in excesses)
    if not degrees:
        return _Yardstick(deviation, PAIRED * deviation, DECISIVE)
    squares = sum((x - one.mean) ** 2 / _scale(one, deviation) ** 2 for one in excesses for x in one.by_seed)
    return _Yardstick(deviation, math.sqrt(squares / degrees), t_quantile(degrees, CONFIDENCE))


def points_of(context: StageContext[Branch], source: Source) -> tuple[PointFindings, ...]:
    """Return what the branches from every point say; a point of which nothing is known is left out."""
    keys = [(point, multiple) for point in source.points for multiple in source.multiples if multiple > 1]
    excesses = {key: excess for key in keys if (excess := _excess(context, source, *key)) is not None}
    yardstick = _yardstick(list(excesses.values()), seed_deviation(standings(full_runs(context.study))))
    found = (
        _point(source, point, (_chosen(context, source, point), *_larger(context, source, point, excesses, yardstick)))
        for point in source.points
    )
    return tuple(point for point in found if point is not None)


def seeds_at(context: StageContext[Branch], source: Source, point: int, multiple: int) -> dict[int, Trial]:
    """Return the branches from a point with a multiple of the batch, by their seeds."""
    batch = multiple * source.effective_batch_size
    return {
        trial.config.seed: trial
        for trial in context.trials()
        if trial.config.branch_from is not None
        and trial.config.branch_from.samples == point
        and trial.config.effective_batch_size == batch
    }


def _excess(context: StageContext[Branch], source: Source, point: int, multiple: int) -> _Excess | None:
    """Return how much higher the losses are with so many times the batch; None where no seed tells."""
    chosen, larger = seeds_at(context, source, point, 1), seeds_at(context, source, point, multiple)
    both = [(chosen[seed], trial) for seed, trial in larger.items() if seed in chosen]
    complete = [(a, b) for a, b in both if a.state is TrialState.COMPLETE and b.state is TrialState.COMPLETE]
    differences = tuple(b.measured("val_loss") - a.measured("val_loss") for a, b in complete)
    return _Excess(differences) if differences else None


def _chosen(context: StageContext[Branch], source: Source, point: int) -> BranchLoss | None:
    """Return what the branches with the chosen batch came to; None where none has completed."""
    losses = _losses(seeds_at(context, source, point, 1))
    if not losses:
        return None
    rate = source.trial.config.learning_rate
    return BranchLoss(source.effective_batch_size, rate, statistics.fmean(losses), 0.0, 0.0, comes_back=True)


def _larger(
    context: StageContext[Branch],
    source: Source,
    point: int,
    excesses: Mapping[tuple[int, int], _Excess],
    yardstick: _Yardstick,
) -> list[BranchLoss | None]:
    """Return what the branches with each larger batch came to; None where nothing is known."""
    found: list[BranchLoss | None] = []
    for multiple in source.multiples[1:]:
        batch, branches = multiple * source.effective_batch_size, seeds_at(context, source, point, multiple)
        rate, excess = rescaled_rate(context, source, batch), excesses.get((point, multiple))
        if any(trial.cause is Cause.DIVERGED for trial in branches.values()):
            found.append(BranchLoss(batch, rate, None, None, 0.0, comes_back=False))
        elif excess is None:
            found.append(None)
        else:
            loss, back = statistics.fmean(_losses(branches)), yardstick.comes_back(excess)
            found.append(BranchLoss(batch, rate, loss, excess.mean, yardstick.error_of(excess), back))
    return found


def _losses(branches: Mapping[int, Trial]) -> list[float]:
    return [trial.measured("val_loss") for trial in branches.values() if trial.state is TrialState.COMPLETE]


def _point(source: Source, samples_seen: int, losses: Sequence[BranchLoss | None]) -> PointFindings | None:
    """Return the critical batch at a point, whose first loss is the chosen batch's; None where nothing can be told.

    What is lost with a batch is lost with larger ones, too: where the losses say otherwise, what lies between is open. It is
    determined where no batch that was to be tried lies between the largest that comes back and the smallest that does not.
    """
    known = tuple(loss for loss in losses if loss is not None)
    if losses[0] is None or len(known) < 2:
        return None
    back = [one.effective_batch_size for one in known if one.comes_back]
    lost = [one.effective_batch_size for one in known if one.comes_back is False]
    low = max(batch for batch in back if batch < min(lost, default=math.inf))
    high = min((batch for batch in lost if batch > max(back)), default=None)
    batches = [multiple * source.effective_batch_size for multiple in source.multiples]
    is_open = any(low < batch < (high or math.inf) for batch in batches)
    return PointFindings(samples_seen, known, low, high, None if is_open else low)


def growth(points: Sequence[PointFindings]) -> Growth:
    """Return whether the critical batch grew from the first point to the last.

    The same batch at both is no growth only where a larger one was tried and lost at both.
    """
    if len(points) < 2:
        return "undetermined"
    first, last = points[0], points[-1]
    if first.high is not None and first.high <= last.low:
        return "grew"
    if last.high is not None and last.high <= first.low:
        return "shrank"
    is_known = None not in (first.critical_batch_size, last.critical_batch_size, first.high, last.high)
    return "stayed" if is_known else "undetermined"
