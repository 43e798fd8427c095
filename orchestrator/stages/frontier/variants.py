"""What the frontier tries at its fastest point alone: to probe it in every mode would double the search."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from batchscout.orchestrator.config.mode import Mode
from batchscout.orchestrator.config.stages import Frontier
from batchscout.orchestrator.stages.context import StageContext
from batchscout.orchestrator.stages.frontier.findings import OperatingPoint
from batchscout.trainers.knobs import chunked_cross_entropy, fsdp


@dataclass(frozen=True)
class Variant:
    """A field of a mode with another value. Where it pays at the fastest point it is taken for all sizes."""

    name: str
    field: Literal["cross_entropy", "compile"]
    value: Literal["chunked", "whole"]

    def of_mode(self, mode: Mode) -> Mode:
        if self.value == "whole" and fsdp.NAME in mode.memory_knobs:
            return mode  # which gathers its weights block by block
        return replace(mode, **{self.field: self.value})

    def of(self, point: OperatingPoint) -> OperatingPoint:
        return replace(point, mode=self.of_mode(point.mode))


CHUNKS = Variant("cross-entropy in chunks", "cross_entropy", "chunked")
ONE_GRAPH = Variant("the model as one graph", "compile", "whole")


def variants(context: StageContext[Frontier]) -> list[Variant]:
    """Return those that the stage tries: where the study file does not say how the field is to be, and the model has it.

    A model without blocks is one graph anyway, and FSDP gathers its weights block by block.
    """
    stage, facts = context.stage, context.study.facts
    tried = []
    if not stage.compile and facts.num_blocks and context.config.parallel == "ddp":
        tried.append(ONE_GRAPH)
    asked = chunked_cross_entropy.NAME in (*(stage.memory_knobs or ()), *context.config.memory_knobs)
    if not stage.cross_entropy and facts.chunked_cross_entropy and not asked:
        tried.append(CHUNKS)
    return tried
