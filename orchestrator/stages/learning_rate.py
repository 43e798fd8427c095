"""Is the scaling rule right here? A small grid around the rule's learning rate, at the batch that won.

What was run at that batch before, the unscaled contrast included, is a point of the grid too.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

from orchestrator.config.stages import LearningRate
from orchestrator.config.trial import scaled_learning_rate
from orchestrator.stages.candidates import Candidate, seeded
from orchestrator.stages.chosen import chosen_mode, chosen_split
from orchestrator.stages.context import StageContext
from orchestrator.stages.curves import TRAINING_COLUMNS
from orchestrator.stages.figures import FAILED_COLOUR, Axis, Figure, Mark, Series
from orchestrator.stages.findings import concluded, found, winner_of
from orchestrator.stages.grid import GridFindings
from orchestrator.stages.mode import mode_of
from orchestrator.stages.ranking import Standing, standings, tied
from orchestrator.stages.stage import Stage
from orchestrator.stages.train import TrainFindings
from orchestrator.study.state import Conclusion, Study
from orchestrator.study.trial import Proposal, Trial
from trainers.config import Split

# Rates this close to each other are one point of the grid, such as 0.71 and 1/sqrt(2) times the centre.
SAME_RATE = 0.01


@dataclass(frozen=True)
class LearningRateFindings:
    STAGE: ClassVar[str] = "learning_rate"

    learning_rate: float
    winner: str
    """A trial: the first seed of the best learning rate."""
    on_edge: bool
    """True if the best is the last one tried on its side."""
    losses: dict[str, float]
    """The validation loss by learning rate, which is written with three digits."""


def propose(context: StageContext[LearningRate]) -> list[Proposal]:
    """Return a trial for every multiple of the centre that was not run before."""
    winner, centre = _winner(context.study), _centre(context)
    tried = {trial.config.learning_rate for trial in run_before(context.study)}
    if winner is None:
        candidate = Candidate("", chosen_split(context), chosen_mode(context.study))
    else:
        candidate = Candidate("", _split(context, winner), mode_of(winner.config))
    return [
        proposal
        for multiplier in context.stage.multipliers
        if not any(math.isclose(multiplier * centre, rate, rel_tol=SAME_RATE) for rate in tried)
        for proposal in seeded(context, f"learning_rate-x{multiplier:g}", candidate, learning_rate=multiplier * centre)
    ]


def _split(context: StageContext[LearningRate], trial: Trial) -> Split:
    return context.split(trial.config.micro_batch_size, trial.config.gradient_accumulation_steps)


def _centre(context: StageContext[LearningRate]) -> float:
    """Return the learning rate that the multiples are taken of: the rule's for the winner's batch, or a grid winner's
    own."""
    winner = _winner(context.study)
    if winner is None:
        return context.trial(chosen_split(context), chosen_mode(context.study)).learning_rate
    if winner.stage == "grid":
        return winner.config.learning_rate
    return scaled_learning_rate(context.config.optimizer, winner.config.effective_batch_size)


def _whose(study: Study) -> str:
    winner = _winner(study)
    return "the grid winner's" if winner and winner.stage == "grid" else "the scaling rule's"


def _winner(study: Study) -> Trial | None:
    findings = found(study, TrainFindings) or found(study, GridFindings)
    return study.trials.get(findings.winner) if findings else None


def run_before(study: Study) -> list[Trial]:
    """Return the trials of the winner's stage that have the winner's batch, at whatever learning rate."""
    winner = _winner(study)
    return [] if winner is None else [t for t in study.of_stage(winner.stage) if _batch(t) == _batch(winner)]


def _batch(trial: Trial) -> tuple[object, ...]:
    return trial.config.micro_batch_size, trial.config.gradient_accumulation_steps, trial.config.precision


def conclude(context: StageContext[LearningRate]) -> Conclusion:
    """Conclude with the best learning rate, and whether it is the last one tried; a tie goes to the one nearest the
    centre."""
    trials = [*context.trials(), *run_before(context.study)]
    ranking = standings(trials, "val_loss", None)
    if not ranking:
        reason = "undetermined: no learning rate finished its run; see the trials' reasons"
        return Conclusion("learning_rate", ok=False, reason=reason)
    centre = _centre(context)
    best = _settle(ranking, centre)
    tested = sorted({trial.config.learning_rate for trial in trials})
    on_edge = len(tested) > 1 and _rate(best) in (tested[0], tested[-1])
    findings = LearningRateFindings(
        learning_rate=_rate(best),
        winner=best.trials[0].id,
        on_edge=on_edge,
        losses={f"{_rate(one):.3g}": one.val_loss for one in sorted(ranking, key=_rate)},
    )
    notes = (_warn(best, tested),) if on_edge else ()
    return concluded(findings, _sentence(best, ranking, centre, _whose(context.study)), notes)


def _settle(ranking: list[Standing], centre: float) -> Standing:
    equals = [one for one in ranking if tied(one.score, ranking[0].score)]
    return min(equals, key=lambda one: abs(math.log(_rate(one) / centre)))


def _rate(standing: Standing) -> float:
    return standing.trials[0].config.learning_rate


def _sentence(best: Standing, ranking: list[Standing], centre: float, whose: str) -> str:
    ties = [f"{_rate(one):.3g}" for one in ranking if one is not best and tied(one.score, best.score)]
    tie = f", tied with {', '.join(ties)}" if ties else ""
    ratio = _rate(best) / centre
    against = f"{whose} own" if math.isclose(ratio, 1) else f"{ratio:.2g} x {whose} {centre:.3g}"
    return (
        f"learning rate {_rate(best):.3g} ends at val loss {best.val_loss:.3f}, best of {len(ranking)}{tie}: {against}"
    )


def _warn(best: Standing, tested: list[float]) -> str:
    side = "low" if _rate(best) == tested[0] else "high"
    return (
        f"the best learning rate lies on the {side} edge of the grid ({tested[0]:.3g} to {tested[-1]:.3g}): "
        "widen the multipliers on that side"
    )


def describe(context: StageContext[LearningRate]) -> list[str]:
    multipliers = ", ".join(f"{multiplier:g}" for multiplier in context.stage.multipliers)
    return [f"the rule's learning rate for the winner's batch times {multipliers}"]


def num_full_runs(context: StageContext[LearningRate]) -> int:
    """Return the number of multipliers without the centre, which the train stage has run."""
    return sum(multiplier != 1 for multiplier in context.stage.multipliers)


def figures(context: StageContext[LearningRate]) -> list[Figure]:
    """Return the loss of every rate that was run at the winner's batch, those of the stage before among them."""
    findings = found(context.study, LearningRateFindings)
    trials = [*run_before(context.study), *context.trials()]
    marks = _loss_marks(trials, findings)
    highest = max((mark.y for mark in marks), default=1.0)
    lost = [trial for trial in trials if trial.state.ended and trial.metric("val_loss") is None]
    joined = len({mark.x for mark in marks}) == len(marks)  # the seeds of one rate lie above each other
    edge = " It lies on the edge of the grid." if findings and findings.on_edge else ""
    return [
        Figure(
            Axis("learning rate", log=True, ticks=tuple(trial.config.learning_rate for trial in trials)),
            Axis("validation loss"),
            (
                Series("", marks, joined=joined),
                Series("", tuple(_lost_mark(trial, highest) for trial in lost), FAILED_COLOUR, joined=False),
            ),
            f"Ringed: the best.{edge}",
            width=640,
            height=290,
        )
    ]


def _loss_marks(trials: list[Trial], findings: LearningRateFindings | None) -> tuple[Mark, ...]:
    best = findings.winner if findings else None
    losses = [(trial.config.learning_rate, trial.metric("val_loss"), trial.id) for trial in trials]
    measured = sorted((rate, loss, name) for rate, loss, name in losses if loss is not None)
    return tuple(
        Mark(rate, loss, f"{loss:.3f}", "chosen" if name == best else "point") for rate, loss, name in measured
    )


def _lost_mark(trial: Trial, height: float) -> Mark:
    return Mark(trial.config.learning_rate, height, trial.cause.code if trial.cause else "", "cross")


STAGE = Stage[LearningRate](
    propose,
    conclude,
    describe,
    figures,
    TRAINING_COLUMNS,
    winner=lambda context: winner_of(context.study, LearningRateFindings),
    precedence=3,
    num_full_runs=num_full_runs,
    proposes_once=True,
)
