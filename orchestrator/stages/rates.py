"""How fast every effective batch trains in its fastest form."""

from __future__ import annotations

from orchestrator.config.stages import StageKeys
from orchestrator.stages.context import StageContext
from orchestrator.stages.findings import found
from orchestrator.stages.forms import Form, Rate, forms, measured_sizes
from orchestrator.stages.frontier.findings import FrontierFindings
from orchestrator.stages.throughput import ThroughputFindings

__all__ = ["Rate", "rates"]

# A form that was timed once, and not in turns with others, may be off by this factor either way, as a 95 % interval.
# Paired timings on two shared cores lay between 0.86 and 1.05 of each other, and a point's accumulation is not the
# form's.
SINGLE_TIMING_FACTOR = 1.2


def rates(context: StageContext[StageKeys]) -> tuple[Rate, ...]:
    """Return the rate of every effective batch that was timed, the smallest first.

    Where the throughput stage timed none they are those of the frontier's micro-batch sizes; empty without a frontier.
    """
    throughput, frontier = found(context.study, ThroughputFindings), found(context.study, FrontierFindings)
    if throughput and throughput.rates:
        return throughput.rates
    return _of_the_frontier(frontier, context.config.world_size) if frontier else ()


def _of_the_frontier(frontier: FrontierFindings, world_size: int) -> tuple[Rate, ...]:
    return tuple(_timed_once(forms(frontier, size * world_size, world_size)[0]) for size in measured_sizes(frontier))


def _timed_once(form: Form) -> Rate:
    split, rate = form.split, form.samples_per_second
    return Rate(
        split.micro_batch_size,
        split.gradient_accumulation_steps,
        split.effective_batch_size,
        form.mode,
        rate,
        rate / SINGLE_TIMING_FACTOR,
        rate * SINGLE_TIMING_FACTOR,
        num_rounds=1,
    )
