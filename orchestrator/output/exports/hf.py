"""The TrainingArguments of transformers."""

from __future__ import annotations

from pydantic import JsonValue

from batchscout.orchestrator.output.exports.counted import decay_steps, max_steps, warmup_steps
from batchscout.orchestrator.output.exports.notes import (
    arguments_text,
    cannot_be_said,
    checkpointing_note,
    comments,
    header_of,
    table_note,
    text_of,
    tokens_note,
    without_ramp,
)
from batchscout.orchestrator.output.recommendation import Recommendation
from batchscout.trainers.config import OptimizerConfig


def written(recommendation: Recommendation) -> str:
    r, lost = without_ramp(recommendation, "TrainingArguments")
    keys = arguments_of(r)
    if r.activation_checkpointing == "none":
        del keys["gradient_checkpointing"]
    notes = [*header_of(r), *lost, *launch_notes(r), *arguments_notes(r, "TrainingArguments")]
    return text_of(
        [
            *comments(notes),
            "from transformers import TrainingArguments",
            "",
            "args = TrainingArguments(",
            *argument_lines(keys),
            ")",
            *adapter_lines(r, "model = get_peft_model(model, ", ")", "LoraConfig, get_peft_model"),
        ]
    )


def adapter_lines(r: Recommendation, before: str, after: str, names: str) -> list[str]:
    """Return the lines that give the model the study's adapters, between `before` and `after`; none where it had none."""
    if r.peft is None:
        return []
    return ["", f"from peft import {names}", "", f"{before}LoraConfig({arguments_text(r.peft)}){after}"]


def arguments_of(r: Recommendation) -> dict[str, JsonValue]:
    """Return the keyword arguments of TrainingArguments that are the recommendation's run, whose batch stays."""
    return {
        "output_dir": "output",
        "per_device_train_batch_size": r.micro_batch_size,
        "gradient_accumulation_steps": r.gradient_accumulation_steps,
        "max_steps": max_steps(r),
        "learning_rate": r.learning_rate,
        "warmup_steps": warmup_steps(r),
        **_schedule(r),
        **_optimizer(r.optimizer),
        **({"bf16": True} if r.precision == "bfloat16" else {}),
        **({"fp16": True} if r.precision == "float16" else {}),
        **({"torch_compile": True} if r.compile else {}),
        **_memory(r),
        "average_tokens_across_devices": True,
        "seed": r.seed,
    }


def argument_lines(keys: dict[str, JsonValue]) -> list[str]:
    return [f"    {key}={value!r}," for key, value in keys.items()]


def launch_notes(r: Recommendation) -> list[str]:
    return [f"start it with: torchrun --nproc_per_node={r.world_size} train.py"]


def arguments_notes(recommendation: Recommendation, target: str) -> list[str]:
    """Return what these arguments cannot say. target: what they are called."""
    notes = checkpointing_note(recommendation, target, "gradient_checkpointing=True is full: slower, and less memory")
    notes += table_note(recommendation, target)
    if recommendation.optimizer.type in ("muon", "adafactor", "own") or recommendation.optimizer.kwargs:
        notes.append(
            f"{cannot_be_said(recommendation.optimizer, target)}: build it yourself, and hand it to the Trainer, "
            "optimizers=(optimizer, schedule)"
        )
    notes += tokens_note(
        recommendation,
        f"{target} has no budget of tokens; train_sampling_strategy='batch_rebalance' is the nearest, it evens out the padding "
        "of a step's micro-batches and keeps their number (older transformers: group_by_length=True, which also changes the order)",
    )
    if recommendation.activation_checkpointing != "none":
        notes.append(
            "gradient_checkpointing is called activation_checkpointing, too, from transformers 5.23 on, and alone from 6 on"
        )
    return notes


def _memory(r: Recommendation) -> dict[str, JsonValue]:
    """Return who recomputes activations: with shards FSDP does, or blocks would be gathered once more than they need."""
    recomputes = r.activation_checkpointing != "none"
    if r.parallel == "fsdp":
        return {
            "fsdp": True,
            "fsdp_config": {"version": 2, "activation_checkpointing": recomputes},
            "gradient_checkpointing": False,
        }
    return {"gradient_checkpointing": recomputes}


def _schedule(recommendation: Recommendation) -> dict[str, JsonValue]:
    if recommendation.schedule.type == "cosine":
        return {"lr_scheduler_type": "cosine"}
    if steps := decay_steps(recommendation):
        kwargs = {"num_decay_steps": steps, "decay_type": "linear"}
        return {"lr_scheduler_type": "warmup_stable_decay", "lr_scheduler_kwargs": kwargs}
    return {"lr_scheduler_type": "constant_with_warmup"}


def _optimizer(optimizer: OptimizerConfig) -> dict[str, JsonValue]:
    beta1, beta2 = optimizer.betas
    shared: dict[str, JsonValue] = {
        "weight_decay": optimizer.weight_decay,
        "max_grad_norm": optimizer.max_gradient_norm or 0.0,  # transformers' word for never
    }
    if optimizer.type == "sgd":
        # transformers takes the SGD's own keys from optim_args alone.
        return {"optim": "sgd", "optim_args": f"momentum={beta1},weight_decay={optimizer.weight_decay}", **shared}
    names = {"adamw": "adamw_torch_fused", "adamw_8bit": "adamw_torch_8bit", "adamw_4bit": "adamw_torch_4bit"}
    if optimizer.type not in names:
        return shared
    return {
        "optim": names[optimizer.type],
        "adam_beta1": beta1,
        "adam_beta2": beta2,
        "adam_epsilon": optimizer.eps,
        **shared,
    }
