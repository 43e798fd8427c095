"""Which batch and learning rate should the real run have, which is longer than the study?

Whole runs at shares of the study's length, of the chosen batch and its strongest rival, carry what was found to the length
of the real run.

    rivals -> runs at every share (propose) -> loss and best rate over the length (longer) -> conclude
"""

from __future__ import annotations

import math

from batchscout.orchestrator.config.stages import Horizons
from batchscout.orchestrator.stages.context import StageContext
from batchscout.orchestrator.stages.curves import TRAINING_COLUMNS
from batchscout.orchestrator.stages.horizons.conclude import conclude
from batchscout.orchestrator.stages.horizons.figures import figures
from batchscout.orchestrator.stages.horizons.findings import HorizonsFindings as HorizonsFindings
from batchscout.orchestrator.stages.horizons.propose import propose
from batchscout.orchestrator.stages.horizons.real_run import as_recommended as as_recommended
from batchscout.orchestrator.stages.horizons.real_run import carried_to as carried_to
from batchscout.orchestrator.stages.horizons.real_run import nearest_run as nearest_run
from batchscout.orchestrator.stages.stage import Stage


def describe(context: StageContext[Horizons]) -> list[str]:
    shares = ", ".join(f"{share:g}" for share in sorted(context.stage.shares))
    return [
        f"the chosen batch and its strongest rival at {shares} of their budgets; the chosen one at twice and half its rate"
    ]


def num_full_runs(context: StageContext[Horizons]) -> int:
    """Return what all of its shorter runs together cost, in whole ones."""
    return math.ceil(2 * sum(context.stage.shares) + 2 * min(context.stage.shares))


STAGE = Stage[Horizons](
    propose, conclude, describe, figures, TRAINING_COLUMNS, num_full_runs=num_full_runs, proposes_once=True
)
