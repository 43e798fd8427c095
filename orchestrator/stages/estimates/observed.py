"""What full training runs say about batches and learning rates: the observations that a surface goes through."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence

from batchscout.orchestrator.config.keys import StudyConfig
from batchscout.orchestrator.config.trial import scaled_learning_rate
from batchscout.orchestrator.stages.estimates import surface
from batchscout.orchestrator.stages.estimates.ranking import (
    Standing,
    by_candidate,
    late_gain_of_scores,
    seconds_to,
    seconds_until,
    standings,
)
from batchscout.orchestrator.stages.estimates.surface import (
    OFFSET_SPREADS,
    Coordinates,
    Observation,
    Room,
    Setting,
    Speed,
    Surface,
    fit,
)
from batchscout.orchestrator.study.causes import Cause
from batchscout.orchestrator.study.trial import Trial, TrialState

KEPT = 0.33
"""At a share r of its samples a run lies behind another by a distance of which r^KEPT is left at the end, as the median over the
recorded worlds: 0.80 from the half on, 0.63 from a quarter."""
UNSURE = 1.6
"""How far what is left may be off, in times of what is made up."""
FAR_BEHIND = 4.0
"""A run that comes to its losses this many times later than the best one is out of the race. How much later still is not told: the surface
would take so many seconds for a learning rate that is far off, and try others."""
UNSEEN = 0.4
"""How far the seconds until a target may be off, in times of those that a run did not show or that it lies behind the best one, whichever is more:
of the runs of the recorded worlds, cut at half, one in forty comes there sooner by more than two such deviations."""


def surface_through(
    trials: Sequence[Trial],
    config: StudyConfig,
    batches: Sequence[int],
    timings: Mapping[int, float] | None = None,
    off_speed: Mapping[int, float] | None = None,
    room: Room | None = None,
) -> Surface | None:
    """Return the surface over these batches through what the trials came to; None before one of them has completed.

    timings: how well the samples/s of each batch were known when its budget was made of them, as the standard deviation of their
    logarithm. off_speed: of a batch whose runs had another speed, the share of that one that they had. room: how far it is also drawn
    beyond these batches.
    """
    observed = [one for one in observations(trials, config.target_loss) if one.effective_batch_size in batches]
    if all(one.loss is None for one in observed):
        return None
    ranking = standings(trials, config.target_loss)
    rule = Coordinates({batch: scaled_learning_rate(config.optimizer, batch) for batch in batches})
    late_gain, off = late_gain_of_scores(ranking), off_speed or {}
    # Seconds to a target are those of the runs.
    worth = surface.PRIOR.doubling * late_gain if config.objective == "time" else 0.0
    speeds = {
        batch: Speed(worth * deviation / math.log(2), -worth * math.log2(off.get(batch, 1.0)))
        for batch, deviation in (timings or {}).items()
        if batch in rule.batches
    }
    return fit(
        _among_those_that_train(rule, observed),
        observed,
        late_gain,
        speeds,
        in_seconds=config.target_loss is not None,
        room=room,
    )


def _among_those_that_train(rule: Coordinates, observed: Sequence[Observation]) -> Coordinates:
    """Return the coordinates that the surface is fitted in: the rule's or, where the highest rate that trains lies further below that
    than the prior reaches, those whose rule is that rate. A run far from all that is expected would count as an outlier."""
    heights = [rule.u(one.effective_batch_size, one.learning_rate) for one in observed if one.loss is not None]
    if max(heights) >= -2 * max(OFFSET_SPREADS):
        return rule
    return Coordinates({batch: rule.rate(batch, max(heights)) for batch in rule.batches})


def setting_of(trial: Trial) -> Setting:
    return Setting(trial.config.effective_batch_size, trial.config.learning_rate)


def observations(trials: Sequence[Trial], target_loss: float | None) -> list[Observation]:
    """Return what each candidate came to, its seeds as one; those that still run, or were lost, are left out."""
    ranking = {one.name: one for one in standings(trials, target_loss)}
    observed = [_observation(name, seeds, ranking, target_loss) for name, seeds in by_candidate(trials).items()]
    return [one for one in observed if one is not None]


def _observation(
    name: str, seeds: list[Trial], ranking: dict[str, Standing], target_loss: float | None
) -> Observation | None:
    """Return what a candidate came to; None while it runs, and where it says nothing about its batch."""
    setting = setting_of(seeds[0])
    if name in ranking and ranking[name].reached:
        one = ranking[name]
        return Observation(setting.effective_batch_size, setting.learning_rate, one.score, len(seeds), one.squares)
    if not all(trial.state.ended for trial in seeds):
        return None
    if any(trial.state is TrialState.OUT_OF_MEMORY for trial in seeds):
        return None  # its batch is trained again, in smaller micro-batches
    if any(trial.cause is Cause.DIVERGED for trial in seeds):
        return Observation(setting.effective_batch_size, setting.learning_rate, None)
    return (
        _extrapolated(setting, seeds, ranking)
        if target_loss is None
        else _in_seconds(setting, seeds, ranking, target_loss)
    )


def _in_seconds(
    setting: Setting, seeds: list[Trial], ranking: dict[str, Standing], target_loss: float
) -> Observation | None:
    """Return when a candidate that was cut, or missed the target, comes to it: as many times later than the best of all as it came to its last
    loss. None where no run comes near the target, and where its seconds say nothing of its batch."""
    best = next(iter(ranking.values()), None)
    if best is None or not math.isfinite(best.score) or any(trial.cause is Cause.LOW_THROUGHPUT for trial in seeds):
        return None
    seconds, unsure = list[float](), list[float]()
    for trial in seeds:
        curve = trial.curve("train_seconds")
        if not curve:
            return None
        until, loss = curve[-1]
        known = seconds_to(trial, target_loss)
        if math.isinf(known):
            behind = until / statistics.fmean(seconds_until(one, loss) for one in best.trials)
            known = min(behind, FAR_BEHIND) * best.score
            unsure.append(UNSEEN * (known - min(until, best.score)))
        seconds.append(known)
    return Observation(
        setting.effective_batch_size,
        setting.learning_rate,
        statistics.fmean(seconds),
        len(seeds),
        extra_deviation=sum(unsure) / len(seeds),
    )


def _extrapolated(setting: Setting, seeds: list[Trial], ranking: dict[str, Standing]) -> Observation | None:
    """Return what a candidate that was cut, at a rung or after one, would have come to, by its distance to the best of its batch that went on, or to the
    best of all where none of its batch did: on the way a larger batch still catches up."""
    of_batch = [
        one for one in ranking.values() if setting_of(one.first).effective_batch_size == setting.effective_batch_size
    ]
    for level in reversed(range(len(seeds[0].config.rungs))):
        ours = _mean_at(seeds, level)
        rivals = [(one, _mean_at(one.trials, level)) for one in of_batch or ranking.values()]
        ahead = next(((one, value) for one, value in rivals if value is not None), None)
        if ours is not None and ahead is not None:
            behind, config = ours - ahead[1], seeds[0].config
            kept = (config.rungs[level] / config.sample_budget) ** KEPT
            loss = min(ahead[0].score + kept * behind, ours)  # the one ahead may have ended higher than it was there
            deviation = UNSURE * (1 - kept) * abs(behind)
            batch, rate = setting.effective_batch_size, setting.learning_rate
            return Observation(batch, rate, loss, len(seeds), extra_deviation=deviation)
    return None


def _mean_at(trials: Sequence[Trial], level: int) -> float | None:
    """Return the mean loss of the trials at their own rung of this level; None where one has none."""
    values = [t.rungs.get(t.config.rungs[level]) if level < len(t.config.rungs) else None for t in trials]
    known = [value for value in values if value is not None]
    return statistics.fmean(known) if len(known) == len(values) else None
