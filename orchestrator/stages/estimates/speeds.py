"""Runs beside the speeds that their sample budgets were made of: how far off they were. Pure."""

from __future__ import annotations

import math
import statistics
from collections import Counter
from collections.abc import Mapping, Sequence

from batchscout.orchestrator.stages.estimates.node_speeds import Place, Straggler, slowness, stragglers
from batchscout.orchestrator.study.causes import Cause
from batchscout.orchestrator.study.trial import PLANNED_RATE, Trial, TrialState

AS_PLANNED = 0.8
"""Within this factor the speed of a run is the planned one. Plans were timed in turns and without statistics, which take a part of
each of a run's first steps."""
SLOW_RUNS = 2
"""One run that was stopped for its speed may have met a passing load: so many speak for their batch."""


def usual_share(trials: Sequence[Trial]) -> float | None:
    """Return the usual speed of the runs that have ended, as a share of the planned one; None before one has."""
    slow = stragglers(trials)
    ended = [_share(trial, slow) for trial in trials if trial.state is TrialState.COMPLETE]
    known = [share for share in ended if share is not None]
    return statistics.median(known) if known else None


def off_plan(trials: Sequence[Trial]) -> dict[int, float]:
    """Return the batches whose runs did not have the planned speed, with the share of it that they had, beside what is usual: what
    slows all alike tells nothing about a batch, nor does a node that is slower than the others."""
    usual, stopped, slow = usual_share(trials), num_too_slow(trials), stragglers(trials)
    if usual is None:
        return {}
    by_batch = dict[int, list[float]]()
    for trial in trials:
        batch, share = trial.config.effective_batch_size, _share(trial, slow)
        if share is not None and (trial.cause is not Cause.LOW_THROUGHPUT or stopped[batch] >= SLOW_RUNS):
            by_batch.setdefault(batch, []).append(share)
    found = {batch: statistics.median(shares) / usual for batch, shares in sorted(by_batch.items())}
    return {batch: share for batch, share in found.items() if abs(math.log(share)) > math.log(1 / AS_PLANNED)}


def num_too_slow(trials: Sequence[Trial]) -> Counter[int]:
    """Return how many runs of each batch were stopped for their speed; the seeds of a run count once."""
    stopped = {trial.candidate: trial for trial in trials if trial.cause is Cause.LOW_THROUGHPUT}
    return Counter(trial.config.effective_batch_size for trial in stopped.values())


def _share(trial: Trial, slow: Mapping[Place, Straggler]) -> float | None:
    planned, seconds = trial.proposal.expected.get(PLANNED_RATE), trial.metric("step_seconds")
    if not planned or not seconds:
        return None
    return slowness(trial, slow) * trial.config.effective_batch_size / seconds / planned
