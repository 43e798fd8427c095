"""Steps an optimizer for one parameter at a time, with the state and the groups that it has."""

from __future__ import annotations

from torch import nn
from torch.optim import Optimizer


class OneByOne:
    """For optimizers that treat every parameter by itself: of all steps together comes what one of the whole would do."""

    def __init__(self, optimizer: Optimizer) -> None:
        self._optimizer = optimizer
        groups = enumerate(optimizer.param_groups)
        self._group_of = {id(p): number for number, group in groups for p in group["params"]}

    def step(self, parameter: nn.Parameter) -> None:
        """Step this parameter alone."""
        optimizer, groups = self._optimizer, self._optimizer.param_groups
        optimizer.param_groups = [{**groups[self._group_of[id(parameter)]], "params": [parameter]}]
        try:
            optimizer.step()
        finally:
            optimizer.param_groups = groups
