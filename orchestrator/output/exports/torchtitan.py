"""torchtitan's configuration."""

from __future__ import annotations

import json
import math

from pydantic import JsonValue

from batchscout.orchestrator.output.exports.counted import max_steps, warmup_steps
from batchscout.orchestrator.output.exports.notes import (
    cannot_be_said,
    decay_note,
    table_note,
    text_of,
    tokens_note,
    without_ramp,
)
from batchscout.orchestrator.output.recommendation import Recommendation
from batchscout.trainers.config import ActivationCheckpointing, Schedule


def written(r: Recommendation) -> str:
    """Return the TOML of release 0.2.2: it is the last that counts the batch in samples and reads TOML."""
    r, lost = without_ramp(r, "torchtitan")
    optimizer = r.optimizer
    beta1, beta2 = optimizer.betas
    clip = optimizer.max_gradient_norm
    half = r.precision != "float32"
    copies, shards = (1, r.world_size) if r.parallel == "fsdp" else (r.world_size, 1)
    sections: dict[str, dict[str, JsonValue]] = {
        "training": {
            "local_batch_size": r.micro_batch_size,
            "global_batch_size": r.effective_batch_size,
            "steps": max_steps(r),
            "max_norm": math.inf if clip is None else clip,
            "mixed_precision_param": "bfloat16" if half else "float32",
        },
        "parallelism": {"data_parallel_replicate_degree": copies, "data_parallel_shard_degree": shards},
        "optimizer": {
            "name": "AdamW",
            "lr": r.learning_rate,
            "beta1": beta1,
            "beta2": beta2,
            "eps": optimizer.eps,
            "weight_decay": optimizer.weight_decay,
        },
        "lr_scheduler": {"warmup_steps": warmup_steps(r), **_torchtitan_decay(r.schedule)},
        "activation_checkpoint": _torchtitan_checkpointing(r.activation_checkpointing),
        "compile": {"enable": bool(r.compile)},
        "debug": {"seed": r.seed},
    }
    return text_of(r, [*lost, *_torchtitan_notes(r)], _toml(sections))


def _torchtitan_decay(schedule: Schedule) -> dict[str, JsonValue]:
    if schedule.type == "cosine":
        return {"decay_type": "cosine"}
    return {"decay_ratio": schedule.decay if schedule.type == "warmup_stable_decay" else 0.0}


def _torchtitan_checkpointing(mode: ActivationCheckpointing) -> dict[str, JsonValue]:
    if isinstance(mode, float):
        return {"mode": "memory_budget", "memory_budget": mode}
    return {"mode": mode, **({"selective_ac_option": "op"} if mode == "selective" else {})}


def _torchtitan_notes(r: Recommendation) -> list[str]:
    notes = [
        "torchtitan 0.2.2, --job.config_file; its main branch since configures in Python and counts the batch in tokens",
        "set training.seq_len to the sequence length of the study's data",
        *table_note(r, "torchtitan"),
        *decay_note(r, "torchtitan decays every parameter"),
    ]
    notes += tokens_note(
        r, "torchtitan packs its text into rows of seq_len tokens, and knows no samples of uneven length"
    )
    if r.activation_checkpointing == "selective":
        notes.append("torchtitan recomputes every second matrix product, the study none: expect less memory and speed")
    if r.precision == "float16":
        notes.append("precision float16 cannot be expressed in torchtitan: bfloat16 stands in its place")
    if r.optimizer.type != "adamw" or r.optimizer.kwargs:
        notes.append(f"{cannot_be_said(r.optimizer, 'torchtitan')}: AdamW is another optimizer")
    return notes


def _toml(sections: dict[str, dict[str, JsonValue]]) -> list[str]:
    lines: list[str] = []
    for name, values in sections.items():
        # Numbers, booleans and plain words are the same in JSON and TOML, but for infinity.
        entries = [f"{key} = {'inf' if value == math.inf else json.dumps(value)}" for key, value in values.items()]
        lines += ["", f"[{name}]", *entries]
    return lines
