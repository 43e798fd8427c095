"""What a recommendation counts in samples, counted in optimizer steps, as other trainers do."""

from __future__ import annotations

import math
from dataclasses import replace

from batchscout.orchestrator.output.recommendation import Recommendation
from batchscout.trainers.config import num_steps


def as_long_as_the_real_run(r: Recommendation) -> Recommendation:
    """Return the run to make: as long as the answer was carried to, or else as the real run, or what this setting trains on in the time that
    the run under `from` takes; as long as the study's own where none of these is known."""
    real = r.real_run
    if real is not None:
        return replace(r, sample_budget=real.samples) if r.ramp else r
    samples = r.own_run.samples if r.own_run else None
    if samples is None:
        return r
    # Settings were compared after equal time: one that is faster than the user's own trained on more samples.
    times = samples / (r.study_sample_budget or r.sample_budget)
    # In a shorter run the warm-up keeps its share, or the rate might never be reached.
    warmup_samples = round(min(1.0, times) * r.warmup_samples)
    return replace(r, sample_budget=round(times * r.sample_budget), warmup_samples=warmup_samples)


def steps_of(samples: int, r: Recommendation) -> int:
    """Return the optimizer steps that reach so many samples."""
    return num_steps(samples, batches_of(r))


def batches_of(r: Recommendation) -> list[tuple[int, int]]:
    """Return the sample count at which each phase begins, and its effective batch."""
    per_accumulation_step = r.micro_batch_size * r.world_size
    grown = [(p.from_samples, p.gradient_accumulation_steps * per_accumulation_step) for p in r.ramp or ()]
    return [(0, r.effective_batch_size), *grown]


def max_steps(r: Recommendation) -> int:
    return steps_of(r.sample_budget, r)


def warmup_steps(r: Recommendation) -> int:
    return steps_of(r.warmup_samples, r)


def times_as_many_steps(r: Recommendation) -> float | None:
    """Return the run's steps over those of the user's own run; None where the length of that is not known."""
    own = r.own_run
    return max_steps(r) * own.samples_per_step / own.samples if own and own.samples else None


def has_own_length(r: Recommendation) -> bool:
    """True if the run takes the samples of the user's own run, as far as these are known."""
    own = r.own_run
    if own is None or r.real_run is not None:
        return False
    return own.samples is None or is_about_one(r.sample_budget / own.samples)


def is_about_one(times: float) -> bool:
    """True if that is not worth a word: lengths are rounded to whole steps."""
    return abs(times - 1) < 0.01


def decay_steps(r: Recommendation) -> int:
    """Return the steps of the linear anneal; 0 where the schedule has none."""
    schedule, budget = r.schedule, r.sample_budget
    if schedule.type != "warmup_stable_decay":
        return 0
    if r.ramp:
        return max_steps(r) - steps_of(math.floor((1 - schedule.decay) * budget), r)
    return steps_of(math.ceil(schedule.decay * budget), r)
