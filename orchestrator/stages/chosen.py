"""The choice of earlier stages, for the stages after them."""

from __future__ import annotations

from batchscout.orchestrator.config.mode import Mode
from batchscout.orchestrator.config.stages import StageKeys
from batchscout.orchestrator.stages.context import StageContext
from batchscout.orchestrator.stages.findings import found
from batchscout.orchestrator.stages.frontier.findings import FrontierFindings
from batchscout.orchestrator.study.state import Study
from batchscout.trainers.config import Split


def chosen_split(context: StageContext[StageKeys]) -> Split:
    """Return the frontier's micro-batch without accumulation, or the study file's batch if no frontier has chosen
    one."""
    frontier = found(context.study, FrontierFindings)
    return context.split(frontier.chosen.micro_batch_size) if frontier else context.given_split()


def chosen_mode(study: Study) -> Mode | None:
    """Return the mode that the frontier chose; None, which stands for the study file's, if no frontier has chosen
    one."""
    frontier = found(study, FrontierFindings)
    return frontier.chosen.mode if frontier else None
