"""The SFTConfig of TRL, which is TrainingArguments with other defaults."""

from __future__ import annotations

from pydantic import JsonValue

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
    samples = {} if own else _samples(r)
    keys = {"bf16": False} | arguments_of(r, "trl") | samples
    notes = [*lost, *arguments_notes(r, "SFTConfig", "trl"), *(_notes(r) if samples else ())]
    adapters = adapter_lines(r, "peft_config = ", "  # SFTTrainer(peft_config=peft_config)", "LoraConfig")
    return text_of(r, notes, [*call_lines(r, "trl", "SFTConfig", keys), *adapters], has_own_groups=bool(own))


def _samples(r: Recommendation) -> dict[str, JsonValue]:
    """Return what makes the study's samples of the data's; those that it left out TRL could only cut."""
    if r.sample is None or r.sample.kind == "leave_out":
        return {"max_length": None, "packing": False}
    strategy = {"packing_strategy": "wrapped"} if r.sample.kind == "text" else {}
    return {"max_length": r.sample.tokens, "packing": r.sample.kind != "cut", **strategy}


def _notes(r: Recommendation) -> list[str]:
    as_here = "TRL makes the study's samples of your data"
    if r.sample is None:
        as_here = "TRL takes yours as they are, and so did the study"
    elif r.sample.kind == "leave_out":
        as_here = (
            f"TRL takes yours as they are: leave out those of more than {r.sample.tokens} tokens, as the study did"
        )
    return [
        f"max_length and packing change what a sample is: as here, {as_here}",
        "SFTTrainer masks prompts only where it is told (completion_only_loss, assistant_only_loss): count the targets that the study "
        "counted",
    ]
