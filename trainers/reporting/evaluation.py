"""The loss in eager mode and without dropout: over the same validation samples for every configuration, and over training
samples."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from batchscout.trainers.config import TrialConfig
from batchscout.trainers.data.feed import feeding
from batchscout.trainers.data.order import longest, of_every_part
from batchscout.trainers.data.samples import SampleSet, first_of
from batchscout.trainers.data.targets import counted_in
from batchscout.trainers.model.parallel import reshard
from batchscout.trainers.run import Run
from batchscout.trainers.step.accumulation import over_all_ranks
from batchscout.trainers.step.optimizers import evaluating


def evaluate(run: Run) -> dict[str, float]:
    """Return {val_loss, perplexity} over `evaluation_samples` of the validation samples; no perplexity where these are no text."""
    config = run.config
    val_set = first_of(run.val_set, config.evaluation_samples)
    num_samples = min(config.evaluation_samples, len(val_set))
    indices = longest(val_set, num_samples) if config.longest_samples else of_every_part(len(val_set), num_samples)
    loss_sum, num_targets = _loss_and_targets(run, val_set, indices)
    if not num_targets:
        raise ValueError(
            f"none of the {num_samples} validation samples has a target: every label is masked; leave such samples out, or "
            "raise evaluation_samples"
        )
    val_loss = loss_sum / num_targets
    if counted_in(val_set, num_targets / num_samples) != "tokens":
        return {"val_loss": val_loss}
    return {"val_loss": val_loss, "perplexity": math.exp(val_loss) if val_loss < 700 else math.inf}


def generalisation(run: Run, val_loss: float) -> dict[str, float]:
    """Return {train_loss, generalisation_gap}: the loss over as many samples that the run has trained on as evaluations
    use, measured as val_loss is (the same weights, no dropout), and val_loss less that. Neither where none has a target.

    The samples are the first of the run's order. So runs that differ in their batch alone are measured on the same ones, and
    what is hard about these is no difference between their gaps; the gap itself holds how much harder the validation
    samples are. A run that takes every sample once has met them longest ago, so its gap is at its narrowest.
    """
    num_samples = min(run.config.evaluation_samples, run.samples_seen, len(run.first_samples))
    loss_sum, num_targets = _loss_and_targets(run, run.first_samples, run.order.indices(range(num_samples)))
    if not num_targets:
        return {}
    train_loss = loss_sum / num_targets
    return {"train_loss": train_loss, "generalisation_gap": val_loss - train_loss}


@torch.no_grad()
def _loss_and_targets(run: Run, samples: SampleSet, indices: Sequence[int]) -> tuple[float, float]:
    """Return the loss summed over these samples, which are split over the ranks, and how many targets they have.

    Eager: the last micro-batch may be smaller, and a graph for every such shape would cost more than it saves.
    """
    config, size = run.config, _micro_batch_size(run.config)
    mine, most = list(indices)[run.rank :: config.world_size], math.ceil(len(indices) / config.world_size)
    groups = [mine[start : start + size] for start in range(0, most, size)]
    loss_sum = torch.zeros((), device=run.device)
    num_targets = torch.zeros((), device=run.device)
    run.module.eval()
    averaged = run.average.in_place() if run.average else evaluating(run.optimizer)
    with averaged, torch.compiler.set_stance("force_eager"):
        # Shards meet in every forward: a rank that has no sample left takes one that does not count.
        with feeding(samples, [group or [0] for group in groups], run.feed.workers, run.device) as batches:
            for group, batch in zip(groups, batches, strict=True):
                loss, targets = run.loss_function(run.module, batch)
                if group:
                    loss_sum, num_targets = loss_sum + loss, num_targets + targets
        reshard(run.module)  # before the averaged weights leave
    run.module.train()
    loss_sum, num_targets = over_all_ranks(loss_sum, num_targets)
    return loss_sum.item(), num_targets.item()


def _micro_batch_size(config: TrialConfig) -> int:
    """Return how many samples are evaluated at once. Where the trial does not say: what is trained as one graph holds no logits of its own
    size, and eager code does, so fewer of them keep the peak near that of training."""
    if config.evaluated_together is not None:
        return config.evaluated_together
    return math.ceil(config.micro_batch_size / 4) if config.compile == "whole" else config.micro_batch_size
