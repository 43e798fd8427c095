"""Up to which batch does no sample go to waste, and does that grow? Branches of the chosen run, then ramps.

The chosen run is trained again up to the last point (the trunk, which keeps its checkpoints). From each point branches
with larger batches take the same samples. Where the batch up to which their losses come back grows, ramps of the batch are
trained in the chosen run's time, and one that wins by more than the seeds' spread is recommended.

    source (which run, where, which batches) -> trunk -> branches -> critical (the batch at each point) -> ramps -> conclude
"""

from __future__ import annotations

import math

from batchscout.orchestrator.config.stages import Branch
from batchscout.orchestrator.stages.branch.conclude import conclude
from batchscout.orchestrator.stages.branch.figures import figures
from batchscout.orchestrator.stages.branch.findings import BranchFindings as BranchFindings
from batchscout.orchestrator.stages.branch.findings import BranchLoss as BranchLoss
from batchscout.orchestrator.stages.branch.findings import PointFindings as PointFindings
from batchscout.orchestrator.stages.branch.findings import RampRun as RampRun
from batchscout.orchestrator.stages.branch.propose import propose
from batchscout.orchestrator.stages.context import StageContext
from batchscout.orchestrator.stages.curves import TRAINING_COLUMNS
from batchscout.orchestrator.stages.findings import found, winner_of
from batchscout.orchestrator.stages.stage import Change, Stage


def describe(context: StageContext[Branch]) -> list[str]:
    stage = context.stage
    at, multiples = (", ".join(f"{one:g}" for one in some) for some in (stage.at, stage.multiples))
    ramps = f"; where that grows, a ramp: {', '.join(stage.ramps)}" if stage.ramps else ""
    return [
        f"from {at} of the chosen run, branches of {stage.samples:g} of it at {multiples} x its batch: the critical batch{ramps}"
    ]


def num_full_runs(context: StageContext[Branch]) -> int:
    """Return the ramps, and as many full runs as have the samples of trunk and branches."""
    stage = context.stage
    multiples = {1, *stage.multiples}
    return len(stage.ramps) + math.ceil(max(stage.at) + len(stage.at) * len(multiples) * stage.samples)


def change(context: StageContext[Branch]) -> Change | None:
    """Return the run that the winning ramp grows from."""
    findings = found(context.study, BranchFindings)
    return Change(findings.source) if findings and findings.winner else None


STAGE = Stage[Branch](
    propose,
    conclude,
    describe,
    figures,
    TRAINING_COLUMNS,
    winner=lambda context: winner_of(context.study, BranchFindings),
    change=change,
    precedence=4,
    num_full_runs=num_full_runs,
)
