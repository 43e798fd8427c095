"""What measurements mean: goodput, and ranking under an objective."""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import NormalDist

import numpy as np

from batchscout.orchestrator.stages.estimates import surface
from batchscout.orchestrator.study.trial import Trial, TrialState
from batchscout.trainers.config import TrialConfig

PRIOR_DEGREES = 2
"""How many degrees of freedom the prior of the deviation from seed to seed counts as: its logarithm has a spread of 0.6."""
LEAST_GAIN, USUAL_GAIN = 0.01, 0.07
"""Shares of the loss: what counts as a late gain at least, and where no run was evaluated in its first half."""
TINY = 1e-12
NEAREST = 3
"""By so many falls of a loss from one evaluation to the next it is told how long a fall takes: single ones are noise."""
ALIKE = 0.004
"""Losses that differ by a smaller share of themselves are alike, however little the seeds make."""


def alike(one: float, other: float) -> bool:
    """True if neither of two losses or scores is told to be the lower."""
    return abs(one - other) <= ALIKE * min(abs(one), abs(other))


def token_efficiency(effective_batch_size: int, noise_scale: float) -> float:
    """Return the progress per token, 1 / (1 + B / B_noise), which nears 1 for a small batch (McCandlish et al. 2018,
    arXiv 1812.06162)."""
    return 1 / (1 + effective_batch_size / noise_scale)


def goodput(tokens_per_second: float, effective_batch_size: int, noise_scale: float) -> float:
    """Return tokens/s times progress per token (Pollux, Qiao et al. 2021, arXiv 2008.12260)."""
    return tokens_per_second * token_efficiency(effective_batch_size, noise_scale)


@dataclass(frozen=True)
class Standing:
    """A candidate at the end of its runs, over its seeds; the smaller its score the better."""

    name: str
    trials: tuple[Trial, ...]
    score: float
    val_loss: float
    squares: float
    """What its seeds' scores are off that one by, squared and added up."""
    reached: bool = True
    """False if a seed never reached the target loss: then its seconds are a projection."""

    @property
    def first(self) -> Trial:
        """The run of the first seed; the others differ in the seed alone."""
        return self.trials[0]

    @property
    def config(self) -> TrialConfig:
        return self.first.config


def standings(trials: Sequence[Trial], target_loss: float | None = None) -> list[Standing]:
    """Return the candidates all of whose seeds completed, the best first.

    target_loss: where it is given, the score is the seconds of training until it is reached; else the validation loss.
    """
    finished = [
        _standing(name, seeds, target_loss)
        for name, seeds in by_candidate(trials).items()
        if all(t.state is TrialState.COMPLETE and t.metric("val_loss") is not None for t in seeds)
    ]
    return sorted(finished, key=lambda standing: (not standing.reached, standing.score, standing.val_loss))


def _standing(name: str, seeds: list[Trial], target_loss: float | None) -> Standing:
    losses = [trial.measured("val_loss") for trial in seeds]
    loss = statistics.fmean(losses)
    if target_loss is None:
        return Standing(name, tuple(seeds), loss, loss, _squares(losses))
    seconds = [seconds_until(trial, target_loss) for trial in seeds]
    reached = all(math.isfinite(seconds_to(trial, target_loss)) for trial in seeds)
    return Standing(name, tuple(seeds), statistics.fmean(seconds), loss, _squares(seconds), reached)


def _squares(values: Sequence[float]) -> float:
    """Return what values are off their mean by, squared and added up."""
    mean = statistics.fmean(values)
    return sum((value - mean) ** 2 for value in values)


def by_candidate(trials: Sequence[Trial]) -> dict[str, list[Trial]]:
    """Return the trials of each candidate, in the order in which they were proposed."""
    found: dict[str, list[Trial]] = {}
    for trial in trials:
        found.setdefault(trial.candidate, []).append(trial)
    return found


def settle(ranking: Sequence[Standing]) -> Standing:
    """Return, of those tied with the best, the baseline, or else the smallest effective batch: it needs the least
    memory."""
    equals = tied_with_best(ranking)
    return min(equals, key=lambda one: (not one.first.protected, one.config.effective_batch_size))


def tied_with_best(ranking: Sequence[Standing]) -> list[Standing]:
    """Return the best, and those that the seeds alone may have put behind it.

    Who never reached the target is not tied with who did, however soon its loss is projected to. Where none comes near it, no two are tied.
    """
    best = ranking[0]
    if math.isinf(best.score):
        return [best]
    width = tie_width(ranking)
    return [one for one in ranking if one.reached == best.reached and one.score <= best.score + width]


def tie_width(ranking: Sequence[Standing]) -> float:
    """Return the difference of two scores that the seeds alone may make: the deviation of a difference of two means."""
    num_seeds = min(len(one.trials) for one in ranking)
    return math.sqrt(2 / num_seeds) * seed_deviation(ranking) * _score_per_loss(ranking)


def luck_of_the_best(ranking: Sequence[Standing], num_tried: int) -> float:
    """Return by how much the best of so many changes to a run may beat it by its seeds alone: as rarely as a single one does by `tie_width`,
    which is once in six."""
    normal = NormalDist()
    return normal.inv_cdf(normal.cdf(1) ** (1 / num_tried)) * tie_width(ranking)


def late_gain_of_scores(ranking: Sequence[Standing]) -> float:
    """Return the late gain in units of the score: seconds, for a target loss."""
    return max(late_gain(ranking) * _score_per_loss(ranking), TINY)


def _score_per_loss(ranking: Sequence[Standing]) -> float:
    """Return by how much the score of the best changes where its loss changes by 1. Of seconds it is the share that they grow by while its
    loss falls by so much, at the evaluations nearest to the target; where none tells it, a late gain takes twice the time."""
    best = ranking[0]
    if best.score == best.val_loss:
        return 1.0
    points, at = [point for point in _evaluations(best.first) if point[1] > 0], math.log(max(best.score, TINY))
    falls = [(before, after) for before, after in itertools.pairwise(points) if before[0] > after[0]]
    nearest = sorted(falls, key=lambda fall: abs(math.log(fall[1][1]) - at))[:NEAREST]
    shares = [abs(math.log(after[1] / before[1])) / (before[0] - after[0]) for before, after in nearest]
    return best.score * (statistics.median(shares) if shares else math.log(2) / late_gain(ranking))


def late_gain(ranking: Sequence[Standing]) -> float:
    """Return by how much the loss of a candidate falls over the second half of its samples, as the median of all.

    It is the scale on which seeds and learning rates tell: 0.15 of it is what runs of the recorded worlds deviate by from
    seed to seed, whatever the model, its length and its optimizer (benchmarks/late_gain.py). It is at least LEAST_GAIN of
    the loss, as a loss that has come to rest still differs between seeds.
    """
    halves = [(one, loss_at_samples(one.trials, one.config.sample_budget // 2)) for one in ranking]
    gains = [abs(half - one.val_loss) for one, half in halves if half is not None]
    loss = statistics.median(abs(one.val_loss) for one in ranking)
    return max(statistics.median(gains) if gains else USUAL_GAIN * loss, LEAST_GAIN * loss, TINY)


def seed_deviation(ranking: Sequence[Standing]) -> float:
    """Return the deviation of a run's final loss from seed to seed, over all candidates.

    A prior, the share of the late gain that runs of the recorded worlds deviate by (see `surface.PRIOR`), counts as
    PRIOR_DEGREES degrees of freedom beside what the seeds show, as few seeds may be alike by chance; with one seed each
    it is the prior.
    """
    prior = surface.PRIOR.seed_deviation * late_gain(ranking)
    squares = sum(_squares([trial.measured("val_loss") for trial in one.trials]) for one in ranking)
    degrees = sum(len(one.trials) - 1 for one in ranking)
    return math.sqrt((PRIOR_DEGREES * prior**2 + squares) / (PRIOR_DEGREES + degrees))


def seconds_to(trial: Trial, target_loss: float) -> float:
    """Return the training seconds, without compiling, evaluating and waiting, until the trial reaches the target.

    They are interpolated between evaluations. Infinity if it never does.
    """
    before: tuple[float, float] | None = None
    for loss, seconds in _evaluations(trial):
        if loss <= target_loss:
            return seconds if before is None else _crossing(before, (loss, seconds), target_loss)
        before = (loss, seconds)
    return math.inf


def is_first_seen_past(seeds: Sequence[Trial], target_loss: float) -> bool:
    """True if the first evaluation of one of them is at the target already: how much sooner it came there is not known."""
    return any(loss <= target_loss for trial in seeds for loss, _ in _evaluations(trial)[:1])


def seconds_until(trial: Trial, loss: float) -> float:
    """Return the training seconds until the trial reaches a loss, projected where it never does."""
    seconds = seconds_to(trial, loss)
    return projected_seconds_to(trial, loss) if math.isinf(seconds) else seconds


def projected_seconds_to(trial: Trial, target_loss: float) -> float:
    """Return the training seconds at which the trial would reach the target if its loss went on as between its last two
    evaluations, linearly in the log of the seconds. Infinity if it did not fall."""
    points = [point for point in _evaluations(trial) if point[1] > 0][-2:]
    if len(points) < 2 or points[1][0] >= points[0][0]:
        return math.inf
    (first, early), (last, late) = points
    return late * math.exp(min(50.0, (last - target_loss) / (first - last) * math.log(late / early)))


def loss_at_samples(seeds: Sequence[Trial], samples_seen: int) -> float | None:
    """Return the mean validation loss after so many samples, interpolated between evaluations; None where a seed has none
    on both sides."""
    losses = [_loss_at(trial, samples_seen) for trial in seeds]
    known = [loss for loss in losses if loss is not None]
    return statistics.fmean(known) if len(known) == len(losses) else None


def _loss_at(trial: Trial, samples_seen: int) -> float | None:
    curve = sorted(trial.curve("samples_seen"))
    if not curve or not curve[0][0] <= samples_seen <= curve[-1][0]:
        return None
    return float(np.interp(samples_seen, [x for x, _ in curve], [y for _, y in curve]))


def _crossing(before: tuple[float, float], after: tuple[float, float], loss: float) -> float:
    share = (before[0] - loss) / (before[0] - after[0])
    return before[1] + share * (after[1] - before[1])


def _evaluations(trial: Trial) -> list[tuple[float, float]]:
    """Return (validation loss, training seconds) of every evaluation that has both."""
    return [(loss, seconds) for seconds, loss in trial.curve("train_seconds")]
