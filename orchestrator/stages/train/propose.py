"""The train stage's runs: the first ones at the scaling rule's rates, then those that would tell most."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from orchestrator.config.stages import Train
from orchestrator.config.trial import scaled_learning_rate, warmup_samples
from orchestrator.stages.candidates import Candidate, seeded
from orchestrator.stages.context import StageContext
from orchestrator.stages.estimates.observed import setting_of
from orchestrator.stages.estimates.surface import Setting, next_setting
from orchestrator.stages.train.choice import ENOUGH, choice_of, surface_of
from orchestrator.stages.train.lineup import Lineup, lineup_of
from orchestrator.study.trial import Proposal

FIRST_RUNS = 3
SAME_RATE = 0.01
SNAPSHOT_SHARES = (0.1, 0.25, 0.5, 1.0)


def propose(context: StageContext[Train]) -> list[Proposal]:
    """Return the first runs, those proposed before, and the runs that would tell most now, one for each free lane."""
    lineup = lineup_of(context)
    asked = _asked(context, lineup)
    proposals = [proposal for setting in asked for proposal in _runs_of(context, lineup, setting)]
    trials = context.study.trials
    if any(proposal.id not in trials for proposal in proposals):
        return proposals
    num_busy = len({t.candidate for t in context.trials() if not t.state.ended})
    for _ in range(min(context.num_lanes - num_busy, context.stage.max_runs - len(asked))):
        setting = _next(context, lineup, asked)
        if setting is None:
            break
        asked.append(setting)
        proposals += _runs_of(context, lineup, setting)
    return proposals


def _asked(context: StageContext[Train], lineup: Lineup) -> list[Setting]:
    """Return the first settings, and those that were asked for since."""
    asked = [_at_rule(context, one) for one in _first(lineup)][: context.stage.max_runs]
    for trial in context.trials():
        setting = setting_of(trial)
        if not any(_same(setting, other) for other in asked):
            asked.append(setting)
    return asked


def _first(lineup: Lineup) -> list[Candidate]:
    """Return the baseline and the batches furthest from each other."""
    ordered = list(lineup.candidates)
    picked = [lineup.baseline, ordered[0], ordered[-1], ordered[len(ordered) // 2], *ordered]
    distinct = list({one.split.effective_batch_size: one for one in picked}.values())
    return distinct[:FIRST_RUNS]


def _at_rule(context: StageContext[Train], candidate: Candidate) -> Setting:
    batch = candidate.split.effective_batch_size
    return Setting(batch, scaled_learning_rate(context.config.optimizer, batch))


def _same(a: Setting, b: Setting) -> bool:
    return a.effective_batch_size == b.effective_batch_size and abs(a.learning_rate / b.learning_rate - 1) < SAME_RATE


def _runs_of(context: StageContext[Train], lineup: Lineup, setting: Setting) -> list[Proposal]:
    batch = setting.effective_batch_size
    candidate = next(one for one in lineup.candidates if one.split.effective_batch_size == batch)
    rungs = context.stage.pruner.rungs(context.config.sample_budget, candidate.sample_budget)
    name = f"train-{candidate.split}"
    if not _same(setting, _at_rule(context, candidate)):
        name += f"-lr{setting.learning_rate:.3g}"
        candidate = replace(candidate, protected=False)
    snapshots = _snapshots(context, candidate) if candidate.protected else ()
    return seeded(context, name, candidate, learning_rate=setting.learning_rate, rungs=rungs, noise_snapshots=snapshots)


def _snapshots(context: StageContext[Train], candidate: Candidate) -> tuple[int, ...]:
    """Return when the protected run measures its gradient noise: once it is warm, and at shares of its way."""
    if not context.config.statistics:
        return ()
    warm = warmup_samples(context.config.optimizer, candidate.split.effective_batch_size, candidate.sample_budget)
    counts = {warm, *(round(share * candidate.sample_budget) for share in SNAPSHOT_SHARES)}
    return tuple(sorted(count for count in counts if count >= max(1, warm)))


def _next(context: StageContext[Train], lineup: Lineup, asked: Sequence[Setting]) -> Setting | None:
    """Return the run that would tell most about which batch is best; None where that is known well enough."""
    surface = surface_of(context, lineup)
    if surface is None:
        return None
    choice = choice_of(context, surface)
    if surface.p_best[choice] >= ENOUGH:
        return None
    tried = [setting for setting in asked if setting.effective_batch_size in surface.coordinates.rule]
    return next_setting(surface, tried, choice)
