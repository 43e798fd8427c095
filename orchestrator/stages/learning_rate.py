"""Which learning rate is best at the chosen batch? A small grid around the best rate so far.

What was run at that batch before is a point of the grid too. Where the best lies at an end the grid is extended.
"""

from __future__ import annotations

import math

import numpy as np

from batchscout.orchestrator.config.mode import mode_of
from batchscout.orchestrator.config.stages import LearningRate, Train
from batchscout.orchestrator.stages.candidates import Candidate, seeded_where_it_fits
from batchscout.orchestrator.stages.chosen import chosen_mode, chosen_split
from batchscout.orchestrator.stages.context import StageContext
from batchscout.orchestrator.stages.curves import TRAINING_COLUMNS, seeds_bar, with_deviation
from batchscout.orchestrator.stages.estimates.next_run import is_beyond
from batchscout.orchestrator.stages.estimates.observed import surface_through
from batchscout.orchestrator.stages.estimates.ranking import Standing, standings, tied_with_best
from batchscout.orchestrator.stages.figures import FAILED_COLOUR, OTHERS_COLOUR, Axis, Figure, Mark, Series
from batchscout.orchestrator.stages.findings import concluded, found, winner_of
from batchscout.orchestrator.stages.grid import GridFindings
from batchscout.orchestrator.stages.no_answer import LOWERED_BY, MOST_LOWERED, all_diverged, why_none
from batchscout.orchestrator.stages.stage import Stage
from batchscout.orchestrator.stages.train import (
    LearningRateFindings,
    TrainFindings,
    loss_deviation,
    train_findings,
)
from batchscout.orchestrator.study.state import Conclusion, Study
from batchscout.orchestrator.study.trial import Proposal, Trial, TrialState
from batchscout.orchestrator.units import loss_text, number_text

# Rates this close to each other are one point of the grid.
SAME_RATE = 0.1
MOST_EXTENSIONS = 3


def propose(context: StageContext[LearningRate]) -> list[Proposal]:
    """Return a trial for every multiple of the centre that was not run before; and one further out on the side on which
    the best of all lies at the end."""
    centre = _centre(context)
    tried = [trial.config.learning_rate for trial in run_before(context.study)]
    proposals: list[Proposal] = []
    for multiplier in context.stage.multipliers:
        if not any(_same(multiplier * centre, rate) for rate in tried):
            proposals += _runs_at(context, multiplier * centre, f"learning_rate-x{multiplier:g}")
    for rate in _extensions(context):
        proposals += _runs_at(context, rate, f"learning_rate-{rate:.3g}")
    return proposals


def _same(a: float, b: float) -> bool:
    return math.isclose(a, b, rel_tol=SAME_RATE)


def _runs_at(context: StageContext[LearningRate], rate: float, name: str) -> list[Proposal]:
    winner = _winner(context.study)
    if winner is None:
        candidate = Candidate("", chosen_split(context), chosen_mode(context.study), context.config.sample_budget)
    else:
        candidate = Candidate("", winner.config.split, mode_of(winner.config), winner.config.sample_budget)
    rungs = context.rungs(context.stage.pruner, candidate.sample_budget)
    return seeded_where_it_fits(context, name, candidate, learning_rate=rate, rungs=rungs)


def _extensions(context: StageContext[LearningRate]) -> list[float]:
    """Return the rates beyond the grid that were tried, and the next one if the best lies at an end once more."""
    multiples = [multiplier * _centre(context) for multiplier in context.stage.multipliers]
    mine = [trial.config.learning_rate for trial in context.trials()]
    beyond = [rate for rate in dict.fromkeys(mine) if not any(math.isclose(rate, one) for one in multiples)]
    further = _further(context)
    if further is not None and len(beyond) < (MOST_LOWERED if all_diverged(context.trials()) else MOST_EXTENSIONS):
        beyond.append(further)
    return beyond


def _further(context: StageContext[LearningRate]) -> float | None:
    """Return the rate to try beyond the end at which the best lies, and while all diverged a much lower one; None if the best
    lies inside, or runs have yet to end."""
    trials = [*context.trials(), *run_before(context.study)]
    ranking = standings(trials, context.config.target_loss)
    tested = sorted({trial.config.learning_rate for trial in trials})
    if all_diverged(trials):
        return tested[0] / LOWERED_BY
    if not all(trial.state.ended for trial in trials) or not ranking:
        return None
    best = ranking[0].config.learning_rate
    if len(tested) < 2 or best not in (tested[0], tested[-1]):
        return None
    return best * tested[0] / tested[1] if best == tested[0] else best * tested[-1] / tested[-2]


def _centre(context: StageContext[LearningRate]) -> float:
    """Return the learning rate that the multiples are taken of: what the train stage found best for its winner, a grid
    winner's own, or else the rule's for the batch."""
    trained, winner = found(context.study, TrainFindings), _winner(context.study)
    if winner is None:
        return context.trial(chosen_split(context), chosen_mode(context.study)).learning_rate
    of_batch = trained.of_batch(winner.config.effective_batch_size) if trained else None
    if of_batch is not None:
        return of_batch.learning_rate
    if winner.stage == "grid":
        return winner.config.learning_rate
    return context.rule_rate(winner.config.effective_batch_size)


def _winner(study: Study) -> Trial | None:
    findings = found(study, TrainFindings) or found(study, GridFindings)
    return study.trials.get(findings.winner) if findings else None


def run_before(study: Study) -> list[Trial]:
    """Return the trials of the winner's stage that have the winner's batch, at whatever learning rate."""
    winner = _winner(study)
    return [] if winner is None else [t for t in study.of_stage(winner.stage) if _batch(t) == _batch(winner)]


def _batch(trial: Trial) -> tuple[object, ...]:
    """Return what a trial is one of the batch by. A grid may compare splits of one batch; train has others only where one did not fit."""
    config = trial.config
    return (config.split if trial.stage == "grid" else config.effective_batch_size), config.precision


def conclude(context: StageContext[LearningRate]) -> Conclusion:
    """Conclude with the best learning rate, and whether it is the last one tried; a tie goes to the one nearest to the
    minimum of the curve through all of them."""
    trials = [*context.trials(), *run_before(context.study)]
    ranking = standings(trials, context.config.target_loss)
    if why := why_none(trials):
        return Conclusion("learning_rate", ok=False, reason=why)
    train = context.of(Train) if found(context.study, TrainFindings) else None
    of_all = train_findings(train) if train else None  # what the runs of train and of this stage come to together
    # What all runs speak for may have another batch.
    best = next((one for one in ranking if of_all and one.first.id == of_all.winner), None)
    if best is None:
        fitted = _fitted(context, trials) or ranking[0].config.learning_rate
        best = min(tied_with_best(ranking), key=lambda one: abs(math.log(one.config.learning_rate / fitted)))
    winner = of_all.winner if of_all else best.first.id
    tested = sorted({trial.config.learning_rate for trial in trials})
    on_edge = winner == best.first.id and is_beyond(tested, best.config.learning_rate, _surfaces_best(of_all, best))
    rule = context.rule_rate(best.config.effective_batch_size)
    findings = LearningRateFindings(
        learning_rate=context.study.trials[winner].config.learning_rate,
        winner=winner,
        on_edge=on_edge,
        losses={
            f"{one.config.learning_rate:.3g}": one.val_loss
            for one in sorted(ranking, key=lambda one: one.config.learning_rate)
        },
        rule=rule,
        train=of_all,
    )
    notes = (_warn(best, tested),) if on_edge else ()
    return concluded(findings, _sentence(best, ranking, rule) + _elsewhere(context.study.trials[winner], best), notes)


def _surfaces_best(of_all: TrainFindings | None, best: Standing) -> float | None:
    """Return the best rate at its batch of what all runs come to together; None where that is not known."""
    batch = of_all and of_all.of_batch(best.config.effective_batch_size)
    return batch.learning_rate if batch else None


def _fitted(context: StageContext[LearningRate], trials: list[Trial]) -> float | None:
    """Return the rate at the minimum of the curve through all that was run: it errs less than the best of a few runs. None where no
    run comes near the target loss."""
    winner, batch = _winner(context.study), trials[0].config.effective_batch_size
    known = [*(context.study.of_stage(winner.stage) if winner else ()), *context.trials()]
    batches = sorted({trial.config.effective_batch_size for trial in known})
    surface = surface_through(known, context.config, batches)
    return None if surface is None else surface.coordinates.rate(batch, float(np.median(surface.best_u(batch))))


def _elsewhere(winner: Trial, best: Standing) -> str:
    """Return what all runs speak for, where that is another batch than the one whose rates were tried."""
    if winner.id == best.first.id:
        return ""
    config = winner.config
    return f"; all runs together favour effective batch {config.effective_batch_size} at learning rate {config.learning_rate:.3g}"


def _sentence(best: Standing, ranking: list[Standing], rule: float) -> str:
    ties = [f"{one.config.learning_rate:.3g}" for one in tied_with_best(ranking) if one is not best]
    chosen = "best" if best.val_loss <= min(one.val_loss for one in ranking) or ties else "chosen"
    tie = f", tied with {', '.join(ties)}" if ties else ""
    return (
        f"learning rate {best.config.learning_rate:.3g} ends at val loss {loss_text(best.val_loss)}, {chosen} of {len(ranking)}{tie}; "
        + _how_the_rule_did(best, ranking, rule)
    )


def _how_the_rule_did(best: Standing, ranking: list[Standing], rule: float) -> str:
    ratio = best.config.learning_rate / rule
    if _same(ratio, 1):
        return f"it is the scaling rule's own ({rule:.3g})"
    at_rule = next((one for one in ranking if _same(one.config.learning_rate, rule)), None)
    cost = f", which ends at {loss_text(at_rule.val_loss)}" if at_rule else ""
    return f"it is {ratio:.2g} x the scaling rule's {rule:.3g}{cost}"


def _warn(best: Standing, tested: list[float]) -> str:
    side = "low" if best.config.learning_rate == tested[0] else "high"
    grid = f"{tested[0]:.3g} to {tested[-1]:.3g}"
    return f"the best learning rate lies on the {side} edge of the grid ({grid}): widen the multipliers on that side"


def describe(context: StageContext[LearningRate]) -> list[str]:
    multipliers = ", ".join(f"{multiplier:g}" for multiplier in context.stage.multipliers)
    return [
        f"the best learning rate so far for the chosen batch, times {multipliers}; up to {MOST_EXTENSIONS} more where the best lies at an end"
    ]


def num_full_runs(context: StageContext[LearningRate]) -> int:
    """Return the number of multipliers and of extensions, at most: of those some may have been run before, and not all are needed."""
    return len(context.stage.multipliers) + MOST_EXTENSIONS


CROSSES = " Crosses: rates whose runs were cut or failed, each at its last loss; one that had none, or a much higher one, lies at the top."


def figures(context: StageContext[LearningRate]) -> list[Figure]:
    """Return the loss of every rate that was run at the winner's batch, those of the stage before among them."""
    findings = found(context.study, LearningRateFindings)
    trials = [*run_before(context.study), *context.trials()]
    deviation = loss_deviation(context.study, context.config.objective)
    complete = [trial for trial in trials if trial.state is TrialState.COMPLETE]
    marks = tuple(with_deviation(mark, deviation) for mark in _loss_marks(complete, findings))
    lost = [trial for trial in trials if trial.state.ruled_out]
    ends = [loss for one in lost if (loss := one.metric("val_loss")) is not None]
    whole = [mark.y for mark in marks] or ends or [1.0]
    # One that diverged must not flatten the others.
    top = max(whole) + 3 * max(max(whole) - min(whole), 0.05 * abs(max(whole)))
    highest = max(min(loss, top) for loss in (*whole, *ends))
    joined = len({mark.x for mark in marks}) == len(marks)  # the seeds of one rate lie above each other
    edge = " It lies on the edge of the grid." if findings and findings.on_edge else ""
    return [
        Figure(
            "learning_rates",
            Axis(
                "learning rate",
                log=True,
                ticks=tuple(trial.config.learning_rate for trial in trials),
                precise=number_text,
            ),
            Axis("validation loss", precise=loss_text),
            (
                Series("", marks, OTHERS_COLOUR, joined=joined),
                Series("", tuple(_lost_mark(trial, highest) for trial in lost), FAILED_COLOUR, joined=False),
            ),
            f"Ringed: the best.{CROSSES if lost else ''}{seeds_bar(trials) if deviation else ''}{edge}",
            width=540,
            height=290,
        )
    ]


def _loss_marks(trials: list[Trial], findings: LearningRateFindings | None) -> tuple[Mark, ...]:
    best = findings.winner if findings else None
    losses = [(trial.config.learning_rate, trial.metric("val_loss"), trial.id) for trial in trials]
    measured = sorted((rate, loss, name) for rate, loss, name in losses if loss is not None)
    return tuple(
        Mark(rate, loss, f"{loss_text(loss)}", "chosen" if name == best else "point") for rate, loss, name in measured
    )


def _lost_mark(trial: Trial, highest: float) -> Mark:
    """Return a run that was cut or failed at its own last loss, but no higher than the highest that is shown; that it ended early is told."""
    loss, code = trial.metric("val_loss"), trial.cause.code if trial.cause else ""
    return Mark(
        trial.config.learning_rate,
        highest if loss is None else min(loss, highest),
        code if loss is None else f"{loss_text(loss)}",
        "cross",
        told=trial.how_it_ended_at,
    )


STAGE = Stage[LearningRate](
    propose,
    conclude,
    describe,
    figures,
    TRAINING_COLUMNS,
    winner=lambda context: winner_of(context.study, LearningRateFindings),
    precedence=3,
    num_full_runs=num_full_runs,
)
