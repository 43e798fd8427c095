"""Lines of Python that are the study's learning rate, and the phases of a batch that grows."""

from __future__ import annotations

from batchscout.orchestrator.output.exports.counted import batches_of, decay_steps, max_steps, steps_of, warmup_steps
from batchscout.orchestrator.output.recommendation import Recommendation


def factor_lines(r: Recommendation, total: str | None = None) -> list[str]:
    """Return the body of a function that is the study's schedule; its `step` counts the steps that have ended. total: the function's name for the
    steps of the run; None where the recommendation has their number."""
    if r.ramp:
        return _growing_factor_lines(r)
    schedule, warmup = r.schedule, warmup_steps(r)
    steps = total or max_steps(r)
    lines = [f"    warmup = min(1.0, (step + 1) / {max(1, warmup)})"]
    if schedule.type == "cosine":
        progress = f"min(1.0, max(0.0, (step + 1 - {warmup}) / ({steps} + 1 - {warmup})))"
        return [*lines, f"    return min(warmup, 0.5 * (1 + math.cos(math.pi * {progress})))"]
    if factors := schedule.factors:
        return [
            *lines,
            f"    factors = {[*factors]}  # at even distances from the first step to the last",
            f"    place = min(1.0, step / max(1, {steps} - 1)) * {len(factors) - 1}",
            f"    below = min(int(place), {len(factors) - 2})",
            "    return min(warmup, factors[below] + (place - below) * (factors[below + 1] - factors[below]))",
        ]
    if schedule.type == "warmup_stable_decay" and schedule.decay:
        decay = decay_steps(r) if total is None else f"{schedule.decay!r} * {total}"
        return [*lines, f"    return min(warmup, max(0.0, ({steps} - step) / ({decay} + 1)))"]
    return [*lines, "    return warmup"]


def _growing_factor_lines(r: Recommendation) -> list[str]:
    """Return the body where the batch grows: warm-up and anneal are counted in samples."""
    last, anneal = batches_of(r)[-1][1], r.schedule.decay * r.sample_budget
    return [
        "    first_step, first_sample, accumulation, ratio = phase_of(step)",
        f"    samples = first_sample + (step + 1 - first_step) * accumulation * {r.micro_batch_size * r.world_size}",
        f"    warmup = min(1.0, samples / {max(1, r.warmup_samples)})",
        f"    return ratio * min(warmup, max(0.0, ({r.sample_budget + last} - samples) / {anneal + last!r}))"
        if anneal
        else "    return ratio * warmup",
    ]


def phase_lines(r: Recommendation) -> list[str]:
    """Return the phases of a batch that grows, and a function that says which one a step is of."""
    first = f"(0, 0, {r.gradient_accumulation_steps}, 1.0)"
    phases = [
        f"({steps_of(p.from_samples, r)}, {p.from_samples}, {p.gradient_accumulation_steps}, "
        f"{p.learning_rate / r.learning_rate!r})"
        for p in r.ramp or ()
    ]
    return [
        "# (first optimizer step, first sample, accumulation, learning rate over the first phase's)",
        f"PHASES = [{', '.join((first, *phases))}]",
        "",
        "",
        "def phase_of(step):",
        "    return max(phase for phase in PHASES if phase[0] <= step)",
        "",
        "",
    ]
