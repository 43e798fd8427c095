"""Which candidate reaches the loss first? Full training runs of the candidates that are left, pruned on the way."""

from __future__ import annotations

import statistics
from dataclasses import dataclass
from typing import ClassVar

from orchestrator.config.stages import Frontier, Train
from orchestrator.stages.candidates import Candidate, candidates, merged, seeded
from orchestrator.stages.context import StageContext
from orchestrator.stages.curves import TRAINING_COLUMNS, loss_curves
from orchestrator.stages.figures import Figure
from orchestrator.stages.findings import concluded, winner_of
from orchestrator.stages.ranking import Standing, settle, standings, tied
from orchestrator.stages.stage import Stage
from orchestrator.study.state import Conclusion
from orchestrator.study.trial import Proposal, Trial, TrialState
from orchestrator.units import seconds_text

# Baseline, largest, second largest, best tokens/s, best goodput, and the contrast.
MOST_CANDIDATES = 6


@dataclass(frozen=True)
class Ranked:
    """A candidate that finished."""

    name: str
    val_loss: float
    """The mean of its seeds."""
    score: float | None
    """Its score under the study's objective, the smaller the better; None if it never reached the target."""


@dataclass(frozen=True)
class TrainFindings:
    STAGE: ClassVar[str] = "train"

    winner: str
    """A trial: the first seed of the best candidate."""
    val_loss: float
    ranking: tuple[Ranked, ...] = ()
    """The best first."""


def propose(context: StageContext[Train]) -> list[Proposal]:
    """Return all candidates at once, each once for every seed."""
    return [proposal for candidate in merged(candidates(context)) for proposal in _runs_of(context, candidate)]


def _runs_of(context: StageContext[Train], candidate: Candidate) -> list[Proposal]:
    """Return the candidate's trials; none for a batch that is larger than the budget."""
    config, split = context.config, candidate.split
    if split.effective_batch_size > config.sample_budget:
        return []
    changes: dict[str, object] = {"rungs": context.stage.pruner.rungs(config.sample_budget)}
    if candidate.unscaled:
        changes["learning_rate"] = config.optimizer.lr
    contrast = "-unscaled" if candidate.unscaled else ""
    name = f"train-{split}{contrast}"
    return seeded(context, name, candidate, **changes)


def conclude(context: StageContext[Train]) -> Conclusion:
    """Conclude with the best candidate under the study's objective; a tie goes to the baseline, then to the smaller
    batch."""
    trials = context.trials()
    ranking = standings(trials, context.config.objective, _target(trials))
    if not ranking:
        reason = "undetermined: no candidate finished its run; see the reasons of the trials"
        return Conclusion("train", ok=False, reason=reason)
    winner = settle(ranking)
    findings = TrainFindings(
        winner=winner.trials[0].id,
        val_loss=winner.val_loss,
        ranking=tuple(Ranked(one.name, one.val_loss, one.score) for one in ranking),
    )
    return concluded(findings, _sentence(winner, ranking, trials), _skipped(context))


def _target(trials: list[Trial]) -> float | None:
    """Return the loss at which the baseline ends, as the mean of its seeds."""
    ends = [t.measured("val_loss") for t in trials if t.protected and t.state is TrialState.COMPLETE]
    return statistics.fmean(ends) if ends else None


def _sentence(winner: Standing, ranking: list[Standing], trials: list[Trial]) -> str:
    config = winner.trials[0].config
    batch = f"{config.micro_batch_size} x {config.gradient_accumulation_steps}"
    tie = [one.name for one in ranking if one is not winner and tied(one.score, winner.score)]
    cut = sum(trial.state is TrialState.PRUNED for trial in trials)
    seconds = statistics.fmean(trial.metric("train_seconds") or 0.0 for trial in winner.trials)
    return (
        f"{winner.name} ({winner.trials[0].role}; batch {batch}) ends at val loss {winner.val_loss:.3f} "
        f"after {seconds_text(seconds)} of training"
        + (f", tied with {', '.join(tie)}" if tie else "")
        + f"; {len(ranking)} of {len({t.candidate for t in trials})} candidates finished, {cut} trials were pruned"
    )


def _skipped(context: StageContext[Train]) -> tuple[str, ...]:
    budget = context.config.sample_budget
    return tuple(
        f"{one.role} was left out: its effective batch ({one.split.effective_batch_size}) is larger than sample_budget "
        f"({budget})"
        for one in merged(candidates(context))
        if one.split.effective_batch_size > budget
    )


def describe(context: StageContext[Train]) -> list[str]:
    if context.config.keys_of(Frontier):
        return [
            "baseline, largest, second largest, best tokens/s, best goodput and an unscaled contrast, duplicates merged"
        ]
    return [f"{proposal.id}  {proposal.role}".rstrip() for proposal in propose(context)]


def figures(context: StageContext[Train]) -> list[Figure]:
    return loss_curves(context.trials(), winner_of(context.study, TrainFindings))


STAGE = Stage[Train](
    propose,
    conclude,
    describe,
    figures,
    TRAINING_COLUMNS,
    winner=lambda context: winner_of(context.study, TrainFindings),
    precedence=2,
    num_full_runs=lambda context: MOST_CANDIDATES,
    proposes_once=True,
)
