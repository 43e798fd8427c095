"""Axolotl's YAML."""

from __future__ import annotations

from dataclasses import replace

import yaml
from pydantic import JsonValue

from batchscout.orchestrator.output.exports.counted import max_steps, warmup_steps
from batchscout.orchestrator.output.exports.hf import OPTIMIZERS, has_unsaid_kwargs, schedule_keys, sgd_arguments
from batchscout.orchestrator.output.exports.notes import (
    cannot_be_said,
    checkpointing_note,
    has_float32_weights,
    passes_note,
    shards_note,
    table_note,
    text_of,
    tokens_note,
    without_ramp,
)
from batchscout.orchestrator.output.recommendation import Recommendation
from batchscout.trainers.config import OptimizerConfig


def written(r: Recommendation) -> str:
    """Return keys to put in place of those of your file that have the same names; base_model and datasets stay yours."""
    r, lost = without_ramp(r, "axolotl")
    keys: dict[str, JsonValue] = {
        "micro_batch_size": r.micro_batch_size,
        "gradient_accumulation_steps": r.gradient_accumulation_steps,
        "max_steps": max_steps(r),
        "learning_rate": r.learning_rate,
        "warmup_steps": warmup_steps(r),
        **schedule_keys(r, "lr_scheduler"),
        **_optimizer(r.optimizer),
        "bf16": r.precision == "bfloat16",
        "fp16": r.precision == "float16",
        "tf32": r.allow_tf32 is True,
        "torch_compile": bool(r.compile),
        "gradient_checkpointing": r.activation_checkpointing != "none",
        **({"chunked_cross_entropy": True} if r.cross_entropy == "chunked" else {}),
        **_adapters(r),
        **_shards(r),
        "seed": r.seed,
    }
    text = yaml.safe_dump(keys, sort_keys=False).rstrip("\n")
    in_code = tuple(name for name in r.memory_knobs or () if name != "chunked_cross_entropy")  # which is a key
    return text_of(replace(r, memory_knobs=in_code, cross_entropy=None), [*lost, *_notes(r)], [text])


def _optimizer(optimizer: OptimizerConfig) -> dict[str, JsonValue]:
    shared: dict[str, JsonValue] = {
        "weight_decay": optimizer.weight_decay,
        "max_grad_norm": optimizer.max_gradient_norm or 0.0,  # the word of transformers, which axolotl calls, for never
    }
    if optimizer.type == "sgd":
        return {"optimizer": "sgd", "optim_args": sgd_arguments(optimizer), **shared}
    if optimizer.type not in OPTIMIZERS:
        return shared
    beta1, beta2 = optimizer.betas
    named: dict[str, JsonValue] = {"adam_beta1": beta1, "adam_beta2": beta2, "adam_epsilon": optimizer.eps}
    return {"optimizer": OPTIMIZERS[optimizer.type], **named, **shared}


_ADAPTERS = {
    "r": "lora_r", "lora_alpha": "lora_alpha", "lora_dropout": "lora_dropout", "target_modules": "lora_target_modules",
    "modules_to_save": "lora_modules_to_save", "use_dora": "peft_use_dora", "use_rslora": "peft_use_rslora",
}  # fmt: skip
"""axolotl's words for arguments of peft.LoraConfig."""
_LORA_DEFAULTS: dict[str, JsonValue] = {"r": 8, "lora_alpha": 8, "lora_dropout": 0.0}
"""peft's, which axolotl does not leave to it."""


def _adapters(r: Recommendation) -> dict[str, JsonValue]:
    if r.peft is None:
        return {}
    arguments: dict[str, JsonValue] = {**_LORA_DEFAULTS, **r.peft}
    linear = arguments.get("target_modules") == "all-linear"
    said = {_ADAPTERS[name]: value for name, value in arguments.items() if name in _ADAPTERS}
    if linear:
        del said["lora_target_modules"]
    return {"adapter": "lora", **said, **({"lora_target_linear": True} if linear else {})}


def _shards(r: Recommendation) -> dict[str, JsonValue]:
    if r.parallel != "fsdp":
        return {}
    return {
        "fsdp_version": 2,
        "fsdp_config": {"auto_wrap_policy": "TRANSFORMER_BASED_WRAP", "reshard_after_forward": True},
    }


def _notes(r: Recommendation) -> list[str]:
    notes = [
        f"start it with: axolotl train FILE --launcher torchrun -- --nproc_per_node={r.world_size}",
        "sample_packing and sequence_len change what a sample is: leave them as the study's data had them",
        *passes_note(r, "axolotl"),
        *table_note(r, "axolotl"),
        *tokens_note(
            r,
            "axolotl has no budget of tokens; group_by_length: true keeps their number and changes the order of the samples",
        ),
        *checkpointing_note(r, "axolotl", "gradient_checkpointing: true is full: slower, and less memory"),
        *shards_note(r, "name your blocks' class in fsdp_config.transformer_layer_cls_to_wrap"),
    ]
    if r.optimizer.type not in (*OPTIMIZERS, "sgd") or has_unsaid_kwargs(r.optimizer):
        notes.append(
            f"{cannot_be_said(r.optimizer, 'axolotl')} with the study's arguments: set optimizer and optim_args by hand"
        )
    if r.peft is not None and "target_modules" not in r.peft:
        notes.append(
            "axolotl takes no layers by itself: name in lora_target_modules those that peft took for your model's family in the study "
            "(peft.utils.TRANSFORMERS_MODELS_TO_LORA_TARGET_MODULES_MAPPING has them by model_type)"
        )
    unsaid = [name for name in r.peft or () if name not in _ADAPTERS]
    if unsaid:
        notes.append(f"{', '.join(unsaid)} of peft.LoraConfig cannot be expressed in axolotl")
    if r.precision != "float32" and has_float32_weights(r):
        notes.append("axolotl may load the weights in half precision: the study kept float32 weights under autocast")
    return notes
