"""Ramps that begin with the chosen batch and grow as the critical batch does, and what each may train on. Pure."""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Sequence

import numpy as np

from batchscout.orchestrator.config.stages import Branch, RampKind
from batchscout.orchestrator.stages.branch.findings import PointFindings
from batchscout.orchestrator.stages.branch.source import Source, rescaled_rate
from batchscout.orchestrator.stages.context import StageContext
from batchscout.trainers.config import Phase, Split
from batchscout.trainers.step.ramps import doubling_ramp, linear_ramp


def phases_of(
    context: StageContext[Branch], source: Source, points: Sequence[PointFindings], kind: RampKind
) -> tuple[Phase, ...]:
    """Return the phases of a ramp from the chosen batch to the largest critical batch that was found.

    Each phase has the learning rate that the scaling rule gives its batch. The critical batch is taken to be the largest
    that came back for certain.
    """
    own = source.trial.config.split

    def rate(accumulation: int) -> float:
        batch = Split(own.micro_batch_size, accumulation, own.world_size).effective_batch_size
        return rescaled_rate(context, source, batch)

    first = own.gradient_accumulation_steps
    if kind == "doubling":
        return doubling_ramp(first, doublings(source.effective_batch_size, points), rate)
    last = first * max(point.low for point in points) // source.effective_batch_size
    return linear_ramp(first, last, points[-1].samples_seen, rate)


def doublings(effective_batch_size: int, points: Sequence[PointFindings]) -> tuple[int, ...]:
    """Return the sample counts at which the batch doubles: where the critical batch is that large, and a full step of each
    batch later than the doubling before.

    Between two points it is taken to grow as a power of the samples, before the first it is not known. Each count is a
    multiple of the batch that begins there, so that every trainer's steps meet it.
    """
    largest, found = max(point.low for point in points), list[int]()
    batch = 2 * effective_batch_size
    while batch <= largest:
        earliest = found[-1] + batch // 2 if found else 0
        found.append(math.ceil(max(earliest, _reached(batch, points)) / batch) * batch)
        batch *= 2
    return tuple(found)


def _reached(batch: int, points: Sequence[PointFindings]) -> float:
    """Return the samples at which the critical batch is that large for the first time."""
    if points[0].low >= batch:
        return points[0].samples_seen
    before, after = next((a, b) for a, b in itertools.pairwise(points) if a.low < batch <= b.low)
    share = math.log(batch / before.low) / math.log(after.low / before.low)
    return before.samples_seen * (after.samples_seen / before.samples_seen) ** share


def equal_cost_budget(context: StageContext[Branch], source: Source, phases: Sequence[Phase]) -> int:
    """Return the samples that a ramp may train on: as many as the chosen run, or as it gets done in that one's time.

    The speeds are the branches' own; the seconds of a step are nearly linear in its micro-batches.
    """
    config, known = source.trial.config, _step_seconds(context)
    if context.config.objective == "samples" or config.gradient_accumulation_steps not in known:
        return config.sample_budget
    sizes = [config.gradient_accumulation_steps, *(phase.gradient_accumulation_steps for phase in phases)]
    batches = [Split(config.micro_batch_size, size, config.world_size).effective_batch_size for size in sizes]
    each = np.interp(sizes, sorted(known), [known[size] for size in sorted(known)]) / batches
    left, seen = config.sample_budget * each[0], 0.0
    for seconds_per_sample, end in zip(each, [*(phase.from_samples for phase in phases), math.inf], strict=True):
        samples = min(left / seconds_per_sample, end - seen)
        left, seen = left - samples * seconds_per_sample, seen + samples
    return max(phases[-1].from_samples // batches[-1] + 1, round(seen / batches[-1])) * batches[-1]


def _step_seconds(context: StageContext[Branch]) -> dict[int, float]:
    """Return the median seconds of an optimizer step of the branches, by their accumulation steps."""
    found: dict[int, list[float]] = {}
    for trial in context.trials():
        seconds = trial.metric("step_seconds")
        if trial.config.branch_from is not None and seconds:
            found.setdefault(trial.config.gradient_accumulation_steps, []).append(seconds)
    return {accumulation: statistics.median(values) for accumulation, values in found.items()}
