"""Ramps that begin with the chosen batch and grow as the critical batch does, and what each may train on. Pure."""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Sequence

import numpy as np

from orchestrator.config.stages import Branch, RampKind
from orchestrator.stages.branch.findings import PointFindings
from orchestrator.stages.branch.source import Source, rescaled_rate
from orchestrator.stages.context import StageContext
from trainers.config import Phase, Split
from trainers.ramps import doubling_ramp, linear_ramp


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

    The speed of each batch is the branches' own. What they did not time takes no longer a sample than the chosen batch.
    """
    config = source.trial.config
    known = {} if context.config.objective == "samples" else _step_seconds(context)
    if config.gradient_accumulation_steps not in known:
        return config.sample_budget

    def seconds_per_sample(accumulation: int) -> float:
        seconds = float(np.interp(accumulation, sorted(known), [known[one] for one in sorted(known)]))
        return seconds / Split(config.micro_batch_size, accumulation, config.world_size).effective_batch_size

    left, seen = config.sample_budget * seconds_per_sample(config.gradient_accumulation_steps), 0
    ends = [*(phase.from_samples for phase in phases), None]
    steps = [config.gradient_accumulation_steps, *(phase.gradient_accumulation_steps for phase in phases)]
    for accumulation, end in zip(steps, ends, strict=True):
        most = math.inf if end is None else (end - seen) * seconds_per_sample(accumulation)
        samples = min(left, most) / seconds_per_sample(accumulation)
        left, seen = left - min(left, most), seen + samples
    batch = Split(config.micro_batch_size, steps[-1], config.world_size).effective_batch_size
    return max(phases[-1].from_samples // batch + 1, round(seen / batch)) * batch


def _step_seconds(context: StageContext[Branch]) -> dict[int, float]:
    """Return the median seconds of an optimizer step of the branches, by their accumulation steps."""
    found: dict[int, list[float]] = {}
    for trial in context.trials():
        seconds = trial.metric("step_seconds")
        if trial.config.branch_from is not None and seconds:
            found.setdefault(trial.config.gradient_accumulation_steps, []).append(seconds)
    return {accumulation: statistics.median(values) for accumulation, values in found.items()}
