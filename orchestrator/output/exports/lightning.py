"""Lightning's Trainer, and the `configure_optimizers` of its module."""

from __future__ import annotations

import itertools

from batchscout.orchestrator.output.exports.counted import batches_of, max_steps
from batchscout.orchestrator.output.exports.notes import (
    comments,
    header_of,
    shards_note,
    text_of,
    tokens_note,
    without_ramp,
)
from batchscout.orchestrator.output.exports.optimizer_lines import optimizer_lines
from batchscout.orchestrator.output.exports.schedule_lines import factor_lines, phase_lines
from batchscout.orchestrator.output.recommendation import Recommendation


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
            *factor_lines(r),
            "",
            "",
            "def configure_optimizers(self):  # a method of your LightningModule",
            *optimizer_lines(r, parameters_of="self", model="self.model"),
            "    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, learning_rate_factor)",
            "    return {'optimizer': optimizer, 'lr_scheduler': {'scheduler': schedule, 'interval': 'step'}}",
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
    if not recommendation.ramp:
        return []
    return [
        *phase_lines(recommendation),
        "class GrowingBatch(L.Callback):",
        "    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):",
        "        trainer.accumulate_grad_batches = phase_of(trainer.global_step)[2]",
        "",
        "",
    ]


def _lightning_notes(recommendation: Recommendation) -> list[str]:
    notes = ["Lightning averages over micro-batches: right only where each holds equally many targets"]
    notes += tokens_note(
        recommendation,
        "accumulate_grad_batches is a fixed number, so a batch_sampler that cuts by tokens would change the effective batch from step to step",
    )
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
    notes += shards_note(
        recommendation,
        "give the Trainer strategy=ModelParallelStrategy(), and call fully_shard on the blocks in configure_model()",
    )
    return notes
