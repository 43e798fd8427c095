"""Which setting the runs speak for so far. Pure."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from batchscout.orchestrator.config.keys import StudyConfig
from batchscout.orchestrator.config.stages import Train
from batchscout.orchestrator.config.trial import baseline_batch
from batchscout.orchestrator.stages.context import StageContext
from batchscout.orchestrator.stages.estimates.generalisation import Overfitting, long_overfitting_of
from batchscout.orchestrator.stages.estimates.observed import observations, setting_of, surface_through
from batchscout.orchestrator.stages.estimates.ranking import Standing, standings
from batchscout.orchestrator.stages.estimates.speeds import off_plan
from batchscout.orchestrator.stages.estimates.surface import Room, Setting, Surface
from batchscout.orchestrator.stages.rates import rates
from batchscout.orchestrator.stages.train.lineup import Lineup, lineup_of
from batchscout.orchestrator.study.state import Study
from batchscout.orchestrator.study.trial import Trial, TrialState
from batchscout.orchestrator.units import probability_text

LIKELY = 0.8
"""The user's own setting is left for another one only where that is better with this probability: the more is asked for,
the more often a better one is passed over."""
SAME_RATE = 0.01
"""Learning rates that differ by a smaller share are one."""
MOST_TOLD = 3
"""Batches that are named while the stage runs."""


@dataclass(frozen=True)
class Choice:
    """What to train with, by now."""

    run: Standing
    regret: float
    """The share of the training time that it wastes on average, against the best setting."""
    own: Standing | None
    """The user's own batch and learning rate; None where that run did not complete."""
    overfitting: Overfitting | None
    """Where that one began to overfit, long before its end."""

    @property
    def setting(self) -> Setting:
        return setting_of(self.run.first)

    @property
    def is_own(self) -> bool:
        return self.own is not None and self.own.name == self.run.name


def full_runs(study: Study) -> list[Trial]:
    """Return the full runs that all answers are made of: those of `train`, and those that `learning_rate` adds at its winner."""
    return [*study.of_stage("train"), *study.of_stage("learning_rate")]


def surface_of(context: StageContext[Train], lineup: Lineup, room: Room | None = None) -> Surface | None:
    """Return the surface through what has ended so far; None before anything has completed. room: how far it is drawn beyond the
    candidates."""
    trials = full_runs(context.study)
    lost = _that_cannot_run(trials)
    known = {one.effective_batch_size for one in observations(trials, context.config.target_loss)}
    candidates = {one.split.effective_batch_size for one in lineup.candidates}
    kept = sorted(known | (candidates - lost))
    timings = {rate.effective_batch_size: rate.deviation for rate in rates(context)}
    return surface_through(trials, context.config, kept, timings, off_speed(context), room)


def off_speed(context: StageContext[Train]) -> dict[int, float]:
    """Return the batches that did not train at the speed that they were timed at, with the share of it that they had; none where time
    does not count. A run beside which something else had the machine says nothing of it."""
    if context.config.objective != "time":
        return {}
    return off_plan(context.undisturbed(full_runs(context.study)))


def _that_cannot_run(trials: Sequence[Trial]) -> set[int]:
    """Return the batches none of whose runs completed or may yet: each failed or ran out of memory."""
    cannot = {one.candidate for one in trials if one.state in (TrialState.FAILED, TrialState.OUT_OF_MEMORY)}
    others = {one.config.effective_batch_size for one in trials if one.candidate not in cannot}
    return {one.config.effective_batch_size for one in trials} - others


def so_far(context: StageContext[Train]) -> str:
    """Return the batches that may be the best, the likeliest first, with the probability of each."""
    surface = surface_of(context, lineup_of(context))
    if surface is None or len(surface.p_best) == 1:
        return ""
    likely = sorted(surface.p_best.items(), key=lambda one: -one[1])[:MOST_TOLD]
    return "P(best): " + ", ".join(f"effective batch {batch} {probability_text(p)}" for batch, p in likely)


def choice_of(context: StageContext[Train], surface: Surface) -> Choice:
    """Return the run to choose by now: the one that wastes least on average, but the user's own setting where that one is not
    better by a useful gain with enough probability, and where the ends of runs say little, as it overfits. Nothing is chosen that ended worse
    than that one."""
    ranking = standings(full_runs(context.study), context.config.target_loss)
    known = [one for one in ranking if math.isfinite(one.score)]  # one that never nears a target says nothing
    complete = [one for one in known if setting_of(one.first).effective_batch_size in surface.coordinates.rule]
    own = next((one for one in complete if _is_own(context, one)), None)
    reached = [one for one in complete if one.reached] or complete
    not_worse = [one for one in reached if own is None or one.score <= own.score] or reached
    run = min(not_worse, key=lambda one: surface.regret(setting_of(one.first)))
    overfitting = long_overfitting_of(own) if own and context.config.target_loss is None else None
    if own is not None and own is not run and (own.reached or not run.reached):
        p = p_better(context, surface, setting_of(run.first), setting_of(own.first))
        run = own if overfitting or p < LIKELY else run
    return Choice(run, surface.regret(setting_of(run.first)), own, overfitting)


def p_better(context: StageContext[Train], surface: Surface, setting: Setting, own: Setting) -> float:
    """Return the probability that a setting saves a useful gain of the training time of the user's own."""
    share = surface.time_share(surface.at(setting), surface.at(own))
    return float(np.mean(share < 1 - context.config.useful_gain))


def _is_own(context: StageContext[Train], standing: Standing) -> bool:
    config = standing.config
    rule = context.rule_rate(config.effective_batch_size)
    return standing.first.protected and abs(config.learning_rate / rule - 1) < SAME_RATE


def whose(config: StudyConfig, study: Study, baseline: Trial | None) -> str:
    """Return what the run that others are held against is to the user."""
    if not_run(config, study, baseline) is not None:
        return "the setting nearest to yours"
    return "your own setting" if has_own(study) else "batchscout's default setting"


def has_own(study: Study) -> bool:
    """True if the user has a setting to keep: the study file gives a batch or a learning rate."""
    given = study.given  # nothing in a study of an earlier version
    of_optimizer = given.get("optimizer")
    rate = isinstance(of_optimizer, dict) and {"lr", "reference_batch_size"} & of_optimizer.keys()
    return bool(rate) or "batch" in given or not given


def not_run(config: StudyConfig, study: Study, baseline: Trial | None) -> int | None:
    """Return the user's own effective batch where it was not run, as it does not fit or no split of it was timed, and the nearest one stands
    for it; None where it was."""
    own = baseline_batch(config)
    return own if has_own(study) and baseline is not None and baseline.config.effective_batch_size != own else None
