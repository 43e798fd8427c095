"""Which kinds of activation checkpointing go with a model: all, or none of them."""

from __future__ import annotations

from dataclasses import dataclass

from batchscout.orchestrator.config.stages import Frontier
from batchscout.orchestrator.stages.context import StageContext
from batchscout.orchestrator.study.facts import Facts
from batchscout.trainers.config import ActivationCheckpointing


@dataclass(frozen=True)
class NoCheckpointing:
    """Both go on in a sentence."""

    reason: str
    remedy: str


def why_not_checkpointed(facts: Facts) -> NoCheckpointing | None:
    """Return why nothing of this model can be recomputed; None where it can, as far as is known."""
    if facts.num_blocks == 0:
        return NoCheckpointing(
            "the model has no ModuleList or Sequential of repeated blocks to checkpoint",
            "put its layers into one and name it as model.blocks",
        )
    if facts.blocks_differ_again is not None:
        return NoCheckpointing(
            f"a block of the model that is run again on the same input gives something else, and so a wrong gradient: {facts.blocks_differ_again}",
            "let its forward change nothing that it reads, and draw by torch's random numbers",
        )
    return None


def not_checkpointed(context: StageContext[Frontier]) -> tuple[ActivationCheckpointing, ...]:
    """Return the kinds that the frontier leaves out."""
    if why_not_checkpointed(context.study.facts) is None:
        return ()
    return tuple(mode for mode in context.stage.activation_checkpointing if mode != "none")


def notes_on_checkpointing(context: StageContext[Frontier]) -> list[str]:
    """Return what is to be said of them."""
    left_out, why = ", ".join(map(str, not_checkpointed(context))), why_not_checkpointed(context.study.facts)
    return [f"left out, as {why.reason}: {left_out} ({why.remedy})"] if left_out and why else []
