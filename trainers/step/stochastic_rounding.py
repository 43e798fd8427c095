"""AdamW for weights in bfloat16, whose updates are rounded up or down at random.

bfloat16 has 8 bits of precision, so an update of less than 1/512 of a weight would be rounded away in every step. Rounded up with the
probability that says how far the value lies towards the upper neighbour, it is right on average (Zamirai et al. 2020, arXiv 2010.06192).
Moments are kept in float32: the second moment's own steps are smaller still.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from batchscout.trainers.step.closures import Closure, loss_of

_DROPPED_BITS = 16
"""What float32 has in its mantissa, and bfloat16 has not."""


def rounded_stochastically(values: Tensor) -> Tensor:
    """Return float32 values in bfloat16, each one of its two neighbours, so that the mean is the value itself."""
    noise = torch.randint(0, 1 << _DROPPED_BITS, values.shape, dtype=torch.int32, device=values.device)
    # Of a float, sign and magnitude are apart: to add to the bits is to go away from zero, on either side of it.
    return (
        noise.add_(values.contiguous().view(torch.int32))
        .bitwise_and_(-1 << _DROPPED_BITS)
        .view(torch.float32)
        .bfloat16()
    )


class StochasticAdamW(Optimizer):
    """torch's AdamW, computed in float32 whatever the weights are in; those in bfloat16 are rounded stochastically."""

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.01,
    ) -> None:
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: Closure = None) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]  (torch's overloads)
        loss = loss_of(closure)
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._step(parameter, group)
        return loss

    def _step(self, parameter: Tensor, group: dict[str, Any]) -> None:
        state, (beta1, beta2) = self._state_of(parameter), group["betas"]
        gradient = parameter.grad
        assert gradient is not None
        gradient = gradient.float()
        state["step"] += 1
        state["exp_avg"].lerp_(gradient, 1 - beta1)
        state["exp_avg_sq"].mul_(beta2).addcmul_(gradient, gradient, value=1 - beta2)
        # The step is a scalar of the host's, which a device is handed without being waited for.
        of_mean, of_square = (1 - beta ** state["step"] for beta in group["betas"])
        denominator = (state["exp_avg_sq"] / of_square).sqrt_().add_(group["eps"])
        direction = torch.div(state["exp_avg"], denominator, out=denominator).div_(of_mean)
        weight = parameter.float() * (1 - group["lr"] * group["weight_decay"])
        weight.sub_(direction, alpha=group["lr"])
        parameter.copy_(rounded_stochastically(weight) if parameter.dtype == torch.bfloat16 else weight)

    def _state_of(self, parameter: Tensor) -> dict[str, Any]:
        state = self.state[parameter]
        if not state:
            moment = torch.zeros_like(parameter, dtype=torch.float32)
            state.update(step=torch.zeros(()), exp_avg=moment, exp_avg_sq=moment.clone())
        return state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load what `state_dict` has returned; torch would round the moments to the weights' precision."""
        super().load_state_dict(state_dict)
        saved = state_dict["state"]
        for number, parameter in enumerate(p for group in self.param_groups for p in group["params"]):
            for name in ("exp_avg", "exp_avg_sq"):
                if number in saved:
                    self.state[parameter][name] = saved[number][name].to(parameter.device, torch.float32, copy=True)
