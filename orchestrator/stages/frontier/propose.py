"""The frontier's trials: probes, then timings of the finalists, then the best once more in a fresh process."""

from __future__ import annotations

from batchscout.orchestrator.config.stages import Frontier
from batchscout.orchestrator.stages.context import StageContext
from batchscout.orchestrator.stages.frontier.progress import FrontierProgress
from batchscout.orchestrator.study.trial import Proposal


def propose(context: StageContext[Frontier]) -> list[Proposal]:
    """Return all proposals so far and the next ones; the same journal always gives the same ones."""
    known, proposals = FrontierProgress(context), list[Proposal]()
    for part in (known.probes, known.knobs, known.finalists, known.verification):
        if not known.trials.context.have_ended(proposals):
            break
        proposals += part.proposals()
    return proposals
