"""What full training runs say about batches and learning rates: the observations that a surface goes through."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence

from orchestrator.config.keys import StudyConfig
from orchestrator.config.trial import scaled_learning_rate
from orchestrator.stages.estimates.ranking import Standing, by_candidate, scale_of, standings
from orchestrator.stages.estimates.surface import Coordinates, Observation, Scale, Setting, Speed, Surface, fit
from orchestrator.study.causes import Cause
from orchestrator.study.trial import PLANNED_RATE, Trial, TrialState

AS_PLANNED = 0.8
"""Within this factor the speed of a run is that which its budget was made of: that was timed in turns and without statistics, which
take a part of each of a run's first steps."""


def surface_through(
    trials: Sequence[Trial], config: StudyConfig, batches: Sequence[int], timings: Mapping[int, float] | None = None
) -> Surface | None:
    """Return the surface over these batches through what the trials came to; None before one of them has completed.

    timings: how well the samples/s of each batch were known when its budget was made of them, as the standard deviation of their
    logarithm.
    """
    observed = observations(trials, config.target_loss)
    if all(one.loss is None for one in observed):
        return None
    ranking = standings(trials, config.target_loss)
    rule, scale = {batch: scaled_learning_rate(config.optimizer, batch) for batch in batches}, scale_of(ranking)
    worth, shares = _worth_of_speed(config, scale, ranking), shares_of_plan(trials)
    speeds = {
        batch: Speed(worth * deviation, _lost(config, scale, shares.get(batch, 1.0)))
        for batch, deviation in (timings or {}).items()
        if batch in rule
    }
    return fit(Coordinates(rule), observed, scale, speeds)


def shares_of_plan(trials: Sequence[Trial]) -> dict[int, float]:
    """Return the speed of each batch's runs as a share of that which their budgets were made of, beside what is usual among
    them: what slows all alike tells nothing."""
    known = [(t, share) for t in trials if (share := _share_of_plan(t)) is not None]
    ended = [share for trial, share in known if trial.state is TrialState.COMPLETE]
    if not ended:
        return {}
    by_batch = dict[int, list[float]]()
    for trial, share in known:
        by_batch.setdefault(trial.config.effective_batch_size, []).append(share)
    usual = statistics.median(ended)
    return {batch: statistics.median(shares) / usual for batch, shares in by_batch.items()}


def is_off(share: float) -> bool:
    """True of a share of its planned speed with which a batch was not what it was timed as."""
    return abs(math.log(share)) > math.log(1 / AS_PLANNED)


def _share_of_plan(trial: Trial) -> float | None:
    planned, seconds = trial.proposal.expected.get(PLANNED_RATE), trial.metric("step_seconds")
    return trial.config.effective_batch_size / seconds / planned if planned and seconds else None


def _lost(config: StudyConfig, scale: Scale, share: float) -> float:
    """Return what a batch's loss would have been higher by with the samples that its true speed makes of the same time. Seconds to
    a target hold that already."""
    return -math.log2(share) * scale.late_gain if config.objective == "time" and is_off(share) else 0.0


def _worth_of_speed(config: StudyConfig, scale: Scale, ranking: Sequence[Standing]) -> float:
    """Return by how much a score changes with the logarithm of the speed. A run of twice the speed has twice the samples in its
    time, which is worth the late gain; to a target it takes half the seconds."""
    match config.objective:
        case "samples":
            return 0.0
        case "time":
            return scale.late_gain / math.log(2)
        case "target":
            return statistics.median(one.score for one in ranking)


def setting_of(trial: Trial) -> Setting:
    return Setting(trial.config.effective_batch_size, trial.config.learning_rate)


def observations(trials: Sequence[Trial], target_loss: float | None) -> list[Observation]:
    """Return what each candidate came to, its seeds as one; those that still run, or were lost, are left out."""
    ranking = {one.name: one for one in standings(trials, target_loss)}
    to_target = target_loss is not None
    observed = [_observation(name, seeds, ranking, to_target) for name, seeds in by_candidate(trials).items()]
    return [one for one in observed if one is not None]


def _observation(name: str, seeds: list[Trial], ranking: dict[str, Standing], to_target: bool) -> Observation | None:
    """Return what a candidate came to; None while it runs, and where it says nothing about its batch.

    to_target: true where scores are seconds, which the loss of one that was cut cannot tell.
    """
    setting = setting_of(seeds[0])
    if name in ranking:
        if not math.isfinite(ranking[name].score):
            return None  # it never reached the target, and was not on its way there
        return Observation(setting.effective_batch_size, setting.learning_rate, ranking[name].score, len(seeds))
    if not all(trial.state.ended for trial in seeds):
        return None
    if any(trial.cause is Cause.DIVERGED for trial in seeds):
        return Observation(setting.effective_batch_size, setting.learning_rate, None)
    return None if to_target else _extrapolated(setting, seeds, ranking)


def _extrapolated(setting: Setting, seeds: list[Trial], ranking: dict[str, Standing]) -> Observation | None:
    """Return what a candidate that was cut at a rung would have come to, had it kept its distance to the best that went
    on; it is uncertain by as much."""
    for level in reversed(range(len(seeds[0].config.rungs))):
        ours = _mean_at(seeds, level)
        rivals = [(one, _mean_at(one.trials, level)) for one in ranking.values()]
        ahead = next(((one, value) for one, value in rivals if value is not None), None)
        if ours is not None and ahead is not None:
            behind = ours - ahead[1]
            loss = ahead[0].score + behind
            return Observation(setting.effective_batch_size, setting.learning_rate, loss, len(seeds), abs(behind))
    return None


def _mean_at(trials: Sequence[Trial], level: int) -> float | None:
    """Return the mean loss of the trials at their own rung of this level; None where one has none."""
    values = [t.rungs.get(t.config.rungs[level]) if level < len(t.config.rungs) else None for t in trials]
    known = [value for value in values if value is not None]
    return statistics.fmean(known) if len(known) == len(values) else None
