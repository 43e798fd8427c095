"""The train stage's figures: what each batch comes to, and the loss curves."""

from __future__ import annotations

from orchestrator.config.stages import Train
from orchestrator.stages.context import StageContext
from orchestrator.stages.curves import loss_curves
from orchestrator.stages.estimates.generalisation import Gap
from orchestrator.stages.figures import Axis, Figure, Mark, Series
from orchestrator.stages.findings import found, winner_of
from orchestrator.stages.train.findings import TrainFindings


def figures(context: StageContext[Train]) -> list[Figure]:
    """Return what each batch would come to, then the loss curves of all runs."""
    findings = found(context.study, TrainFindings)
    curves = loss_curves(context.trials(), winner_of(context.study, TrainFindings))
    if findings is None:
        return curves
    batches = [_of_batches(context, findings)] if len(findings.batches) > 1 else []
    gaps = findings.generalisation.gaps if findings.generalisation else ()
    return [*batches, *([_of_gaps(gaps)] if len(gaps) > 1 else []), *curves]


def _of_gaps(gaps: tuple[Gap, ...]) -> Figure:
    """Return the generalisation gap of every batch that was trained to its end."""
    marks = tuple(Mark(gap.effective_batch_size, gap.gap, f"{gap.gap:.3f}") for gap in gaps)
    return Figure(
        Axis("effective batch, samples", log=True, ticks=tuple(float(mark.x) for mark in marks)),
        Axis("generalisation gap"),
        (Series("", marks),),
        "The validation loss at the end of each batch's best run, less the loss over samples that it was trained on, "
        "both without dropout.",
        width=640,
        height=290,
    )


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
        "P: the probability that it is the best, or within the seeds' deviation (or 0.4 %) of it.",
        width=640,
        height=290,
    )
