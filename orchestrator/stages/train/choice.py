"""Which batch the runs speak for so far. Pure."""

from __future__ import annotations

from batchscout.orchestrator.config.stages import Train
from batchscout.orchestrator.stages.context import StageContext
from batchscout.orchestrator.stages.estimates.observed import observations, surface_through
from batchscout.orchestrator.stages.estimates.ranking import standings
from batchscout.orchestrator.stages.estimates.surface import Surface
from batchscout.orchestrator.stages.rates import rates
from batchscout.orchestrator.stages.train.lineup import Lineup, lineup_of
from batchscout.orchestrator.study.trial import Trial, TrialState

ENOUGH = 0.9
"""The probability of having found the best batch at which no further run is asked for."""
MOST_TOLD = 3
"""Batches that are named while the stage runs."""


def surface_of(context: StageContext[Train], lineup: Lineup) -> Surface | None:
    """Return the surface through what has ended so far; None before anything has completed."""
    trials = context.trials()
    lost = {t.config.effective_batch_size for t in trials if _cannot_run(t)}
    known = {one.effective_batch_size for one in observations(trials, context.config.target_loss)}
    batches = [one.split.effective_batch_size for one in lineup.candidates]
    kept = [batch for batch in batches if batch in known or batch not in lost]
    timings = {rate.effective_batch_size: rate.deviation for rate in rates(context)}
    return surface_through(trials, context.config, kept, timings)


def _cannot_run(trial: Trial) -> bool:
    return trial.state in (TrialState.FAILED, TrialState.OUT_OF_MEMORY)


def so_far(context: StageContext[Train]) -> str:
    """Return the batches that may be the best, the likeliest first, with the probability that none is better by a useful gain."""
    surface = surface_of(context, lineup_of(context))
    if surface is None or len(surface.p_best) == 1:
        return ""
    likely = sorted(surface.p_best.items(), key=lambda one: -one[1])[:MOST_TOLD]
    return "P(best): " + ", ".join(f"effective batch {batch} {p:.2f}" for batch, p in likely)


def choice_of(context: StageContext[Train], surface: Surface) -> int:
    """Return the batch to choose by now: the baseline where it is good enough, else the likeliest of those that were
    run."""
    ranking = standings(context.trials(), context.config.target_loss)
    complete = {one.trials[0].config.effective_batch_size for one in ranking}
    baseline = lineup_of(context).baseline.split.effective_batch_size
    run = [batch for batch in surface.coordinates.batches if batch in complete]
    if surface.p_best.get(baseline, 0.0) >= ENOUGH and baseline in run:
        return baseline
    return max(run, key=lambda batch: surface.p_best[batch])
