"""How fast does each effective batch train in its fastest form, and what does accumulation buy?

Every batch that a full run can use is timed in the form that the frontier's points predict to be its fastest, and where
two forms are close, in both.

    batches (which, and why not the others) -> forms of each -> rounds over all forms, until the rates are known
"""

from batchscout.orchestrator.config.stages import Throughput
from batchscout.orchestrator.stages.context import StageContext
from batchscout.orchestrator.stages.probing import allowed_in_words
from batchscout.orchestrator.stages.stage import Stage
from batchscout.orchestrator.stages.throughput.conclude import conclude
from batchscout.orchestrator.stages.throughput.figures import derived, figures
from batchscout.orchestrator.stages.throughput.findings import ThroughputFindings as ThroughputFindings
from batchscout.orchestrator.stages.throughput.propose import propose
from batchscout.orchestrator.units import counted_between, listed


def describe(context: StageContext[Throughput]) -> list[str]:
    stage = context.stage
    rounds = counted_between(stage.rounds, max(stage.rounds, stage.max_rounds), "round")
    return [
        f"the baseline's batch, powers of two up to the micro-batch, and {listed(stage.multiples)} times that",
        f"{rounds} over all of them, until the rates are known",
        *allowed_in_words(context),
    ]


COLUMNS = (
    "tokens_per_second", "step_seconds", "micro_batches_per_step", "padding_share", "coherence", "coherence_floor", "noise_scale", "noise_scale_low",
    "noise_scale_high", "goodput",
)  # fmt: skip

STAGE = Stage[Throughput](propose, conclude, describe, figures, COLUMNS, derived)
