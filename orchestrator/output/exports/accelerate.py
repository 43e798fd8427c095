"""A training loop of Accelerate."""

from __future__ import annotations

from batchscout.orchestrator.output.exports.counted import max_steps
from batchscout.orchestrator.output.exports.notes import (
    checkpointing_note,
    no_key_note,
    shards_note,
    text_of,
    tokens_note,
)
from batchscout.orchestrator.output.exports.optimizer_lines import NOMINAL, recipe_lines
from batchscout.orchestrator.output.exports.schedule_lines import phase_lines
from batchscout.orchestrator.output.recommendation import Recommendation

_PRECISIONS = {"bfloat16": "bf16", "float16": "fp16", "float32": "no"}


def written(r: Recommendation) -> str:
    """Return a loop, since Accelerate has no other place for it: its gradient is the study's, whatever samples hold."""
    return text_of(
        r,
        _notes(r),
        [
            "import itertools",
            "import math",
            "",
            "import torch",
            f"from accelerate import Accelerator{', FullyShardedDataParallelPlugin' if r.parallel == 'fsdp' else ''}",
            "from accelerate.utils import GradientAccumulationPlugin, set_seed",
            "",
            *(phase_lines(r) if r.ramp else []),
            f"micro_batch_size = {r.micro_batch_size}  # DataLoader(..., batch_size=micro_batch_size, shuffle=True, drop_last=True), one for each rank",
            f"max_steps = {max_steps(r)}",
            f"set_seed({r.seed})",
            "# a loader's end does not end a step: its samples and the next pass's make one",
            f"plugin = GradientAccumulationPlugin(num_steps={r.gradient_accumulation_steps}, sync_with_dataloader=False)",
            "accelerator = Accelerator(",
            "    gradient_accumulation_plugin=plugin,",
            f"    mixed_precision={_PRECISIONS[r.precision]!r},",
            *_shards(r),
            ")",
            "",
            "",
            *recipe_lines(r),
            *_loop(r),
        ],
    )


def _loop(r: Recommendation) -> list[str]:
    accumulation = "phase_of(step)[2]" if r.ramp else "accelerator.gradient_accumulation_steps"
    grows = ["        accelerator.gradient_accumulation_steps, accelerator.step = accumulation, 0"] if r.ramp else []
    clip = r.optimizer.max_gradient_norm
    scaled = r.precision == "float16"
    nominal = "nominal" if scaled else "micro_batch_size"
    return [
        "def train(model, loader, loss_sum):",
        "    # loss_sum(model, batch) returns the summed loss of a micro-batch, and the number of targets in that sum",
        "    optimizer = build_optimizer(model)",
        "    # not prepared: Accelerate would step it once for each rank",
        "    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, learning_rate_factor)",
        *(["    model.compile()"] if r.compile else []),
        "    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)",
        "    batches = itertools.chain.from_iterable(itertools.repeat(loader))",
        *([f"    nominal = 0.0  # {NOMINAL}"] if scaled else []),
        "    for step in range(max_steps):",
        f"        accumulation = {accumulation}",
        *grows,
        "        num_targets = torch.zeros((), device=accelerator.device)",
        "        for batch in itertools.islice(batches, accumulation):",
        "            with accelerator.accumulate(model):",
        "                loss, targets = loss_sum(model, batch)",
        "                num_targets += targets",
        *(
            ["                nominal = nominal or max(1.0, accelerator.reduce(num_targets, 'mean').item())"]
            if scaled
            else []
        ),
        f"                accelerator.backward(loss / {nominal})",
        "        # backward divided by the accumulation, and the ranks' mean by their number",
        "        num_targets = accelerator.reduce(num_targets, 'sum')",
        f"        factor = {nominal} * accumulation * accelerator.num_processes / num_targets",
        "        accelerator.unscale_gradients()",
        "        for p in model.parameters():",
        "            if p.grad is not None:",
        "                p.grad.mul_(factor)",
        *([] if clip is None else [f"        torch.nn.utils.clip_grad_norm_(model.parameters(), {clip})"]),
        "        optimizer.step()",
        "        schedule.step()",
        "        optimizer.zero_grad()",
    ]


def _shards(r: Recommendation) -> list[str]:
    if r.parallel != "fsdp":
        return []
    recomputes = r.activation_checkpointing != "none"
    return [
        "    fsdp_plugin=FullyShardedDataParallelPlugin(",
        f"        fsdp_version=2, activation_checkpointing={recomputes}, auto_wrap_policy='transformer_based_wrap',",
        "        transformer_cls_names_to_wrap=['YourBlock'],  # the class of your model's blocks",
        "    ),",
    ]


def _notes(r: Recommendation) -> list[str]:
    return [
        f"start it with: accelerate launch --num_processes {r.world_size} train.py",
        *tokens_note(
            r,
            "the loop below takes as many micro-batches in each step; with a batch_sampler that cuts them by tokens, set accumulation to the "
            "step's own number",
        ),
        *(
            checkpointing_note(r, "Accelerate", "FSDP's own is full: slower, and less memory")
            if r.parallel == "fsdp"
            else no_key_note(r, "Accelerate")
        ),
        *shards_note(r, "name your blocks' class in the plugin's transformer_cls_names_to_wrap, in place of YourBlock"),
    ]
