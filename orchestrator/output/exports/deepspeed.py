"""DeepSpeed's configuration."""

from __future__ import annotations

import json

from pydantic import JsonValue

from batchscout.orchestrator.output.exports.counted import batches_of, decay_steps, max_steps, steps_of, warmup_steps
from batchscout.orchestrator.output.exports.notes import (
    cannot_be_said,
    decay_note,
    has_float32_weights,
    header_of,
    table_note,
    tokens_note,
)
from batchscout.orchestrator.output.recommendation import Recommendation


def written(r: Recommendation) -> str:
    """Return valid JSON. It has no comments: they stand under `_batchscout`, a key that DeepSpeed ignores."""
    config: dict[str, JsonValue] = {
        "_batchscout": [*header_of(r), *_deepspeed_notes(r)],
        "train_batch_size": r.effective_batch_size,
        "train_micro_batch_size_per_gpu": r.micro_batch_size,
        "gradient_accumulation_steps": r.gradient_accumulation_steps,
        "gradient_clipping": r.optimizer.max_gradient_norm or 0.0,
        "bf16": {"enabled": r.precision == "bfloat16"},
        "fp16": {"enabled": r.precision == "float16"},
        "optimizer": _deepspeed_optimizer(r),
        "scheduler": _deepspeed_schedule(r),
        **({"zero_optimization": {"stage": 3}} if r.parallel == "fsdp" else {}),
        **({} if r.activation_checkpointing == "none" else {"activation_checkpointing": _DEEPSPEED_CHECKPOINTING}),
    }
    return json.dumps(config, indent=2) + "\n"


_DEEPSPEED_CHECKPOINTING: dict[str, JsonValue] = {
    "partition_activations": False,
    "cpu_checkpointing": False,
    "contiguous_memory_optimization": False,
}


def _deepspeed_optimizer(r: Recommendation) -> dict[str, JsonValue]:
    optimizer = r.optimizer
    params: dict[str, JsonValue] = {"lr": r.learning_rate, "weight_decay": optimizer.weight_decay}
    if optimizer.type == "sgd":  # torch's own, with whatever that takes
        return {"type": "SGD", "params": params | {"momentum": optimizer.betas[0], **optimizer.kwargs}}
    # Of another one this is only the nearest: the notes say so.
    return {"type": "AdamW", "params": params | {"betas": list(optimizer.betas), "eps": optimizer.eps}}


def _deepspeed_schedule(r: Recommendation) -> dict[str, JsonValue]:
    warmup = {"warmup_num_steps": max(1, warmup_steps(r)), "warmup_type": "linear"}
    if r.schedule.type == "cosine":
        params = {"total_num_steps": max_steps(r), "warmup_min_ratio": 0.0, "cos_min_ratio": 0.0}
        return {"type": "WarmupCosineLR", "params": params | warmup}
    rates = {"warmup_min_lr": 0.0, "warmup_max_lr": r.learning_rate}
    return {"type": "WarmupLR", "params": rates | warmup}


def _deepspeed_notes(r: Recommendation) -> list[str]:
    notes = [
        f"DeepSpeed takes no number of steps: end your loop after {max_steps(r)} optimizer steps",
        *decay_note(r, "DeepSpeed decays every parameter, unless you pass it two groups"),
        "DeepSpeed averages over micro-batches: right only where each holds equally many targets",
        f"the seed ({r.seed}) is set in your script",
        *(
            f"the batch grows: after optimizer step {steps_of(samples, r)} call engine.set_train_batch_size({batch}), and from "
            f"there on set the learning rate to {phase.learning_rate / r.learning_rate:.6g} x what the schedule says"
            for phase, (samples, batch) in zip(r.ramp or (), batches_of(r)[1:], strict=True)
        ),
        *tokens_note(
            r,
            "data_efficiency.data_sampling.dynamic_batching (max_tokens) is the nearest; it lets the effective batch change from step to step",
        ),
    ]
    if r.optimizer.type != "sgd" and (r.optimizer.type != "adamw" or r.optimizer.kwargs):
        notes.append(
            f"{cannot_be_said(r.optimizer, 'DeepSpeed')}: AdamW stands in its place; build yours, remove the key optimizer, and hand "
            "it to deepspeed.initialize(optimizer=...)"
        )
    notes += table_note(r, "DeepSpeed")
    if steps := decay_steps(r):
        notes.append(
            f"schedule warmup_stable_decay cannot be expressed in DeepSpeed: the last {steps} steps were annealed "
            "linearly to zero, do so in your script"
        )
    if r.precision != "float32" and has_float32_weights(r):
        notes.append("the study kept float32 weights under autocast; bf16 and fp16 here keep half-precision ones")
    if r.compile:
        notes.append(
            "compile cannot be expressed in DeepSpeed's JSON: call engine.compile() after deepspeed.initialize"
        )
    if r.activation_checkpointing != "none":
        notes.append(
            f"activation_checkpointing ({r.activation_checkpointing}) works only in a model that calls "
            "deepspeed.checkpointing.checkpoint on its blocks, which recomputes them fully"
        )
    return notes
