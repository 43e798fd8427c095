"""What the runs of the train stage come to: the batch that is likeliest to be the best, in words and numbers."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from batchscout.orchestrator.config.stages import Train
from batchscout.orchestrator.stages.context import StageContext
from batchscout.orchestrator.stages.estimates.generalisation import (
    Generalisation,
    generalisation_of,
    overfitting_of,
)
from batchscout.orchestrator.stages.estimates.observed import setting_of
from batchscout.orchestrator.stages.estimates.ranking import Standing, alike, loss_at_samples, standings
from batchscout.orchestrator.stages.estimates.surface import Array, Setting, Surface
from batchscout.orchestrator.stages.figures import split_text
from batchscout.orchestrator.stages.findings import concluded, found
from batchscout.orchestrator.stages.frontier.findings import FrontierFindings
from batchscout.orchestrator.stages.no_answer import why_none
from batchscout.orchestrator.stages.rates import rates
from batchscout.orchestrator.stages.throughput.findings import ThroughputFindings
from batchscout.orchestrator.stages.train.choice import (
    choice_of,
    full_runs,
    off_speed,
    p_better,
    surface_of,
)
from batchscout.orchestrator.stages.train.findings import BatchFindings, TimeGain, TrainFindings
from batchscout.orchestrator.stages.train.lineup import Lineup, lineup_of
from batchscout.orchestrator.study.causes import Cause
from batchscout.orchestrator.study.state import Conclusion
from batchscout.orchestrator.study.trial import TrialState
from batchscout.orchestrator.units import counted, gap_text, loss_text, share_text, training_time_text


def conclude(context: StageContext[Train]) -> Conclusion:
    """Conclude with the run that wastes least on average, or the user's own where none is shown to be better."""
    trials = context.trials()
    if why := why_none(trials):
        return Conclusion("train", ok=False, reason=why)
    findings = train_findings(context)
    if findings is None:
        reason = (
            f"undetermined: no run comes near target_loss ({context.config.target_loss}); raise it, or sample_budget"
        )
        return Conclusion("train", ok=False, reason=reason)
    ranking = standings(full_runs(context.study), context.config.target_loss)
    winner = next(one for one in ranking if one.first.id == findings.winner)
    notes = (
        *lineup_of(context).left_out,
        *_in_smaller_micro_batches(context),
        *_repeated(context, ranking),
        *_at_equal_samples(ranking, winner),
        *_off_their_speed(findings),
        *_foretold(context, findings),
        *on_widening(findings.generalisation),
        *([f"the best run overfits: {overfitting}"] if (overfitting := overfitting_of(winner.first)) else []),
        *_cut(context),
    )
    return concluded(findings, _sentence(context, winner, findings), notes)


def train_findings(context: StageContext[Train]) -> TrainFindings | None:
    """Return what all full runs so far come to; None where none comes near the target."""
    lineup = lineup_of(context)
    ranking = standings(full_runs(context.study), context.config.target_loss)
    surface = surface_of(context, lineup)
    if surface is None:
        return None
    choice = choice_of(context, surface)
    return TrainFindings(
        winner=choice.run.first.id,
        val_loss=choice.run.val_loss,
        batches=tuple(_batch_findings(context, lineup, surface, batch) for batch in surface.coordinates.batches),
        seed_deviation=surface.seed_deviation,
        seconds=lineup.seconds,
        regret_time=choice.regret,
        time=None if choice.own is None or choice.is_own else gain_over(context, surface, choice.setting, choice.own),
        keeps_own=choice.is_own,
        overfitting=choice.overfitting,
        generalisation=generalisation_of(ranking),
        off_speed=off_speed(context),
    )


def gain_over(context: StageContext[Train], surface: Surface, setting: Setting, own: Standing) -> TimeGain:
    """Return what a setting saves of the training time of the user's own, by the surface of runs of their length."""
    run = own.first
    theirs, batch = surface.at(setting_of(run)), run.config.effective_batch_size
    low, middle, high = interval(surface.time_share(surface.at(setting), theirs))
    by_rate = float(np.median(surface.time_share(np.minimum(surface.best_loss(batch), theirs), theirs)))
    by_speed = _time_for_the_same_samples(context, setting.effective_batch_size, batch)
    p = p_better(context, surface, setting, setting_of(run))
    return TimeGain(run.id, middle, low, high, by_rate, p, by_speed)


def _time_for_the_same_samples(context: StageContext[Train], batch: int, other: int) -> float | None:
    """Return the share of the other batch's time that a batch takes for the same samples; None where time does not count, or no speeds
    are known."""
    off = off_speed(context)
    known = {
        rate.effective_batch_size: rate.samples_per_second * off.get(rate.effective_batch_size, 1.0)
        for rate in rates(context)
    }
    comparable = context.config.objective != "samples" and {batch, other} <= known.keys()
    return known[other] / known[batch] if comparable else None


def _in_smaller_micro_batches(context: StageContext[Train]) -> list[str]:
    """Return which runs did not fit into memory after all, and how they were made again."""
    runs, notes = full_runs(context.study), list[str]()
    lost = {trial.config.split: trial for trial in reversed(runs) if trial.state is TrialState.OUT_OF_MEMORY}
    though = ", though a short one had fitted" if found(context.study, FrontierFindings) else ""
    for split, trial in sorted(lost.items(), key=lambda one: (one[0].effective_batch_size, -one[0].micro_batch_size)):
        batch, samples = split.effective_batch_size, trial.metric("samples_seen")
        others = {one.config.split for one in runs if one.config.effective_batch_size == batch}
        smaller = [one for one in others if one.micro_batch_size < split.micro_batch_size]
        again = max(smaller, key=lambda one: one.micro_batch_size, default=None)
        notes.append(
            f"a run of effective batch {batch} as {split_text(split)} ran out of memory{f' after {samples:,.0f} samples' if samples else ''} "
            f"({trial.reason}){though}{f'; it was made again as {split_text(again)}' if again else ''}"
        )
    return notes


def _repeated(context: StageContext[Train], ranking: Sequence[Standing]) -> list[str]:
    """Return how often the runs went through the data, where one of them went through all of it."""
    num_samples = context.study.facts.num_train_samples
    budgets = {one.config.effective_batch_size: one.config.sample_budget for one in ranking}
    passes = {
        batch: budget / num_samples for batch, budget in budgets.items() if num_samples and budget >= 1.1 * num_samples
    }
    if not passes:
        return []
    each = ", ".join(f"effective batch {batch} {passes[batch]:.1f} times" for batch in sorted(passes))
    return [f"the data ({num_samples:,} training samples) was repeated: {each}"]


def _at_equal_samples(ranking: Sequence[Standing], winner: Standing) -> list[str]:
    """Return who leads at equal samples by more than is told apart, where that is another batch than at equal time; nothing where all trained
    on as many."""
    fewest, most = (of(one.config.sample_budget for one in ranking) for of in (min, max))
    if fewest == most:
        return []
    losses = {one.name: loss_at_samples(one.trials, fewest) for one in ranking}
    known = {name: loss for name, loss in losses.items() if loss is not None}
    leader = min(ranking, key=lambda one: known.get(one.name, math.inf))
    batch, ours = leader.config.effective_batch_size, winner.config.effective_batch_size
    if batch == ours or winner.name not in known or alike(known[leader.name], known[winner.name]):
        return []
    return [
        f"at equal samples ({fewest:,}, read from the curves: not every schedule had ended there) effective batch {batch} "
        f"leads with val loss {loss_text(known[leader.name])}, and effective batch {ours} has {loss_text(known[winner.name])}"
    ]


def _off_their_speed(findings: TrainFindings) -> list[str]:
    off = [f"effective batch {batch} at {share:.2f} x" for batch, share in findings.off_speed.items()]
    return [
        f"beside the others, runs did not train at the speed they were timed at: {', '.join(off)}; the probabilities count the "
        "samples that this speed would have made. Something else may have used the machine: time them again when it is quiet"
    ] if off else []  # fmt: skip


def on_widening(generalisation: Generalisation | None) -> list[str]:
    """Return the gap of every batch, where that of the largest exceeds that of the smallest by more than the seeds vary, and no other exceeds
    it by as much."""
    if generalisation is None:
        return []
    gaps, largest = generalisation.gaps, generalisation.gaps[-1]
    widest = max(one.gap for one in gaps)
    if not generalisation.is_wider(largest) or widest - largest.gap > generalisation.deviation:
        return []
    each = [
        f"{gap_text(gap.gap)} at effective batch {gap.effective_batch_size} ({gap.sample_budget:,} samples)"
        for gap in gaps
    ]
    return [
        "the generalisation gap (validation loss less the loss over samples that were trained on) widens with the batch, as it "
        f"often does (arXiv 1609.04836): {'; '.join(each)}; seeds alone vary by {generalisation.deviation:.2g}"
    ]


WINNERS_CUT = 0.01
"""The share of the replayed studies in which a rung stopped the run that would have been the best
(benchmarks/recommendation.py)."""


def _cut(context: StageContext[Train]) -> list[str]:
    """Return how many runs the rungs stopped, and how often that is a mistake."""
    cut = [trial for trial in context.trials() if trial.state is TrialState.PRUNED and trial.cause is Cause.RUNG]
    num_cut = len({trial.candidate for trial in cut})
    if not num_cut:
        return []
    runs = "1 run was" if num_cut == 1 else f"{num_cut} runs were"
    return [f"{runs} stopped at a rung; in {WINNERS_CUT:.0%} of replayed studies the best one was among them"]


def _foretold(context: StageContext[Train], findings: TrainFindings) -> list[str]:
    """Return how the order of the batches that goodput foretold did; nothing where they did not come out in any."""
    throughput = found(context.study, ThroughputFindings)
    goodputs = throughput.goodput if throughput else {}
    run = [one for one in findings.batches if one.num_runs and one.effective_batch_size in goodputs]
    if len(run) < 2 or alike(min(one.score for one in run), max(one.score for one in run)):
        return []
    came_out = [one.effective_batch_size for one in sorted(run, key=lambda one: one.score)]
    predicted = sorted(came_out, key=lambda batch: -goodputs[batch])
    told, foretold = (", ".join(map(str, batches)) for batches in (came_out, predicted))
    if predicted == came_out:
        return [f"the goodput estimate predicted this order of the batches: {told}"]
    return [f"the goodput estimate predicted the order {foretold}; at their best rates the batches came out {told}"]


def _batch_findings(context: StageContext[Train], lineup: Lineup, surface: Surface, batch: int) -> BatchFindings:
    rates = [surface.coordinates.rate(batch, u) for u in interval(surface.best_u(batch))]
    losses = interval(surface.best_loss(batch))
    candidate = next(one for one in lineup.candidates if one.split.effective_batch_size == batch)
    runs = {t.candidate for t in full_runs(context.study) if t.config.effective_batch_size == batch}
    return BatchFindings(
        batch,
        candidate.sample_budget,
        learning_rate=rates[1],
        learning_rate_low=rates[0],
        learning_rate_high=rates[2],
        score=losses[1],
        score_low=losses[0],
        score_high=losses[2],
        p_best=surface.p_best[batch],
        num_runs=len(runs),
    )


def interval(draws: Array) -> tuple[float, float, float]:
    """Return the 5th, 50th and 95th percentile."""
    low, middle, high = np.quantile(draws, (0.05, 0.5, 0.95))
    return float(low), float(middle), float(high)


def _sentence(context: StageContext[Train], winner: Standing, findings: TrainFindings) -> str:
    first, trials = winner.first, context.trials()
    config = first.config
    role = f"; {first.role}" if first.role else ""
    what = f"effective batch {config.effective_batch_size} ({split_text(config.split)}{role})"
    runs, pruned = len({t.candidate for t in trials}), sum(t.state is TrialState.PRUNED for t in trials)
    tried = counted(runs, "run") + (f", {counted(pruned, 'trial')} pruned" if pruned else "")
    ending = f"val loss {loss_text(winner.val_loss)} at learning rate {config.learning_rate:.3g}"
    if len(findings.batches) == 1:
        return f"{what}, the only batch, ends at {ending}; {tried}"
    batches = len({t.config.effective_batch_size for t in trials})
    cost = "the same samples"
    if findings.seconds is not None:
        cost = f"{training_time_text(findings.seconds)} of training planned for each"
    assert findings.regret_time is not None, "the stage has just found it"
    of_what = "samples" if context.config.objective == "samples" else "training time"
    return (
        f"{what} ends at {ending}, at equal cost ({cost}), and wastes {share_text(findings.regret_time)} of the {of_what} on average "
        f"against the best one; {batches} of {len(findings.batches)} batches were run, in {tried}"
    )
