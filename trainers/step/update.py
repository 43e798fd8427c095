"""How a step's gradient becomes an update."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from batchscout.trainers.step.accumulation import normalise_and_clip


def update(
    parameters: Sequence[nn.Parameter],
    optimizer: Optimizer,
    scaler: torch.amp.GradScaler,
    factor: Tensor,
    max_norm: float | None,
) -> Tensor:
    """Multiply the summed gradient by the factor, clip it, step, and return its norm before clipping."""
    scaler.unscale_(optimizer)
    norm = normalise_and_clip([*parameters], factor, max_norm)
    scaler.step(optimizer)
    scaler.update()
    return norm
