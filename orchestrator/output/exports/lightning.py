"""Lightning's Trainer, and the `configure_optimizers` of its module; or, where that was studied, what it is to be given."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping

from batchscout.orchestrator.output.exports.counted import batches_of, has_own_length, max_steps
from batchscout.orchestrator.output.exports.notes import (
    no_key_note,
    passes_note,
    shards_note,
    text_of,
    tokens_note,
    without_ramp,
)
from batchscout.orchestrator.output.exports.optimizer_lines import optimizer_lines
from batchscout.orchestrator.output.exports.schedule_lines import factor_lines, phase_lines
from batchscout.orchestrator.output.recommendation import Recommendation
from batchscout.trainers.config import OptimizerConfig
from batchscout.trainers.sources.settings import GROUPS


def written(r: Recommendation) -> str:
    r, lost = (r, []) if _can_grow_in_lightning(r) else without_ramp(r, "Lightning")
    its_own = _trains_its_own_optimizer(r)
    callbacks = [*(["GrowingBatch()"] if r.ramp else []), *(["Recommended()"] if its_own else [])]
    length = _own_length(r) if its_own else {"max_steps": max_steps(r)}
    precision = {"bfloat16": "bf16-mixed", "float16": "16-mixed", "float32": "32-true"}[r.precision]
    return text_of(
        r,
        [*lost, *_lightning_notes(r, length), *(_own_notes(length) if its_own else [])],
        [
            "import math",
            "",
            "import lightning as L",
            *([] if its_own else ["import torch"]),
            "",
            *_growing_callback(r),
            *(_recommended_callback(r, length) if its_own else [f"L.seed_everything({r.seed})"]),
            "trainer = L.Trainer(",
            *([f"    callbacks=[{', '.join(callbacks)}],"] if callbacks else []),
            f"    devices={r.world_size},",
            f"    accumulate_grad_batches={r.gradient_accumulation_steps},",
            *(f"    {name}={value}," for name, value in length.items()),
            f"    precision={precision!r},",
            f"    gradient_clip_val={r.optimizer.max_gradient_norm},",
            ")",
            f"micro_batch_size = {r.micro_batch_size}  # DataLoader(..., batch_size=micro_batch_size)",
            *([] if its_own else _configure_optimizers(r)),
        ],
        has_own_groups=its_own,
    )


def _configure_optimizers(r: Recommendation) -> list[str]:
    return [
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


def _trains_its_own_optimizer(r: Recommendation) -> bool:
    """True of a study of a LightningModule whose recommendation is for the optimizer that this configures itself."""
    is_lightnings = r.own_run is not None and r.own_run.library == "lightning"
    return is_lightnings and r.optimizer.param_groups == GROUPS and r.optimizer.type in _NUMBERS


_NUMBERS: Mapping[str, Callable[[OptimizerConfig], dict[str, object]]] = {
    "adamw": lambda it: {"betas": it.betas, "eps": it.eps, "weight_decay": it.weight_decay},
    "sgd": lambda it: {"momentum": it.betas[0], "weight_decay": it.weight_decay},
    "own": lambda _: {},
}
"""What a recommendation says of an optimizer beside its rate, by its type."""


def _own_length(r: Recommendation) -> dict[str, int]:
    """Return how long the run is: as the user's own Trainer says it where it is as long; nothing where that is not known."""
    own = r.own_run.arguments if r.own_run else {}
    if has_own_length(r) and "max_steps" not in own:
        return own
    # As many epochs as there could be: the Trainer's own might end it before, and what a module computes of -1 might be none.
    return {"max_epochs": max_steps(r), "max_steps": max_steps(r)}


def _own_notes(length: Mapping[str, int]) -> Iterator[str]:
    yield "give these to your Trainer in place of its own, and leave its others and your configure_optimizers as they are"
    if "max_steps" in length:
        yield "max_steps ends the run: max_epochs is there so that yours does not end it before"
    if not length:
        yield (
            "how long it trains is not known, since `from` returned no Trainer: give it your max_epochs, or a max_steps that takes as many "
            "samples as yours"
        )


def _recommended_callback(r: Recommendation, length: Mapping[str, int]) -> list[str]:
    """Return a callback that has the optimizer of `configure_optimizers` train as recommended."""
    total = None if "max_steps" in length or r.ramp else "total"
    numbers = _NUMBERS[r.optimizer.type](r.optimizer)
    return [
        f"def learning_rate_factor(step{', total' if total else ''}):",
        *factor_lines(r, total),
        "",
        "",
        "class Recommended(L.Callback):",
        '    """Trains the optimizer of your configure_optimizers, in its own groups, at the recommended rate, whatever its scheduler sets."""',
        "",
        "    def on_train_start(self, trainer, pl_module):",
        "        (optimizer,) = trainer.optimizers",
        "        rates = [group.get('initial_lr', group['lr']) for group in optimizer.param_groups]",
        f"        self.rates = [{r.learning_rate!r} * rate / rates[0] for rate in rates]",
        *(
            [
                f"        numbers = {numbers}",
                "        own = {**optimizer.defaults, 'weight_decay': max(group['weight_decay'] for group in optimizer.param_groups)}",
                "        for group in optimizer.param_groups:  # what a group has of its own stays",
                "            group.update({name: value for name, value in numbers.items() if group[name] == own[name]})",
            ]
            if numbers
            else []
        ),
        "",
        "    def on_before_optimizer_step(self, trainer, pl_module, optimizer):",
        f"        factor = learning_rate_factor(trainer.global_step{', trainer.estimated_stepping_batches' if total else ''})",
        "        for group, rate in zip(optimizer.param_groups, self.rates):",
        "            group['lr'] = rate * factor",
        "",
        "",
    ]


def _can_grow_in_lightning(r: Recommendation) -> bool:
    """True if each phase begins where a step of the one before ends, and at a multiple of its own batch: Lightning steps
    after every so many batches since the epoch's first."""
    phases = itertools.pairwise(batches_of(r))
    meet = [(end - begin) % batch == 0 and end % grown == 0 for (begin, batch), (end, grown) in phases]
    return all(meet) and r.schedule.type == "warmup_stable_decay"


def _growing_callback(r: Recommendation) -> list[str]:
    """Return the phases and a callback that changes the accumulation with them; nothing where the batch stays."""
    if not r.ramp:
        return []
    return [
        *phase_lines(r),
        "class GrowingBatch(L.Callback):",
        "    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):",
        "        trainer.accumulate_grad_batches = phase_of(trainer.global_step)[2]",
        "",
        "",
    ]


def _lightning_notes(r: Recommendation, length: Mapping[str, int]) -> list[str]:
    notes = ["Lightning averages over micro-batches: right only where each holds equally many targets"]
    notes += tokens_note(
        r,
        "accumulate_grad_batches is a fixed number, so a batch_sampler that cuts by tokens would change the effective batch from step to step",
    )
    if "max_steps" in length:
        notes += passes_note(r, "Lightning")
    notes += no_key_note(r, "Trainer")
    if r.compile:
        notes.append("Trainer has no key for compile: call model.compile() before trainer.fit(model)")
    notes += shards_note(
        r,
        "give the Trainer strategy=ModelParallelStrategy(), and call fully_shard on the blocks in configure_model()",
    )
    return notes
