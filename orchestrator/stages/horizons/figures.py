"""The horizons stage's figure: the loss that each batch ends at, over the length of its run."""

from __future__ import annotations

from batchscout.orchestrator.config.stages import Horizons
from batchscout.orchestrator.stages.context import StageContext
from batchscout.orchestrator.stages.curves import seeds_bar, with_deviation
from batchscout.orchestrator.stages.estimates.observed import setting_of
from batchscout.orchestrator.stages.figures import CATEGORIES, Axis, Figure, Mark, Series
from batchscout.orchestrator.stages.findings import found
from batchscout.orchestrator.stages.horizons.conclude import ended
from batchscout.orchestrator.stages.horizons.findings import HorizonsFindings
from batchscout.orchestrator.stages.horizons.propose import rivals
from batchscout.orchestrator.stages.train import loss_deviation
from batchscout.orchestrator.units import loss_text


def figures(context: StageContext[Horizons]) -> list[Figure]:
    """Return what the runs at both rivals' rates ended at over their lengths, and what each batch would after the real run."""
    findings, budget = found(context.study, HorizonsFindings), context.config.sample_budget
    deviation, runs = loss_deviation(context.study, context.config.objective), ended(context)
    foretold = {one.effective_batch_size: one for one in findings.batches} if findings else {}
    whole = {one.config.effective_batch_size: one for one in rivals(context)}
    series = []
    for number, batch in enumerate(sorted(whole.keys() | foretold.keys())):
        mine = [setting_of(whole[batch].first)] if batch in whole else []
        lengths = [(2**run.octaves * budget, run.loss) for run in runs if run.setting in mine]
        lengths += [(float(budget), whole[batch].val_loss)] if mine else []
        marks = [with_deviation(Mark(length, loss), deviation) for length, loss in lengths]
        if findings and (one := foretold.get(batch)):
            marks.append(Mark(findings.samples, one.val_loss, low=one.val_loss_low, high=one.val_loss_high))
        series.append(Series(f"batch {batch}", tuple(marks), CATEGORIES[number % len(CATEGORIES)]))
    return [
        Figure(
            "horizons",
            Axis("length of the run, samples of the baseline", log=True),
            Axis("validation loss at its end", precise=loss_text),
            tuple(series),
            f"Each point is a whole run with its own schedule.{seeds_bar(context.trials())} The last one, with its 90 % interval, is extrapolated.",
        )
    ]
