"""How fast every effective batch trains in its fastest form."""

from __future__ import annotations

from batchscout.orchestrator.config.stages import StageKeys
from batchscout.orchestrator.stages.context import StageContext
from batchscout.orchestrator.stages.findings import found
from batchscout.orchestrator.stages.forms import Rate, forms, measured_sizes, rate_of
from batchscout.orchestrator.stages.frontier.findings import FrontierFindings
from batchscout.orchestrator.stages.throughput.findings import ThroughputFindings

__all__ = ["Rate", "rates"]


def rates(context: StageContext[StageKeys]) -> tuple[Rate, ...]:
    """Return the rate of every effective batch that was timed, the smallest first.

    Where the throughput stage timed none they are those of the frontier's micro-batch sizes; empty without a frontier.
    """
    throughput, frontier = found(context.study, ThroughputFindings), found(context.study, FrontierFindings)
    if throughput and throughput.rates:
        return throughput.rates
    if frontier is None:
        return ()
    world_size = context.config.world_size
    fastest = [forms(frontier, size * world_size, world_size)[0] for size in measured_sizes(frontier)]
    return tuple(rate_of(form, form.predicted) for form in fastest)
