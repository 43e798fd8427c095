"""Validation loss, over the same samples for every configuration, in eager mode."""

from __future__ import annotations

import contextlib
import math

import torch

from trainers.accumulation import over_all_ranks
from trainers.data.batches import fetch, move
from trainers.data.order import longest
from trainers.parallel import reshard
from trainers.run import Run


@torch.no_grad()
def evaluate(run: Run) -> dict[str, float]:
    """Return {val_loss, perplexity} over the first `evaluation_samples` validation samples, split over the ranks.

    Eager: the last micro-batch may be smaller, and a graph for every such shape would cost more than it saves.
    """
    config = run.config
    num_samples = min(config.evaluation_samples, len(run.val_set))
    indices = longest(run.val_set, num_samples) if config.longest_samples else range(num_samples)
    mine = list(indices)[run.rank :: config.world_size]
    loss_sum = torch.zeros((), device=run.device)
    num_targets = torch.zeros((), device=run.device)
    run.module.eval()
    averaged = run.average.in_place() if run.average else contextlib.nullcontext()
    with averaged, torch.compiler.set_stance("force_eager"):
        for start in range(0, math.ceil(num_samples / config.world_size), config.micro_batch_size):
            numbers = mine[start : start + config.micro_batch_size]
            # Shards meet in every forward: a rank that has no sample left takes one that does not count.
            batch = move(fetch(run.val_set, numbers or [0]), run.device)
            loss, targets = run.loss_function(run.module, batch)
            if numbers:
                loss_sum, num_targets = loss_sum + loss, num_targets + targets
        reshard(run.module)  # before the averaged weights leave
    run.module.train()
    loss_sum, num_targets = over_all_ranks(loss_sum, num_targets)
    if num_targets == 0:
        raise ValueError(
            f"none of the {num_samples} validation samples has a target: every label is masked; leave such samples out, or "
            "raise evaluation_samples"
        )
    val_loss = (loss_sum / num_targets).item()
    return {"val_loss": val_loss, "perplexity": math.exp(val_loss) if val_loss < 700 else math.inf}
