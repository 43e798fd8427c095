"""A training loop of torch alone."""

from __future__ import annotations

from batchscout.orchestrator.output.exports.counted import max_steps
from batchscout.orchestrator.output.exports.notes import (
    checkpointing_note,
    shards_note,
    text_of,
    tokens_note,
    without_ramp,
)
from batchscout.orchestrator.output.exports.optimizer_lines import NOMINAL, recipe_lines
from batchscout.orchestrator.output.recommendation import Recommendation


def written(r: Recommendation) -> str:
    """Return a loop of each rank; its gradient is the study's, whatever samples hold."""
    r, lost = without_ramp(r, "this loop")
    return text_of(
        r,
        [*lost, *_notes(r)],
        [
            "import itertools",
            "import math",
            "",
            "import torch",
            "",
            f"micro_batch_size = {r.micro_batch_size}  # DataLoader(..., batch_size=micro_batch_size, shuffle=True, drop_last=True)",
            f"accumulation = {r.gradient_accumulation_steps}  # micro-batches in an optimizer step",
            f"max_steps = {max_steps(r)}",
            f"torch.manual_seed({r.seed})",
            "",
            "",
            *recipe_lines(r),
            *(_MEAN_OVER_RANKS if r.world_size > 1 else []),
            *_loop(r),
        ],
    )


_MEAN_OVER_RANKS = [
    "def mean_over_ranks(number, device):",
    "    # DDP and FSDP take the mean of the ranks' gradients: what these are divided by is a mean, too",
    "    total = torch.as_tensor(number, dtype=torch.float32, device=device).clone()",
    "    torch.distributed.all_reduce(total)",
    "    return total / torch.distributed.get_world_size()",
    "",
    "",
]


def _loop(r: Recommendation) -> list[str]:
    clip = r.optimizer.max_gradient_norm
    scaled, several = r.precision == "float16", r.world_size > 1
    cast = "" if r.precision == "float32" else f"torch.autocast(device.type, torch.{r.precision})"
    first = "mean_over_ranks(targets, device)" if several else "targets"
    loss = ["            loss, targets = loss_sum(model, batch)"]
    if cast:
        loss = [f"            with {cast}:", "                loss, targets = loss_sum(model, batch)"]
    return [
        "def train(model, loader, loss_sum):",
        "    # loss_sum(model, batch) returns the summed loss of a micro-batch, and the number of targets in that sum",
        "    optimizer = build_optimizer(model)",
        "    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, learning_rate_factor)",
        *(["    device = next(model.parameters()).device"] if cast or several else []),
        *(["    scaler = torch.amp.GradScaler(device.type)"] if scaled else []),
        *([f"    nominal = 0.0  # {NOMINAL}"] if scaled else []),
        *(["    model.compile()"] if r.compile else []),
        "    batches = itertools.chain.from_iterable(itertools.repeat(loader))",
        "    for step in range(max_steps):",
        "        num_targets = 0",
        "        for batch in itertools.islice(batches, accumulation):",
        *loss,
        "            num_targets += targets",
        *([f"            nominal = nominal or max(1.0, float({first}))"] if scaled else []),
        f"            {'scaler.scale(loss / nominal)' if scaled else 'loss'}.backward()",
        *(["        num_targets = mean_over_ranks(num_targets, device)"] if several else []),
        *(["        scaler.unscale_(optimizer)"] if scaled else []),
        "        for p in model.parameters():",
        "            if p.grad is not None:",
        f"                p.grad.{'mul_(nominal / num_targets)' if scaled else 'div_(num_targets)'}",
        *([] if clip is None else [f"        torch.nn.utils.clip_grad_norm_(model.parameters(), {clip})"]),
        *(["        scaler.step(optimizer)", "        scaler.update()"] if scaled else ["        optimizer.step()"]),
        "        schedule.step()",
        "        optimizer.zero_grad()",
    ]


def _notes(r: Recommendation) -> list[str]:
    several = (
        f"start it with: torchrun --nproc_per_node={r.world_size} train.py, which calls torch.distributed.init_process_group(), hands "
        f"{'a sharded model' if r.parallel == 'fsdp' else 'DistributedDataParallel(model)'} to train, and has a loader of its own samples in each rank"
    )
    return [
        *([several] if r.world_size > 1 else []),
        *tokens_note(r, "the loop below takes as many micro-batches in each step"),
        *checkpointing_note(r, "this loop", "wrap the blocks of your model in torch.utils.checkpoint"),
        *shards_note(r, "call fully_shard on the blocks of your model"),
    ]
