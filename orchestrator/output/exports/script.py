"""The script that was studied: its own command with other numbers, and what it has no flag for."""

from __future__ import annotations

import shlex
from collections.abc import Iterator

from batchscout.orchestrator.output.exports.counted import max_steps, warmup_steps
from batchscout.orchestrator.output.exports.notes import comments, header_of, text_of, without_ramp
from batchscout.orchestrator.output.recommendation import Recommendation, Script
from batchscout.trainers.sources.watch.flags import with_values


def written(recommendation: Recommendation) -> str:
    """Raises ValueError where it was no script that was studied."""
    if recommendation.script is None:
        raise ValueError(
            "the study was not of a script, so there is no command to write; choose another trainer: --to torch, hf, lightning, ..."
        )
    r, lost = without_ramp(recommendation, "a command")
    script = recommendation.script
    numbers = {
        "learning_rate": f"{r.learning_rate:.4g}",
        "micro_batch_size": str(r.micro_batch_size),
        "gradient_accumulation_steps": str(r.gradient_accumulation_steps),
        "steps": str(max_steps(r)),
    }
    values = {script.flags[key]: value for key, value in numbers.items() if key in script.flags}
    command = [*_python(script), *with_values(script.args, values)]
    return text_of([*comments([*header_of(r), *lost, *_by_hand(r, script)]), shlex.join(command)])


def _python(script: Script) -> list[str]:
    return ["python", script.script] if script.script.endswith(".py") else ["python", "-m", script.script]


def _by_hand(r: Recommendation, script: Script) -> Iterator[str]:
    """Yield what is to be changed in the script itself."""
    name = script.script
    if "learning_rate" not in script.flags:
        yield f"{name} has no flag for its learning rate: set it to {r.learning_rate:.4g}"
    if "micro_batch_size" not in script.flags:
        yield f"{name} has no flag for its batch: give its DataLoader batch_size={r.micro_batch_size}"
    if r.gradient_accumulation_steps > 1 and "gradient_accumulation_steps" not in script.flags:
        yield (
            f"{name} has no flag for accumulation: step the optimizer after every {r.gradient_accumulation_steps} micro-batches, with each "
            f"loss divided by {r.gradient_accumulation_steps}"
        )
    if r.warmup_samples:
        yield f"the study warmed up over {warmup_steps(r)} steps"
    if r.activation_checkpointing != "none":
        yield f"activation checkpointing ({r.activation_checkpointing}): wrap the blocks of the model in torch.utils.checkpoint"
    if r.compile:
        yield "compile: call model.compile() before training"
