"""The configuration file of nanoGPT."""

from __future__ import annotations

from pydantic import JsonValue

from batchscout.orchestrator.output.exports.counted import max_steps, warmup_steps
from batchscout.orchestrator.output.exports.notes import (
    cannot_be_said,
    shards_note,
    table_note,
    text_of,
    tokens_note,
    without_ramp,
)
from batchscout.orchestrator.output.recommendation import Recommendation


def written(r: Recommendation) -> str:
    r, lost = without_ramp(r, "nanoGPT")
    beta1, beta2 = r.optimizer.betas
    keys: dict[str, JsonValue] = {
        "batch_size": r.micro_batch_size,
        "gradient_accumulation_steps": r.gradient_accumulation_steps * r.world_size,
        "max_iters": max_steps(r),
        "learning_rate": r.learning_rate,
        "decay_lr": r.schedule.type not in ("constant", "table"),
        "warmup_iters": warmup_steps(r),
        "lr_decay_iters": max_steps(r),
        "min_lr": 0.0,
        "weight_decay": r.optimizer.weight_decay,
        "beta1": beta1,
        "beta2": beta2,
        "grad_clip": r.optimizer.max_gradient_norm or 0.0,  # nanoGPT's word for never
        "dtype": r.precision,
        "compile": bool(r.compile),
    }
    return text_of(r, [*lost, *_nanogpt_notes(r)], [f"{key} = {value!r}" for key, value in keys.items()])


def _nanogpt_notes(r: Recommendation) -> list[str]:
    notes = ["gradient_accumulation_steps counts all ranks here: train.py divides it by the world size"]
    notes += tokens_note(r, "nanoGPT knows only samples of one length, block_size")
    if r.activation_checkpointing != "none":
        notes.append(
            f"nanoGPT has no activation_checkpointing ({r.activation_checkpointing}): "
            "without it this micro-batch may not fit into memory"
        )
    notes += table_note(r, "nanoGPT")
    if r.schedule.type == "warmup_stable_decay":
        notes.append("schedule warmup_stable_decay cannot be expressed in nanoGPT: it decays by a cosine after warm-up")
    if r.schedule.type in ("constant", "table") and r.warmup_samples:
        notes.append("nanoGPT warms up only where it decays: with decay_lr = False warmup_iters has no effect")
    if r.optimizer.type != "adamw" or r.optimizer.kwargs:
        notes.append(f"{cannot_be_said(r.optimizer, 'nanoGPT')}: it always uses AdamW")
    elif r.optimizer.eps != 1e-8:
        notes.append(f"eps {r.optimizer.eps} cannot be expressed in nanoGPT: it uses 1e-8")
    notes += shards_note(r, "nanoGPT cannot, and without it this micro-batch may not fit into memory")
    return [*notes, f"nanoGPT always seeds with 1337; the study's seed was {r.seed}"]
