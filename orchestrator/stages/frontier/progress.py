"""What the journal knows of a frontier stage, in its parts."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from batchscout.orchestrator.config.stages import Frontier
from batchscout.orchestrator.stages.context import StageContext
from batchscout.orchestrator.stages.frontier.finalists import Finalists
from batchscout.orchestrator.stages.frontier.knobs import KnobSearch
from batchscout.orchestrator.stages.frontier.probes import Probes
from batchscout.orchestrator.stages.frontier.trials import FrontierTrials
from batchscout.orchestrator.stages.frontier.verification import Verification


@dataclass(frozen=True)
class FrontierProgress:
    """The frontier stage as far as the journal knows it when this is made; made anew for every question. Each part knows those
    before it."""

    context: StageContext[Frontier]

    @cached_property
    def trials(self) -> FrontierTrials:
        return FrontierTrials(self.context)

    @cached_property
    def probes(self) -> Probes:
        return Probes(self.trials)

    @cached_property
    def knobs(self) -> KnobSearch:
        return KnobSearch(self.trials, self.probes)

    @cached_property
    def finalists(self) -> Finalists:
        return Finalists(self.trials, self.probes, self.knobs)

    @cached_property
    def verification(self) -> Verification:
        return Verification(self.trials, self.finalists)
