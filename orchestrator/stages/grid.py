"""Every combination of the given lists, each a full training run."""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass, replace
from typing import ClassVar

from batchscout.orchestrator.config.mode import Mode, compile_text, mode_of
from batchscout.orchestrator.config.stages import Grid
from batchscout.orchestrator.config.trial import base_trial
from batchscout.orchestrator.stages.candidates import Candidate, seeded
from batchscout.orchestrator.stages.chosen import chosen_mode, chosen_split
from batchscout.orchestrator.stages.context import StageContext
from batchscout.orchestrator.stages.curves import TRAINING_COLUMNS, loss_curves
from batchscout.orchestrator.stages.estimates.ranking import Standing, settle, standings
from batchscout.orchestrator.stages.figures import Figure, names_of
from batchscout.orchestrator.stages.findings import concluded, winner_of
from batchscout.orchestrator.stages.no_answer import why_none
from batchscout.orchestrator.stages.stage import Stage
from batchscout.orchestrator.study.state import Conclusion
from batchscout.orchestrator.study.trial import Proposal
from batchscout.orchestrator.units import loss_text, seconds_text
from batchscout.trainers.config import Split


@dataclass(frozen=True)
class GridFindings:
    STAGE: ClassVar[str] = "grid"

    winner: str
    """The id of the first-seed trial of the best combination."""
    val_loss: float


@dataclass(frozen=True)
class _Point:
    micro_batch_size: int
    effective_batch_size: int
    mode: Mode
    learning_rate: float | None
    """None for that of the scaling rule."""


def propose(context: StageContext[Grid]) -> list[Proposal]:
    points = [_checked(context, point) for point in _points(context)]
    return [proposal for point in points if not isinstance(point, str) for proposal in _runs_of(context, *point)]


def skipped(context: StageContext[Grid]) -> list[str]:
    """Return why combinations are not run, each with its numbers; those of several rates or modes have one reason."""
    points = [_checked(context, point) for point in _points(context)]
    return list(dict.fromkeys(reason for reason in points if isinstance(reason, str)))


def _points(context: StageContext[Grid]) -> list[_Point]:
    grid, mode = context.stage, chosen_mode(context.study) or mode_of(base_trial(context.config, None))
    sizes = grid.micro_batch_size or (chosen_split(context).micro_batch_size,)
    batches: tuple[int | None, ...] = grid.effective_batch_size or (_given_batch(context),)
    kinds, compiled = grid.activation_checkpointing or (mode.activation_checkpointing,), grid.compile or (mode.compile,)
    rates: tuple[float | None, ...] = grid.learning_rate or (None,)
    return [
        _Point(
            size,
            batch or context.split(size).effective_batch_size,
            replace(mode, activation_checkpointing=kind, compile=one),
            rate,
        )
        for size, batch, kind, one, rate in itertools.product(sizes, batches, kinds, compiled, rates)
    ]


def _given_batch(context: StageContext[Grid]) -> int | None:
    """Return the effective batch of the study file; None where it says no more than a micro-batch size, or a frontier has chosen."""
    batch = context.config.batch
    says_it = batch.effective_batch_size or batch.gradient_accumulation_steps
    return context.given_split().effective_batch_size if says_it and chosen_mode(context.study) is None else None


def _checked(context: StageContext[Grid], point: _Point) -> tuple[_Point, Split] | str:
    """Return the point with its split, or the reason that it cannot be run."""
    try:
        split = context.split_of(point.effective_batch_size, point.micro_batch_size)
    except ValueError as error:
        return str(error)
    total, budget = split.effective_batch_size, context.config.sample_budget
    if total > budget:
        return f"effective_batch_size ({total}) is larger than sample_budget ({budget})"
    num_samples = context.study.facts.num_train_samples
    if total > (num_samples or math.inf):
        return f"effective_batch_size ({total}) is larger than the training data ({num_samples} samples)"
    return point, split


def _runs_of(context: StageContext[Grid], point: _Point, split: Split) -> list[Proposal]:
    changes: dict[str, object] = {"rungs": context.rungs(context.stage.pruner, context.config.sample_budget)}
    rate = point.learning_rate
    if rate is not None:
        changes["learning_rate"] = rate
    mode = "-".join(filter(None, [str(point.mode.activation_checkpointing), compile_text(point.mode.compile)]))
    name = f"grid-{split}-{mode}" + (f"-lr{rate:g}" if rate is not None else "")
    candidate = Candidate("", split, point.mode, context.config.sample_budget)
    return seeded(context, name, candidate, **changes)


def conclude(context: StageContext[Grid]) -> Conclusion:
    ranking = standings(context.trials(), context.config.target_loss)
    notes = tuple(f"skipped: {reason}" for reason in skipped(context))
    if why := why_none(context.trials()):
        return Conclusion("grid", ok=False, reason=why, notes=notes)
    winner, best = settle(ranking), ranking[0]
    name = names_of([one.first for one in ranking])[winner.first.id]

    def ending(one: Standing) -> str:
        sooner = context.config.target_loss is not None and one.reached
        first = f"reaches the target after {seconds_text(one.score)} and " if sooner else ""
        return f"{first}ends at val loss {loss_text(one.val_loss)}"

    place = f"best of {len(ranking)}"
    if winner is not best:
        place = f"tied with the best of {len(ranking)} runs, which {ending(best)}"
    reason = f"{name} {ending(winner)}, {place}"
    return concluded(GridFindings(winner.first.id, winner.val_loss), reason, notes)


def describe(context: StageContext[Grid]) -> list[str]:
    trials = [proposal.id for proposal in propose(context)]
    return trials + [f"skipped: {reason}" for reason in skipped(context)]


def num_full_runs(context: StageContext[Grid]) -> int:
    return len(propose(context)) // len(context.config.seeds)


def figures(context: StageContext[Grid]) -> list[Figure]:
    return loss_curves(context.trials(), winner_of(context.study, GridFindings))


STAGE = Stage[Grid](
    propose,
    conclude,
    describe,
    figures,
    TRAINING_COLUMNS,
    winner=lambda context: winner_of(context.study, GridFindings),
    precedence=1,
    num_full_runs=num_full_runs,
    proposes_once=True,
)
