"""Can a run that is slower than it was timed still show its batch to be the best? Pure."""

from __future__ import annotations

import numpy as np

from batchscout.orchestrator.config.stages import Train
from batchscout.orchestrator.stages.context import StageContext
from batchscout.orchestrator.stages.train.choice import off_speed, surface_of
from batchscout.orchestrator.stages.train.lineup import lineup_of
from batchscout.orchestrator.study.trial import Trial
from batchscout.orchestrator.units import loss_text

CANNOT_WIN = 0.01
"""The probability of being the best below which a slow batch is not trained on."""


def why_it_cannot_win(context: StageContext[Train], trial: Trial) -> str | None:
    """Return why the batch of a run that trains more slowly than it was timed cannot be the best any more, even at its best
    learning rate; None while it may be."""
    batch = trial.config.effective_batch_size
    share = off_speed(context).get(batch)
    if trial.protected or share is None or share > 1:
        return None
    surface = surface_of(context, lineup_of(context))
    if surface is None or surface.p_best.get(batch, 1.0) >= CANNOT_WIN:
        return None
    ends = {one: surface.best_loss(one) for one in surface.coordinates.batches}
    ahead = min(ends, key=lambda one: float(np.median(ends[one])))
    return (
        f"runs of effective batch {batch} trained at {share:.2f} x the speed that they were timed at, beside the others: at equal "
        f"cost it would end at val loss {loss_text(np.median(ends[batch]))}, {loss_text(np.quantile(ends[batch], 0.05))} at best, even at its best learning "
        f"rate, and effective batch {ahead} ends at {loss_text(np.median(ends[ahead]))}"
    )
