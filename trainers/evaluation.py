"""Validation loss: the same samples for every configuration, in eager mode."""

from __future__ import annotations

import math

import torch

from trainers.accumulation import over_all_ranks
from trainers.data import fetch, move
from trainers.run import Run


@torch.no_grad()
def evaluate(run: Run) -> dict[str, float]:
    """{val_loss, perplexity} over the first `evaluation_samples` validation samples, split over the ranks.

    Eager: the last micro-batch may be smaller, and a graph for every such shape would cost more than it saves.
    """
    config = run.config
    num_samples = min(config.evaluation_samples, len(run.val_set))
    mine = list(range(run.rank, num_samples, config.world_size))
    loss_sum = torch.zeros((), device=run.device)
    num_targets = torch.zeros((), device=run.device)
    run.module.eval()
    with torch.compiler.set_stance("force_eager"):
        for start in range(0, len(mine), config.micro_batch_size):
            batch = move(fetch(run.val_set, mine[start : start + config.micro_batch_size]), run.device)
            loss, targets = run.loss_function(run.module, batch)
            loss_sum, num_targets = loss_sum + loss, num_targets + targets
    run.module.train()
    loss_sum, num_targets = over_all_ranks(loss_sum, num_targets)
    val_loss = (loss_sum / num_targets).item()
    return {"val_loss": val_loss, "perplexity": math.exp(val_loss) if val_loss < 700 else math.inf}
