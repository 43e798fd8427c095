"""The SFTConfig of TRL, which is TrainingArguments with other defaults."""

from __future__ import annotations

from batchscout.orchestrator.output.exports.hf import (
    adapter_lines,
    arguments_notes,
    arguments_of,
    call_lines,
    own_arguments,
)
from batchscout.orchestrator.output.exports.notes import text_of, without_ramp
from batchscout.orchestrator.output.recommendation import Recommendation


def written(r: Recommendation) -> str:
    """Return a call that also says what TRL would otherwise do by itself: bfloat16, checkpointing, cut samples."""
    r, lost = without_ramp(r, "SFTConfig")
    # What a sample is, is the Trainer's own to say where one was studied.
    own = own_arguments(r, "trl")
    samples = {} if own else {"max_length": None, "packing": False}
    keys = {"bf16": False} | arguments_of(r, "trl") | samples
    notes = [*lost, *arguments_notes(r, "SFTConfig", "trl"), *(_NOTES if samples else ())]
    adapters = adapter_lines(r, "peft_config = ", "  # SFTTrainer(peft_config=peft_config)", "LoraConfig")
    return text_of(r, notes, [*call_lines(r, "trl", "SFTConfig", keys), *adapters], has_own_groups=bool(own))


_NOTES = (
    "max_length and packing change what a sample is: as here, TRL takes yours as they are, and so did the study",
    "SFTTrainer masks prompts only where it is told (completion_only_loss, assistant_only_loss): count the targets that the study "
    "counted",
)
