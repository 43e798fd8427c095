"""Does a knob that changes the loss learn as well? A short run with it against short runs without, on the same number of samples.

The run with the knob has the seed, and so the samples in their order, of the first run without it. Two more runs without it differ in
their seed alone: by how much the three differ is what chance makes, and the knob may end higher than the first by no more than that, or
by 0.4 % of the loss if that is more.
"""

from __future__ import annotations

from batchscout.orchestrator.config.mode import Mode
from batchscout.orchestrator.config.stages import Frontier
from batchscout.orchestrator.config.trial import baseline_batch
from batchscout.orchestrator.stages.context import StageContext
from batchscout.orchestrator.stages.estimates.ranking import ALIKE
from batchscout.orchestrator.stages.frontier.findings import Quality
from batchscout.orchestrator.study.trial import Proposal, TrialState
from batchscout.trainers.config import Split

STEPS = 40
"""Optimizer steps of each run."""
SEEDS = 3
"""Runs without the knob."""
QUALITY_STEPS = (SEEDS + 1) * STEPS
"""Optimizer steps of a mode's check, if no other mode's shares its runs without the knob."""
CHECKED_SHARE = 0.75
"""Probes and checks together may take this share of what the stage may take; the rest is for timing and verification."""


def quality_trials(context: StageContext[Frontier], mode: Mode, ground: Mode) -> list[Proposal]:
    """Return the runs of a mode's check. Those without the knob serve all modes of the same ground."""
    first = context.config.seeds[0]
    seeds = {_name(ground, number): first + number for number in range(SEEDS)}
    controls = [_proposal(context, name, ground, "control: how much seeds vary", seed) for name, seed in seeds.items()]
    return [*controls, _proposal(context, _name(mode, 0), mode, "quality: whether the knob learns as well", first)]


def _proposal(context: StageContext[Frontier], name: str, mode: Mode, role: str, seed: int) -> Proposal:
    if name in context.study.trials:
        return context.study.trials[name].proposal
    evaluated = context.config.evaluation_samples
    config = context.short_trial(quality_split(context), mode, STEPS, seed=seed, evaluation_samples=evaluated)
    return Proposal(name, "frontier", config, candidate=name, role=role, control=True)


def quality_split(context: StageContext[Frontier]) -> Split:
    """Return the batch of the runs: the baseline's in the smallest micro-batches, which fit wherever anything does."""
    smallest = max(context.stage.smallest, context.study.facts.smallest_micro_batch)
    accumulation = max(1, baseline_batch(context.config) // (smallest * context.config.world_size))
    return context.split(smallest, accumulation)


def quality_of(context: StageContext[Frontier], mode: Mode, ground: Mode) -> Quality | None:
    """Return what the check of a mode found; None while it has not ended."""
    names = [*(_name(ground, number) for number in range(SEEDS)), _name(mode, 0)]
    trials = [context.study.trials.get(name) for name in names]
    ended = [trial for trial in trials if trial is not None and trial.state.ended]
    if len(ended) < len(names):
        return None
    losses = [trial.metric("val_loss") if trial.state is TrialState.COMPLETE else None for trial in ended]
    *without, found = losses
    known = [loss for loss in without if loss is not None]
    if not known or without[0] is None:
        return None
    return Quality(found, without[0], max(ALIKE * abs(without[0]), max(known) - min(known)))


def _name(mode: Mode, number: int) -> str:
    return f"frontier-{mode}-quality-s{number}"
