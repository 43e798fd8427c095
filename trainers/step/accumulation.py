"""Many micro-batches, one gradient: the gradient of the mean loss over all targets of all ranks.

The law: the same samples give the same gradient for every (micro_batch_size, accumulation, world_size). Losses are
sums; DDP and FSDP2 average gradients over ranks, so the factor world_size / num_targets makes d(sum of losses) /
num_targets of it. A mean per micro-batch instead is wrong by tens of percent as soon as the numbers of targets
differ.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from batchscout.trainers.model.contract import check_loss
from batchscout.trainers.model.losses import LossFunction
from batchscout.trainers.model.parallel import gradient_sync, local, loss_of, several_ranks, whole
from batchscout.trainers.noise.gradient_noise import MicroGradientNorms


def accumulate_gradient(
    model: nn.Module,
    loss_function: LossFunction,
    micro_batches: Iterable[Any],
    *,
    num_micro_batches: int,
    scale: Tensor,
    norms: MicroGradientNorms | None,
) -> tuple[Tensor, Tensor]:
    """Sum the gradient of scale x (each micro-batch's loss) into .grad, and return this rank's (loss_sum,
    num_targets)."""
    total_loss: Tensor | float = 0.0
    total_targets: Tensor | int = 0
    for index, batch in enumerate(micro_batches):
        last = index == num_micro_batches - 1
        with gradient_sync(model, last):
            loss_sum, num_targets = check_loss(loss_of(model, loss_function, batch))
            (loss_sum * scale).backward()
        if norms is not None:
            norms.end_of_micro_batch(num_targets, scale, last=last)
        total_loss = total_loss + loss_sum.detach().float()
        total_targets = total_targets + num_targets
    assert isinstance(total_loss, Tensor)
    assert isinstance(total_targets, Tensor)
    return total_loss, total_targets


def over_all_ranks(loss_sum: Tensor, num_targets: Tensor) -> tuple[Tensor, Tensor]:
    """Return both summed over the ranks, in float64 so that counts stay exact."""
    both = torch.stack([loss_sum.double(), num_targets.double()])
    if several_ranks():
        dist.all_reduce(both)
    return both[0], both[1]


def normalise_and_clip(parameters: list[nn.Parameter], factor: Tensor, max_norm: float | None) -> Tensor:
    """Multiply the summed gradient by `factor` (1 / num_targets and what undoes the scales) and clip it, in one pass.

    Returns the norm of the whole step's gradient before clipping.
    """
    gradients = [p.grad for p in parameters if p.grad is not None]
    norm = whole(torch.nn.utils.get_total_norm(gradients)) * factor
    factor = factor * clip_factor(norm, max_norm)
    # In float32, as gradients are: for a factor of another type a GPU would take them one by one.
    own = [local(gradient) for gradient in gradients]
    torch._foreach_mul_(own, factor.float())  # pyright: ignore[reportPrivateImportUsage]  (as torch's own clipping does)
    return norm


def clip_factor(norm: Tensor, max_norm: float | None) -> Tensor:
    """Return what a gradient of this norm is multiplied by so that its norm is at most max_norm; 1 if that is None."""
    return torch.ones_like(norm) if max_norm is None else torch.clamp(max_norm / (norm + 1e-6), max=1.0)
