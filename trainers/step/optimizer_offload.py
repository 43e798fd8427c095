"""An optimizer whose state stays in the host's memory. It visits the device one parameter at a time, so that no more than one
parameter's moments are ever there."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from batchscout.trainers.step.closures import Closure, loss_of


class OnTheHost(Optimizer):
    """Steps another optimizer. Groups and state are that one's; of the state, all but scalars is on the host between steps."""

    def __init__(self, inner: Optimizer) -> None:
        self._inner = inner
        super().__init__(inner.param_groups, {})
        self._share()

    @torch.no_grad()
    def step(self, closure: Closure = None) -> Any:
        loss = loss_of(closure)
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._step(parameter)
        _wait_for_copies(self.param_groups)
        return loss

    def _step(self, parameter: nn.Parameter) -> None:
        state = self.state[parameter]
        on_host = {name: value for name, value in state.items() if _is_moved(value)}
        # Copies and kernels are on one stream, so each begins when the one before it has ended.
        state.update({name: value.to(parameter.device, non_blocking=True) for name, value in on_host.items()})
        self._step_alone(parameter)
        for name, value in [*state.items()]:
            if _is_moved(value):
                state[name] = _kept(value, on_host.get(name), parameter)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load what `state_dict` returned. What is to be on the host is no matter of torch's, which would put all of it on the device at
        once."""
        moved, others = dict[Any, dict[str, Tensor]](), dict[Any, dict[str, Any]]()
        for number, values in state_dict["state"].items():
            moved[number] = {name: value for name, value in values.items() if _is_moved(value)}
            others[number] = {name: value for name, value in values.items() if name not in moved[number]}
        super().load_state_dict({**state_dict, "state": others})  # which makes groups and state anew
        self._share()
        numbers = [number for group in state_dict["param_groups"] for number in group["params"]]
        parameters = [parameter for group in self.param_groups for parameter in group["params"]]
        for number, parameter in zip(numbers, parameters, strict=True):
            for name, value in moved.get(number, {}).items():
                self.state[parameter][name] = _kept(value.to(parameter.dtype), None, parameter)

    def _share(self) -> None:
        self._inner.state, self._inner.param_groups = self.state, self.param_groups
        self._group_of = {id(p): number for number, group in enumerate(self.param_groups) for p in group["params"]}

    def _step_alone(self, parameter: nn.Parameter) -> None:
        """Step the other optimizer for this parameter only: those that it serves treat each by itself, so of all these steps together
        comes what one of the whole would do."""
        self._inner.param_groups = [{**self.param_groups[self._group_of[id(parameter)]], "params": [parameter]}]
        try:
            self._inner.step()
        finally:
            self._inner.param_groups = self.param_groups


def _is_moved(value: object) -> bool:
    return isinstance(value, Tensor) and value.dim() > 0


def _kept(value: Tensor, before: Tensor | None, parameter: nn.Parameter) -> Tensor:
    """Return a value of the parameter's state on the host, in the memory that it had there before, if it had any."""
    host = before
    if host is None or host.is_cuda or host.shape != value.shape:
        host = torch.empty(value.shape, dtype=value.dtype, pin_memory=parameter.is_cuda)
    return host.copy_(value, non_blocking=True)


def _wait_for_copies(groups: list[dict[str, Any]]) -> None:
    """Let the host read what was copied to it: a checkpoint may come next."""
    if groups[0]["params"][0].is_cuda:
        torch.cuda.current_stream(groups[0]["params"][0].device).synchronize()
