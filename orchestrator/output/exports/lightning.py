"""Lightning's Trainer, and the `configure_optimizers` of its module."""

from __future__ import annotations

import itertools

from orchestrator.output.exports.counted import batches_of, decay_steps, max_steps, steps_of, warmup_steps
from orchestrator.output.exports.notes import comments, header_of, text_of, without_ramp
from orchestrator.output.exports.optimizer_lines import configure_lines
from orchestrator.output.recommendation import Recommendation


def written(recommendation: Recommendation) -> str:
    r, lost = (
        (recommendation, []) if _can_grow_in_lightning(recommendation) else without_ramp(recommendation, "Lightning")
    )
    precision = {"bfloat16": "bf16-mixed", "float16": "16-mixed", "float32": "32-true"}[r.precision]
    return text_of(
        [
            *comments([*header_of(r), *lost, *_lightning_notes(r)]),
            "import math",
            "",
            "import lightning as L",
            "import torch",
            "",
            *_growing_callback(r),
            f"L.seed_everything({r.seed})",
            "trainer = L.Trainer(",
            *(["    callbacks=[GrowingBatch()],"] if r.ramp else []),
            f"    devices={r.world_size},",
            f"    accumulate_grad_batches={r.gradient_accumulation_steps},",
            f"    max_steps={max_steps(r)},",
            f"    precision={precision!r},",
            f"    gradient_clip_val={r.optimizer.max_gradient_norm},",
            ")",
            f"micro_batch_size = {r.micro_batch_size}  # DataLoader(..., batch_size=micro_batch_size)",
            "",
            "",
            "def learning_rate_factor(step):",
            *_factor_lines(r),
            "",
            "",
            "def configure_optimizers(self):  # a method of your LightningModule",
            *configure_lines(r),
        ]
    )


def _can_grow_in_lightning(recommendation: Recommendation) -> bool:
    """True if each phase begins where a step of the one before ends, and at a multiple of its own batch: Lightning steps
    after every so many batches since the epoch's first."""
    phases = itertools.pairwise(batches_of(recommendation))
    meet = [(end - begin) % batch == 0 and end % grown == 0 for (begin, batch), (end, grown) in phases]
    return all(meet) and recommendation.schedule.type == "warmup_stable_decay"


def _growing_callback(recommendation: Recommendation) -> list[str]:
    """Return the phases and a callback that changes the accumulation with them; nothing where the batch stays."""
    r = recommendation
    if not r.ramp:
        return []
    first = f"(0, 0, {r.gradient_accumulation_steps}, 1.0)"
    phases = [
        f"({steps_of(p.from_samples, r)}, {p.from_samples}, {p.gradient_accumulation_steps}, "
        f"{p.learning_rate / r.learning_rate!r})"
        for p in r.ramp
    ]
    return [
        "# (first optimizer step, first sample, accumulate_grad_batches, learning rate over the first phase's)",
        f"PHASES = [{', '.join((first, *phases))}]",
        "",
        "",
        "def phase_of(step):",
        "    return max(phase for phase in PHASES if phase[0] <= step)",
        "",
        "",
        "class GrowingBatch(L.Callback):",
        "    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):",
        "        trainer.accumulate_grad_batches = phase_of(trainer.global_step)[2]",
        "",
        "",
    ]


def _lightning_notes(recommendation: Recommendation) -> list[str]:
    notes = ["Lightning averages over micro-batches: right only where each holds equally many targets"]
    if recommendation.ramp:
        largest = batches_of(recommendation)[-1][1]
        notes.append(
            f"the batch grows: let every epoch have a multiple of {largest} samples, or steps at its end are smaller"
        )
    if recommendation.activation_checkpointing != "none":
        notes.append(
            f"Trainer has no key for activation_checkpointing ({recommendation.activation_checkpointing}): "
            "wrap the blocks of your model in torch.utils.checkpoint"
        )
    if recommendation.compile:
        notes.append("Trainer has no key for compile: call model.compile() before trainer.fit(model)")
    return notes


def _factor_lines(recommendation: Recommendation) -> list[str]:
    """Return the body of a function that is the study's schedule; its `step` counts the steps that have ended."""
    if recommendation.ramp:
        return _growing_factor_lines(recommendation)
    total, warmup, decay = max_steps(recommendation), warmup_steps(recommendation), decay_steps(recommendation)
    lines = [f"    warmup = min(1.0, (step + 1) / {max(1, warmup)})"]
    if recommendation.schedule.type == "cosine":
        progress = f"min(1.0, max(0.0, (step + 1 - {warmup}) / {total + 1 - warmup}))"
        return [*lines, f"    return min(warmup, 0.5 * (1 + math.cos(math.pi * {progress})))"]
    if decay:
        return [*lines, f"    return min(warmup, max(0.0, ({total} - step) / {decay + 1}))"]
    return [*lines, "    return warmup"]


def _growing_factor_lines(recommendation: Recommendation) -> list[str]:
    """Return the body where the batch grows: warm-up and anneal are counted in samples."""
    r = recommendation
    last, anneal = batches_of(r)[-1][1], r.schedule.decay * r.sample_budget
    return [
        "    first_step, first_sample, accumulation, ratio = phase_of(step)",
        f"    samples = first_sample + (step + 1 - first_step) * accumulation * {r.micro_batch_size * r.world_size}",
        f"    warmup = min(1.0, samples / {max(1, r.warmup_samples)})",
        f"    return ratio * min(warmup, max(0.0, ({r.sample_budget + last} - samples) / {anneal + last!r}))"
        if anneal
        else "    return ratio * warmup",
    ]
