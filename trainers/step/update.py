"""How a step's gradient becomes an update: all of it at the end, or parameter by parameter inside the backward pass."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from trainers.config import TrialConfig
from trainers.knobs import optimizer_in_backward
from trainers.model.losses import LossFunction
from trainers.step.accumulation import normalise_and_clip
from trainers.step.in_backward import InBackward


class AtTheEnd:
    """An update from the whole gradient, once the last micro-batch has gone backward."""

    def __init__(
        self,
        parameters: Sequence[nn.Parameter],
        optimizer: Optimizer,
        scaler: torch.amp.GradScaler,
        max_norm: float | None,
    ) -> None:
        self._parameters, self._optimizer, self._scaler, self._max_norm = [*parameters], optimizer, scaler, max_norm

    def watched(self, loss_function: LossFunction) -> LossFunction:
        """Return the loss as it is: how many targets it has is needed no sooner than at the end."""
        return loss_function

    def take(self, factor: Tensor) -> Tensor:
        """Multiply the gradient by the factor, clip it, step, and return its norm before clipping."""
        self._scaler.unscale_(self._optimizer)
        norm = normalise_and_clip(self._parameters, factor, self._max_norm)
        self._scaler.step(self._optimizer)
        self._scaler.update()
        return norm


Update = AtTheEnd | InBackward


def update_of(
    config: TrialConfig,
    parameters: Sequence[nn.Parameter],
    optimizer: Optimizer,
    scaler: torch.amp.GradScaler,
    nominal_targets: int,
) -> Update:
    """Return the update that the trial's knobs ask for. nominal_targets: what its losses are divided by."""
    if optimizer_in_backward.NAME in config.memory_knobs:
        return InBackward(parameters, optimizer, nominal_targets)
    return AtTheEnd(parameters, optimizer, scaler, config.optimizer.max_gradient_norm)
