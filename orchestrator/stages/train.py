"""Which batch ends best at equal cost, each at its own learning rate? Full training runs, asked for one after the other.

The first runs are the baseline's and those of a few batches far apart, at the scaling rule's rates. From then on the
surface over batch and rate says which run would tell most, until the best batch is found with enough probability.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

import numpy as np

from orchestrator.config.stages import Frontier, Train
from orchestrator.config.trial import scaled_learning_rate
from orchestrator.stages.candidates import Candidate, Field, field_of, seeded
from orchestrator.stages.context import StageContext
from orchestrator.stages.curves import TRAINING_COLUMNS, loss_curves
from orchestrator.stages.figures import Axis, Figure, Mark, Series
from orchestrator.stages.findings import concluded, found, winner_of
from orchestrator.stages.observed import observations, point_of, surface_through
from orchestrator.stages.ranking import Standing, standings
from orchestrator.stages.stage import Stage
from orchestrator.stages.surface import Array, Point, Surface, next_point, runs_to_decide
from orchestrator.study.state import Conclusion
from orchestrator.study.trial import Proposal, Trial, TrialState
from orchestrator.units import number_text, seconds_text

ENOUGH = 0.9
"""The probability of having found the best batch at which no further run is asked for."""
FIRST_RUNS = 3
SAME_RATE = 0.01


@dataclass(frozen=True)
class Ranked:
    """A candidate that finished."""

    name: str
    val_loss: float
    """The mean of its seeds."""
    score: float | None
    """Its score under the study's objective, the smaller the better; None if its loss was not falling to the target."""
    reached: bool = True
    """False if it never reached the target: then its score is a projection."""


@dataclass(frozen=True)
class BatchFindings:
    """What is known of a batch at its best learning rate, whether or not it was run at just that."""

    effective_batch_size: int
    sample_budget: int
    learning_rate: float
    learning_rate_low: float
    learning_rate_high: float
    """Where its best rate lies, with the ends of the 90 % interval."""
    score: float
    score_low: float
    score_high: float
    """What it would come to with that rate, with the ends of the 90 % interval."""
    p_best: float
    """The probability that no batch is better by more than the seeds' deviation."""
    num_runs: int
    num_runs_to_decide: float = 0.0
    """About how many more runs would tell whether it or its strongest rival is better."""


@dataclass(frozen=True)
class TrainFindings:
    STAGE: ClassVar[str] = "train"

    winner: str
    """A trial: the first seed of the best run of the best batch."""
    val_loss: float
    ranking: tuple[Ranked, ...] = ()
    """The best first."""
    batches: tuple[BatchFindings, ...] = ()
    """The smallest first. Empty in a study of version 0.2."""
    seed_deviation: float | None = None
    """The deviation of a score from seed to seed."""
    seconds: float | None = None
    """The training time that each could take; None where all trained on the same samples."""

    def of_batch(self, effective_batch_size: int) -> BatchFindings | None:
        """Return what is known of a batch; None in a study of version 0.2."""
        return next((one for one in self.batches if one.effective_batch_size == effective_batch_size), None)


def propose(context: StageContext[Train]) -> list[Proposal]:
    """Return the first runs, those proposed before, and the runs that would tell most now, one for each free lane."""
    field = field_of(context)
    asked = _asked(context, field)
    proposals = [proposal for point in asked for proposal in _runs_of(context, field, point)]
    trials = context.study.trials
    if any(proposal.id not in trials for proposal in proposals):
        return proposals
    num_busy = len({t.candidate for t in context.trials() if not t.state.ended})
    for _ in range(min(context.num_lanes - num_busy, context.stage.max_runs - len(asked))):
        point = _next(context, field, asked)
        if point is None:
            break
        asked.append(point)
        proposals += _runs_of(context, field, point)
    return proposals


def _asked(context: StageContext[Train], field: Field) -> list[Point]:
    """Return the first points, and those that were asked for since."""
    asked = [_at_rule(context, one) for one in _first(field)][: context.stage.max_runs]
    for trial in context.trials():
        point = point_of(trial)
        if not any(_same(point, other) for other in asked):
            asked.append(point)
    return asked


def _first(field: Field) -> list[Candidate]:
    """Return the baseline and the batches furthest from each other."""
    ordered = list(field.candidates)
    picked = [field.baseline, ordered[0], ordered[-1], ordered[len(ordered) // 2], *ordered]
    distinct = list({one.split.effective_batch_size: one for one in picked}.values())
    return distinct[:FIRST_RUNS]


def _at_rule(context: StageContext[Train], candidate: Candidate) -> Point:
    batch = candidate.split.effective_batch_size
    return Point(batch, scaled_learning_rate(context.config.optimizer, batch))


def _same(a: Point, b: Point) -> bool:
    return a.effective_batch_size == b.effective_batch_size and abs(a.learning_rate / b.learning_rate - 1) < SAME_RATE


def _runs_of(context: StageContext[Train], field: Field, point: Point) -> list[Proposal]:
    batch = point.effective_batch_size
    candidate = next(one for one in field.candidates if one.split.effective_batch_size == batch)
    rungs = context.stage.pruner.rungs(context.config.sample_budget, candidate.sample_budget)
    name = f"train-{candidate.split}"
    if not _same(point, _at_rule(context, candidate)):
        name += f"-lr{point.learning_rate:.3g}"
        candidate = replace(candidate, protected=False)
    return seeded(context, name, candidate, learning_rate=point.learning_rate, rungs=rungs)


def _next(context: StageContext[Train], field: Field, asked: Sequence[Point]) -> Point | None:
    """Return the run that would tell most about which batch is best; None where that is known well enough."""
    surface = _surface(context, field)
    if surface is None:
        return None
    choice = _choice(context, surface)
    if surface.p_best[choice] >= ENOUGH:
        return None
    tried = [point for point in asked if point.effective_batch_size in surface.grid.rule]
    return next_point(surface, tried, choice)


def _surface(context: StageContext[Train], field: Field) -> Surface | None:
    """Return the surface through what has ended so far; None before anything has completed."""
    trials = context.trials()
    lost = {t.config.effective_batch_size for t in trials if _cannot_run(t)}
    known = {one.effective_batch_size for one in observations(trials, context.config.target_loss)}
    batches = [one.split.effective_batch_size for one in field.candidates]
    kept = [batch for batch in batches if batch in known or batch not in lost]
    return surface_through(trials, context.config, kept)


def _cannot_run(trial: Trial) -> bool:
    return trial.state in (TrialState.FAILED, TrialState.OUT_OF_MEMORY)


def _choice(context: StageContext[Train], surface: Surface) -> int:
    """Return the batch to choose by now: the baseline where it is good enough, else the likeliest of those that were
    run."""
    ranking = standings(context.trials(), context.config.target_loss)
    complete = {one.trials[0].config.effective_batch_size for one in ranking}
    baseline = field_of(context).baseline.split.effective_batch_size
    run = [batch for batch in surface.grid.batches if batch in complete]
    if surface.p_best.get(baseline, 0.0) >= ENOUGH and baseline in run:
        return baseline
    return max(run, key=lambda batch: surface.p_best[batch])


def conclude(context: StageContext[Train]) -> Conclusion:
    """Conclude with the batch that is likeliest to be the best, and its best run."""
    field, trials = field_of(context), context.trials()
    ranking = standings(trials, context.config.target_loss)
    surface = _surface(context, field)
    if not ranking or surface is None:
        reason = "undetermined: no candidate finished its run; see the reasons of the trials"
        return Conclusion("train", ok=False, reason=reason)
    choice = _choice(context, surface)
    winner = next(one for one in ranking if one.trials[0].config.effective_batch_size == choice)
    findings = TrainFindings(
        winner=winner.trials[0].id,
        val_loss=winner.val_loss,
        ranking=tuple(Ranked(one.name, one.val_loss, one.score, one.reached) for one in ranking),
        batches=tuple(_batch_findings(context, field, surface, batch) for batch in surface.grid.batches),
        seed_deviation=surface.seed_deviation,
        seconds=field.seconds,
    )
    return concluded(findings, _sentence(context, winner, findings), field.left_out)


def _batch_findings(context: StageContext[Train], field: Field, surface: Surface, batch: int) -> BatchFindings:
    rates = [surface.grid.rate(batch, u) for u in _interval(surface.best_u(batch))]
    losses = _interval(surface.best_loss(batch))
    candidate = next(one for one in field.candidates if one.split.effective_batch_size == batch)
    runs = {t.candidate for t in context.trials() if t.config.effective_batch_size == batch}
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
        num_runs_to_decide=runs_to_decide(surface, batch, len({t.candidate for t in context.trials()})),
    )


def _interval(draws: Array) -> tuple[float, float, float]:
    """Return the 5th, 50th and 95th percentile."""
    low, middle, high = np.quantile(draws, (0.05, 0.5, 0.95))
    return float(low), float(middle), float(high)


def _sentence(context: StageContext[Train], winner: Standing, findings: TrainFindings) -> str:
    config, first = winner.trials[0].config, winner.trials[0]
    mine = findings.of_batch(config.effective_batch_size)
    assert mine, "the winner is one of the batches"
    trials = context.trials()
    cut = sum(trial.state is TrialState.PRUNED for trial in trials)
    cost = "the same samples" if findings.seconds is None else f"{seconds_text(findings.seconds)} of training each"
    return (
        f"effective batch {config.effective_batch_size} ({config.micro_batch_size} x "
        f"{config.gradient_accumulation_steps}{f'; {first.role}' if first.role else ''}) is the best at equal cost "
        f"({cost}) with probability {mine.p_best:.2f}: val loss {winner.val_loss:.3f} at learning rate "
        f"{config.learning_rate:.3g}; {len({t.candidate for t in trials})} runs of "
        f"{len({t.config.effective_batch_size for t in trials})} batches, {cut} trials were pruned"
    )


def describe(context: StageContext[Train]) -> list[str]:
    most = context.stage.max_runs
    if context.config.keys_of(Frontier):
        return [f"every effective batch in its fastest form, at equal {_cost(context)}; {most} runs at most"]
    return [_described(one) for one in field_of(context).candidates] + [f"{most} runs at most"]


def _cost(context: StageContext[Train]) -> str:
    return "samples" if context.config.objective == "samples" else "training time"


def _described(candidate: Candidate) -> str:
    return f"train-{candidate.split}  {candidate.role}, {number_text(candidate.sample_budget)} samples"


def figures(context: StageContext[Train]) -> list[Figure]:
    """Return what each batch would come to, then the loss curves of all runs."""
    findings = found(context.study, TrainFindings)
    curves = loss_curves(context.trials(), winner_of(context.study, TrainFindings))
    return [_of_batches(context, findings), *curves] if findings and len(findings.batches) > 1 else curves


def _of_batches(context: StageContext[Train], findings: TrainFindings) -> Figure:
    """Return the score of every batch at its best rate, with its interval."""
    best = max(findings.batches, key=lambda one: one.p_best)
    marks = tuple(
        Mark(
            one.effective_batch_size,
            one.score,
            f"P {one.p_best:.2f}",
            "chosen" if one is best else "point",
            low=one.score_low,
            high=one.score_high,
        )
        for one in findings.batches
    )
    what = "seconds to the target loss" if context.config.objective == "target" else "validation loss"
    return Figure(
        Axis("effective batch, samples", log=True, ticks=tuple(float(mark.x) for mark in marks)),
        Axis(f"{what} at equal cost"),
        (Series("", marks),),
        "What each batch comes to at its own best learning rate, by the surface through all runs, with its 90 % interval. "
        "P: the probability that it is the best, or within the seeds' deviation of it.",
        width=640,
        height=290,
    )


STAGE = Stage[Train](
    propose,
    conclude,
    describe,
    figures,
    TRAINING_COLUMNS,
    winner=lambda context: winner_of(context.study, TrainFindings),
    precedence=2,
    num_full_runs=lambda context: context.stage.max_runs,
)
