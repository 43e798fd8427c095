"""The horizons stage's figure: the loss that each batch ends at, over the length of its run."""

from __future__ import annotations

from batchscout.orchestrator.config.stages import Horizons
from batchscout.orchestrator.stages.context import StageContext
from batchscout.orchestrator.stages.curves import seeds_bar, with_deviation
from batchscout.orchestrator.stages.estimates.ranking import standings
from batchscout.orchestrator.stages.figures import Axis, Figure, Mark, Series
from batchscout.orchestrator.stages.findings import found
from batchscout.orchestrator.stages.horizons.conclude import curve_of
from batchscout.orchestrator.stages.horizons.findings import HorizonsFindings
from batchscout.orchestrator.stages.horizons.propose import rivals


def figures(context: StageContext[Horizons]) -> list[Figure]:
    ended = {one.name: one for one in standings(context.trials())}
    findings = found(context.study, HorizonsFindings)
    budget = context.config.sample_budget
    series = []
    for colour, rival in enumerate(rivals(context)):
        curve = curve_of(context, rival, ended)
        marks = [with_deviation(Mark(one.length * budget, one.loss), one.deviation) for one in curve]
        for one in findings.batches if findings else ():
            if findings and one.effective_batch_size == rival.effective_batch_size:
                low, high = one.val_loss_low, one.val_loss_high
                marks.append(Mark(findings.samples, one.val_loss, low=low, high=high))
        series.append(Series(f"batch {rival.effective_batch_size}", tuple(marks), colour))
    return [
        Figure(
            "horizons",
            Axis("length of the run, samples of the baseline", log=True),
            Axis("validation loss at its end"),
            tuple(series),
            f"Each point is a whole run with its own schedule.{seeds_bar(context.trials())} The last one, with its 90 % interval, is extrapolated.",
        )
    ]
