"""The train stage's figures: what each batch comes to, and the loss curves."""

from __future__ import annotations

import math

from batchscout.orchestrator.config.stages import Train
from batchscout.orchestrator.stages.context import StageContext
from batchscout.orchestrator.stages.curves import best_so_far, loss_curves
from batchscout.orchestrator.stages.estimates.generalisation import Generalisation
from batchscout.orchestrator.stages.figures import OTHERS_COLOUR, Axis, Figure, Mark, Series
from batchscout.orchestrator.stages.findings import winner_of
from batchscout.orchestrator.stages.train.choice import full_runs
from batchscout.orchestrator.stages.train.findings import TrainFindings, chosen_run, loss_deviation, trained
from batchscout.orchestrator.stages.train.surface_figure import surface_figures
from batchscout.orchestrator.units import gap_text, loss_text, probability_text


def figures(context: StageContext[Train]) -> list[Figure]:
    """Return the surface with the runs on it, what each batch would come to, then the loss curves of all runs."""
    findings = trained(context.study)
    deviation = loss_deviation(context.study, context.config.objective)
    curves = loss_curves(context.trials(), winner_of(context.study, TrainFindings), deviation)
    curves += best_so_far(context.study, full_runs(context.study), chosen_run(context.study))
    surface = surface_figures(context)
    if findings is None:
        return [*surface, *curves]
    batches = [_of_batches(context, findings)] if len(findings.batches) > 1 else []
    gaps = findings.generalisation
    return [*surface, *batches, *([_of_gaps(gaps)] if gaps and len(gaps.gaps) > 1 else []), *curves]


def _of_gaps(generalisation: Generalisation) -> Figure:
    """Return the generalisation gap of every batch that was trained to its end."""
    spread = generalisation.deviation / math.sqrt(2)  # of one of the two gaps whose difference has that deviation
    marks = tuple(
        Mark(gap.effective_batch_size, gap.gap, gap_text(gap.gap), low=gap.gap - spread, high=gap.gap + spread)
        for gap in generalisation.gaps
    )
    caption = (
        "The validation loss at the end of each batch's best run, less the loss over samples that it was trained on, "
        "both without dropout; the bar is the seeds' deviation."
    )
    return _over_batches("generalisation_gap", Axis("generalisation gap", precise=gap_text), marks, caption)


def _of_batches(context: StageContext[Train], findings: TrainFindings) -> Figure:
    """Return the score of every batch at its best rate, with its interval."""
    winner = chosen_run(context.study) or findings.winner
    chosen = context.study.trials[winner].config.effective_batch_size
    marks = tuple(
        Mark(
            one.effective_batch_size,
            one.score,
            f"P {probability_text(one.p_best)}",
            "chosen" if one.effective_batch_size == chosen else "point",
            low=one.score_low,
            high=one.score_high,
        )
        for one in findings.batches
    )
    what = "seconds to the target loss" if context.config.objective == "target" else "validation loss"
    caption = (
        "What each batch comes to at its own best learning rate, by the surface through all runs, with its 90 % interval. "
        "P: the probability that it is the best of all."
    )
    return _over_batches("batches", Axis(f"{what} at equal cost", precise=loss_text), marks, caption, "P(best)")


def _over_batches(name: str, y_axis: Axis, marks: tuple[Mark, ...], caption: str, beside: str = "") -> Figure:
    x_axis = Axis("effective batch, samples", log=True, ticks=tuple(float(mark.x) for mark in marks))
    return Figure(
        name, x_axis, y_axis, (Series("", marks, OTHERS_COLOUR),), caption, beside=beside, width=540, height=290
    )
