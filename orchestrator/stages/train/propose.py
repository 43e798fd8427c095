"""The train stage's runs: the first ones at the scaling rule's rates, then those that would tell most."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

from batchscout.orchestrator.config.stages import Train
from batchscout.orchestrator.config.trial import warmup_samples
from batchscout.orchestrator.stages.candidates import Candidate, seeded_where_it_fits
from batchscout.orchestrator.stages.context import StageContext
from batchscout.orchestrator.stages.estimates.next_run import APART, next_run
from batchscout.orchestrator.stages.estimates.observed import setting_of
from batchscout.orchestrator.stages.estimates.ranking import alike, is_first_seen_past, standings
from batchscout.orchestrator.stages.estimates.speeds import SLOW_RUNS, num_too_slow
from batchscout.orchestrator.stages.estimates.surface import Setting, Surface
from batchscout.orchestrator.stages.no_answer import LOWERED_BY, MOST_LOWERED, all_diverged
from batchscout.orchestrator.stages.rates import rates
from batchscout.orchestrator.stages.train.choice import SAME_RATE, Choice, choice_of, surface_of
from batchscout.orchestrator.stages.train.lineup import Lineup, lineup_of
from batchscout.orchestrator.stages.train.outlook import CANNOT_WIN
from batchscout.orchestrator.study.causes import Cause
from batchscout.orchestrator.study.trial import Proposal, TrialState

FIRST_RUNS = 3
BESIDE_THE_RULE = (2.0, 0.5)
"""Times the rule's rate."""
WORTH = 0.002
"""A run is made if the choice is expected to waste less by so large a share of the training time once it has ended."""
FEW_RUNS = 5
"""Before so many runs nothing is taken to be known well enough: the surface is still that of the prior."""
SNAPSHOT_SHARES = (0.1, 0.25, 0.5, 1.0)


def propose(context: StageContext[Train]) -> list[Proposal]:
    """Return the runs asked for before, and those that would tell most now, until no lane is free."""
    lineup = lineup_of(context)
    asked = _asked(context, _first(context, lineup))
    unheard = _unheard(context, lineup, asked)
    num_open = sum(not _has_ended(context, one) for setting in unheard for one in _runs_of(context, lineup, setting))
    left = context.stage.most_runs(context.most_lanes) - _num_counted(context, asked)
    while num_open < context.num_lanes and left > 0:
        is_last = left <= _num_at_once(context)
        setting = _lowered(context, lineup, unheard) or _next(context, lineup, asked, unheard, is_last=is_last)
        if setting is None:
            break
        asked.append(setting)
        unheard.append(setting)
        num_open, left = num_open + len(context.config.seeds), left - 1
    return [proposal for setting in asked for proposal in _runs_of(context, lineup, setting)]


def num_counted(context: StageContext[Train]) -> int:
    """Return how many of `max_runs` the settings take that were asked for."""
    return _num_counted(context, _asked(context, []))


def _num_counted(context: StageContext[Train], asked: Sequence[Setting]) -> int:
    return sum(not _diverged_first(context, setting) for setting in asked)


def _num_at_once(context: StageContext[Train]) -> int:
    """Return how many settings it takes until no lane is free: each is a run for every seed."""
    return math.ceil(context.num_lanes / len(context.config.seeds))


def _asked(context: StageContext[Train], first: Sequence[Setting]) -> list[Setting]:
    """Return what was asked for so far, which is the first runs at least."""
    asked = [*first]
    for setting in map(setting_of, context.trials()):
        if not any(_same(setting, other) for other in asked):
            asked.append(setting)
    return asked


def _unheard(context: StageContext[Train], lineup: Lineup, asked: Sequence[Setting]) -> list[Setting]:
    """Return those that have yet to end, with all their seeds."""
    return [
        setting for setting in asked if not all(_has_ended(context, one) for one in _runs_of(context, lineup, setting))
    ]


def _has_ended(context: StageContext[Train], run: Proposal) -> bool:
    trial = context.study.trials.get(run.id)
    return trial is not None and trial.state.ended


def _lowered(context: StageContext[Train], lineup: Lineup, unheard: Sequence[Setting]) -> Setting | None:
    """Return the next run where the baseline diverged, or all first runs did: at that batch the learning rate is lowered until a
    run completes, and further while that makes the loss no higher, within what is worth telling apart. The best rate can lie far below the highest one that trains.

    None in other studies, while a run of the batch is still to end, and once so low a rate cannot be what makes them diverge.
    """
    at_rule = [_at_rule(context, one) for one in lineup.candidates]
    first = [trial for trial in context.trials() if any(_same(setting_of(trial), one) for one in at_rule)]
    ran = {trial.config.effective_batch_size for trial in first if trial.cause is Cause.DIVERGED}
    baseline = lineup.baseline.split.effective_batch_size
    if baseline not in ran and not all_diverged(first):
        return None
    rule = next(one for one in at_rule if one.effective_batch_size == (baseline if baseline in ran else min(ran)))
    here = [trial for trial in context.trials() if trial.config.effective_batch_size == rule.effective_batch_size]
    lowest, *higher = sorted({trial.config.learning_rate for trial in here})
    out_of_bounds = lowest < rule.learning_rate * LOWERED_BY ** (0.5 - MOST_LOWERED)
    if out_of_bounds or any(one.effective_batch_size == rule.effective_batch_size for one in unheard):
        return None
    if all(trial.cause is not Cause.DIVERGED for trial in here if trial.config.learning_rate == lowest):
        losses = {one.config.learning_rate: one.val_loss for one in standings(here)}
        before = losses.get(higher[0])
        if lowest not in losses or (
            before is not None and losses[lowest] > before and not alike(losses[lowest], before)
        ):
            return None
    return replace(rule, learning_rate=lowest / LOWERED_BY)


def _diverged_first(context: StageContext[Train], setting: Setting) -> bool:
    """True of a run that diverged before any other completed: it ends early, and does not count."""
    for trial in context.trials():
        if trial.state is TrialState.COMPLETE:
            return False
        if trial.cause is Cause.DIVERGED and _same(setting_of(trial), setting):
            return True
    return False


def _first(context: StageContext[Train], lineup: Lineup) -> list[Setting]:
    """Return the baseline, the smallest and the largest batch, at the rule's rates. As long as nothing has ended that
    says what to run next, every lane has one: the other batches, and then rates beside the rule's."""
    ordered = list(lineup.candidates)
    picked = [lineup.baseline, ordered[0], ordered[-1], ordered[len(ordered) // 2], *ordered]
    distinct = list({one.split.effective_batch_size: one for one in picked}.values())
    at_rule = [_at_rule(context, one) for one in distinct]
    first = at_rule[:FIRST_RUNS]
    if len(at_rule) > 1 and not any(trial.state.ended for trial in context.trials()):
        beside = [
            replace(one, learning_rate=factor * one.learning_rate) for factor in BESIDE_THE_RULE for one in at_rule
        ]
        first = [*at_rule, *beside][: max(len(first), _num_at_once(context))]
    return first[: context.stage.most_runs(context.most_lanes)]


def _at_rule(context: StageContext[Train], candidate: Candidate) -> Setting:
    batch = candidate.split.effective_batch_size
    return Setting(batch, context.rule_rate(batch))


def _same(a: Setting, b: Setting) -> bool:
    return a.effective_batch_size == b.effective_batch_size and abs(a.learning_rate / b.learning_rate - 1) < SAME_RATE


def _runs_of(context: StageContext[Train], lineup: Lineup, setting: Setting) -> list[Proposal]:
    batch = setting.effective_batch_size
    candidate = next(one for one in lineup.candidates if one.split.effective_batch_size == batch)
    rungs = context.rungs(context.stage.pruner, candidate.sample_budget)
    name = f"train-{candidate.split}"
    if not _same(setting, _at_rule(context, candidate)):
        name += f"-lr{setting.learning_rate:.3g}"
        candidate = replace(candidate, protected=False)
    snapshots = _snapshots(context, candidate) if candidate.protected else ()
    return seeded_where_it_fits(
        context, name, candidate, learning_rate=setting.learning_rate, rungs=rungs, noise_snapshots=snapshots
    )


def _snapshots(context: StageContext[Train], candidate: Candidate) -> tuple[int, ...]:
    """Return when the protected run measures its gradient noise: once it is warm, and at shares of its way."""
    if not context.config.statistics:
        return ()
    warm = warmup_samples(context.config, candidate.split.effective_batch_size, candidate.sample_budget)
    counts = {warm, *(round(share * candidate.sample_budget) for share in SNAPSHOT_SHARES)}
    return tuple(sorted(count for count in counts if count >= max(1, warm)))


def _next(
    context: StageContext[Train], lineup: Lineup, asked: Sequence[Setting], unheard: Sequence[Setting], *, is_last: bool
) -> Setting | None:
    """Return the run after which the choice is expected to waste least; None where enough is known, or no run is worth its time, and where no
    speeds say which batches are to be compared."""
    surface = surface_of(context, lineup)
    if surface is None or not rates(context):
        return None
    choice = choice_of(context, surface)
    if choice.overfitting or _is_too_easy(context, choice):
        return None  # no further run of this length tells settings apart
    if choice.regret <= context.config.useful_gain and len(asked) >= FEW_RUNS:
        return None
    on_surface = surface.coordinates.rule
    tried = [one for one in asked if one.effective_batch_size in on_surface]
    found = next_run(
        surface,
        tried,
        [one for one in unheard if one.effective_batch_size in on_surface],
        diverged=[setting_of(trial) for trial in context.trials() if trial.cause is Cause.DIVERGED],
        given_up=_given_up(context, surface),
        num_seeds=len(context.config.seeds),
        is_last=is_last,
    )
    if found is not None and (found.worth >= WORTH or len(asked) < FEW_RUNS):
        return found.setting
    best = _best_if_not_run(surface, choice, tried)
    return None if best is None or best.effective_batch_size in _given_up(context, surface) else best


def _is_too_easy(context: StageContext[Train], choice: Choice) -> bool:
    """True where nobody saw when the target was reached, by the run to choose or by the user's own: no other run changes that."""
    target, compared = context.config.target_loss, (choice.run, choice.own)
    return target is not None and any(one and is_first_seen_past(one.trials, target) for one in compared)


def _best_if_not_run(surface: Surface, choice: Choice, tried: Sequence[Setting]) -> Setting | None:
    """Return the best setting where no run resembles it, and it wastes less than the choice: only what was run is recommended."""
    best = surface.best_setting()
    batch, u = best.effective_batch_size, surface.coordinates.u_of(best)
    here = [surface.coordinates.u_of(one) for one in tried if one.effective_batch_size == batch]
    is_new = all(abs(u - one) >= APART for one in here)
    return best if is_new and choice.regret - surface.regret(best) >= WORTH else None


def _given_up(context: StageContext[Train], surface: Surface) -> set[int]:
    """Return the batches that are too slow: of which several runs were stopped for that, or one, where it cannot win."""
    stopped = num_too_slow(context.trials())
    return {
        batch for batch, runs in stopped.items() if runs >= SLOW_RUNS or surface.p_best.get(batch, 0.0) < CANNOT_WIN
    }
