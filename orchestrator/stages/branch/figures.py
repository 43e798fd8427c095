"""The branch stage's figures: what the branches from each point end at, the critical batch, and how ramps do."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

from batchscout.orchestrator.config.stages import Branch
from batchscout.orchestrator.stages.branch.critical import seeds_at
from batchscout.orchestrator.stages.branch.findings import BranchFindings, PointFindings
from batchscout.orchestrator.stages.branch.source import Source, source_of
from batchscout.orchestrator.stages.context import StageContext
from batchscout.orchestrator.stages.curves import loss_axis, loss_curves
from batchscout.orchestrator.stages.figures import CATEGORIES, OTHERS_COLOUR, Axis, Figure, Mark, Series
from batchscout.orchestrator.stages.findings import found, winner_of
from batchscout.orchestrator.stages.train import TrainFindings, loss_deviation
from batchscout.orchestrator.study.trial import Trial
from batchscout.orchestrator.units import number_text


def figures(context: StageContext[Branch]) -> list[Figure]:
    """Return the losses of the branches from every point, the critical batch over the samples, and the ramps' curves."""
    if winner_of(context.study, TrainFindings) is None:
        return []
    source, findings = source_of(context), found(context.study, BranchFindings)
    branches = [_of_branches(context, source, point) for point in source.points]
    critical = [_of_critical_batch(findings.points)] if findings and findings.points else []
    return [*branches, *critical, *_of_ramps(context, source, findings)]


def _of_branches(context: StageContext[Branch], source: Source, point: int) -> Figure:
    """Return the loss of each batch's branches over the samples, the mean of the seeds."""
    series = tuple(
        Series(
            f"batch {multiple * source.effective_batch_size}",
            _mean_curve(seeds_at(context, source, point, multiple)),
            CATEGORIES[number % len(CATEGORIES)],
        )
        for number, multiple in enumerate(source.multiples)
    )
    y_axis, cut = loss_axis([[mark.y for mark in one.marks] for one in series])
    return Figure(
        f"branches_from_{point}",
        Axis("samples seen"),
        y_axis,
        series,
        f"Branches from {number_text(point)} samples, by effective batch: the same weights and samples; a bar is from the lowest "
        f"seed to the highest.{cut}",
        width=520,
        height=260,
    )


def _mean_curve(branches: dict[int, Trial]) -> tuple[Mark, ...]:
    """Return the mean loss of the seeds, with the lowest and the highest, at every evaluation that all of them have."""
    curves = [trial.curve("samples_seen") for trial in branches.values()]
    return tuple(
        Mark(points[0][0], statistics.fmean(losses), low=min(losses), high=max(losses))
        for points in zip(*curves, strict=False)
        if points
        for losses in [[loss for _, loss in points]]
    )


def _of_critical_batch(points: Sequence[PointFindings]) -> Figure:
    marks = tuple(map(_critical_mark, points))
    tried = {loss.effective_batch_size for point in points for loss in point.losses}
    return Figure(
        "critical_batch",
        Axis("samples seen", zero=True),
        Axis("critical batch, samples", log=True, ticks=tuple(float(batch) for batch in sorted(tried))),
        (Series("", marks, OTHERS_COLOUR),),
        "The largest batch whose loss comes back; a bar reaches to the smallest whose does not.",
        width=520,
        height=260,
    )


def _critical_mark(point: PointFindings) -> Mark:
    text = "or more" if point.high is None else "undetermined" if point.critical_batch_size is None else str(point.low)
    high = None if point.high is None else float(point.high)
    return Mark(point.samples_seen, point.low, text, low=None if high is None else float(point.low), high=high)


def _of_ramps(context: StageContext[Branch], source: Source, findings: BranchFindings | None) -> list[Figure]:
    """Return the curves of the ramps beside the chosen run's; none without a ramp."""
    ramps = [trial for trial in context.trials() if trial.config.ramp]
    winner = findings.winner if findings else None
    deviation = loss_deviation(context.study, context.config.objective)
    return loss_curves([source.trial, *ramps], winner, deviation) if ramps else []
