"""Updates inside the backward pass: each parameter moves as soon as its gradient is there, and no two gradients wait for each other.

A parameter's gradient is whole once autograd has accumulated it, also where several layers share it, and nothing in the same backward
pass reads the parameter after that. So the weights are those of a step at the end, to the bit.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from trainers.model.contract import check_loss
from trainers.model.losses import LossFunction
from trainers.step.one_by_one import OneByOne


class InBackward:
    """An update that is made while the one micro-batch of a step goes backward."""

    def __init__(self, parameters: Sequence[nn.Parameter], optimizer: Optimizer, nominal_targets: int) -> None:
        """nominal_targets: what the loss is divided by before it goes backward."""
        self._one_by_one, self._nominal_targets = OneByOne(optimizer), nominal_targets
        self._factor: Tensor | None = None
        self._norms: list[Tensor] = []
        for parameter in parameters:
            parameter.register_post_accumulate_grad_hook(self._update)

    def watched(self, loss_function: LossFunction) -> LossFunction:
        """Return the same loss. Its number of targets, which the gradient is divided by, is noted before the backward pass."""

        def noting(module: nn.Module, batch: Any) -> tuple[Tensor, Tensor]:
            loss_sum, num_targets = check_loss(loss_function(module, batch))
            self._factor = (self._nominal_targets / num_targets.double()).float()
            return loss_sum, num_targets

        return noting

    def _update(self, parameter: Tensor) -> None:
        assert isinstance(parameter, nn.Parameter)
        assert parameter.grad is not None
        assert self._factor is not None
        parameter.grad.mul_(self._factor)
        self._norms.append(torch.linalg.vector_norm(parameter.grad, dtype=torch.float32))
        self._one_by_one.step(parameter)
        parameter.grad = None

    def take(self, _: Tensor) -> Tensor:
        """Return the norm of the gradient of the step, which the backward pass has taken."""
        norms, self._norms = self._norms, []
        return torch.linalg.vector_norm(torch.stack(norms)).double()
