"""What the optimizer made of a gradient: its moments, Adam's signal to noise, and how far the weights moved.

Read once per interval from the state that the step left behind: nothing is copied before a step, and no buffer is
larger than the largest parameter.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from batchscout.trainers.model.parallel import local


def read_step(optimizer: torch.optim.Optimizer) -> dict[str, float]:
    """Measure the step just taken, while its gradients are still in place. Where the model is sharded, all ranks call
    this.

    gradient_mean, gradient_variance: over all entries, after clipping. update_norm: |w - w_before|, weight decay
    included; update_ratio: that over |w|. adam_snr: sum m^2 / sum v, both bias-corrected: 1 for a gradient that is
    the same in every step, near (1 - beta1) / (1 + beta1) for one that is noise. The last three need an optimizer whose step is
    known here (`is_followed`).
    """
    moved = parameters_moved(optimizer)
    if not moved:
        return {}
    sums = sums_of_step(optimizer, moved)
    if isinstance(moved[0][1], DTensor):
        dist.all_reduce(sums)
    gradient, gradient_square, momentum, variance, update, weight = sums.tolist()
    if not math.isfinite(gradient_square):  # float16 that overflowed: the step was not taken
        return {}
    count, followed = sum(p.numel() for _, p in moved), is_followed(optimizer)
    found = {
        "gradient_mean": gradient / count,
        "gradient_variance": max(0.0, gradient_square / count - (gradient / count) ** 2),
        "update_norm": update**0.5 if followed else None,
        "update_ratio": (update / weight) ** 0.5 if weight and followed else None,
        "adam_snr": momentum / variance if variance else None,
    }
    return {key: value for key, value in found.items() if value is not None}


def is_followed(optimizer: torch.optim.Optimizer) -> bool:
    """True if this module knows what a step of the optimizer does: torch's AdamW or SGD, in the form that studies have."""
    variants = ("amsgrad", "maximize", "nesterov", "dampening")
    plain = not any(group.get(variant) for group in optimizer.param_groups for variant in variants)
    return type(optimizer) in (torch.optim.AdamW, torch.optim.SGD) and plain


def parameters_moved(optimizer: torch.optim.Optimizer) -> list[tuple[dict[str, Any], Tensor]]:
    """Return (its group, the parameter) for each that the last step has moved and whose gradient is still there."""
    steps = [(group, p) for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
    if not is_followed(optimizer):
        return steps
    return [(group, p) for group, p in steps if optimizer.state.get(p) or not group.get("momentum", 1)]


def sums_of_step(optimizer: torch.optim.Optimizer, moved: list[tuple[dict[str, Any], Tensor]]) -> Tensor:
    """Return the sums that `read_step` needs, over this rank's part, still on the device: those of the update are 0 where the
    optimizer's step is not known."""
    if not is_followed(optimizer):
        return torch.cat([sum_and_square([p for _, p in moved]), local(moved[0][1]).new_zeros(4, dtype=torch.float64)])
    return torch.stack([_sums(group, p, optimizer.state[p]) for group, p in moved]).sum(dim=0)


def _sums(group: dict[str, Any], parameter: Tensor, state: dict[str, Tensor]) -> Tensor:
    """Return [sum g, sum g^2, sum m^2, sum v, |update|^2, |w|^2] over this rank's part, in float64."""
    assert parameter.grad is not None
    weight, gradient = local(parameter.detach()), local(parameter.grad)
    direction, decay, signal, variance = _direction(group, gradient, state)
    # w = (1 - lr decay) w_before - lr direction, solved for w_before - w
    update = _square(direction.add_(weight, alpha=decay)) * (group["lr"] / (1 - group["lr"] * decay)) ** 2
    return torch.stack([_sum(gradient), _square(gradient), signal, variance, update, _square(weight)])


def sum_and_square(parameters: Sequence[Tensor]) -> Tensor:
    """Return [sum g, sum g^2] over this rank's part of the gradients in place, in float64."""
    gradients = [local(p.grad) for p in parameters if p.grad is not None]
    return torch.stack([torch.stack([_sum(gradient), _square(gradient)]) for gradient in gradients]).sum(dim=0)


def next_update(optimizer: torch.optim.Optimizer, factor: Tensor) -> Tensor:
    """Return [|update|^2, |w|^2] over this rank's part, of the step that the optimizer would take now if the gradients in
    place, times factor, were its own; zeros where its step is not known. Nothing moves."""
    moved = parameters_moved(optimizer) if is_followed(optimizer) else []
    sums = [_next_update(group, p, optimizer.state.get(p, {}), factor) for group, p in moved]
    return torch.stack(sums or [torch.zeros(2, dtype=torch.float64, device=factor.device)]).sum(dim=0)


def _next_update(group: dict[str, Any], parameter: Tensor, state: dict[str, Tensor], factor: Tensor) -> Tensor:
    assert parameter.grad is not None
    weight, gradient = local(parameter.detach()), local(parameter.grad) * factor
    direction, decay, _, _ = _direction(group, gradient, _after(group, weight, gradient, state))
    return torch.stack([_square(direction.add_(weight, alpha=decay)) * group["lr"] ** 2, _square(weight)])


def _after(group: dict[str, Any], weight: Tensor, gradient: Tensor, state: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return the state that the optimizer would have after one more gradient, in copies."""
    if "exp_avg" in state:
        of_mean, of_square = group["betas"]
        mean = local(state["exp_avg"]).lerp(gradient, 1 - of_mean)
        square = torch.addcmul(local(state["exp_avg_sq"]) * of_square, gradient, gradient, value=1 - of_square)
        return {"exp_avg": mean, "exp_avg_sq": square, "step": state["step"] + 1}
    if "momentum_buffer" in state:
        decayed = gradient.add(weight, alpha=group["weight_decay"])
        return {"momentum_buffer": decayed.add_(local(state["momentum_buffer"]), alpha=group["momentum"])}
    return {}


def adam_snr_of(gradient_snr: float, beta1: float) -> float:
    """Return sum m^2 / sum v of Adam's moments, bias-corrected, after many gradients of this signal to noise at the same
    weights: m averages the noise down to (1 - beta1) / (1 + beta1) of its square, v keeps all of it."""
    return (gradient_snr + (1 - beta1) / (1 + beta1)) / (gradient_snr + 1)


def _direction(
    group: dict[str, Any], gradient: Tensor, state: dict[str, Tensor]
) -> tuple[Tensor, float, Tensor, Tensor]:
    """Return (what the learning rate multiplied, the decay beside it, sum m^2, sum v); the sums are 0 where it is not
    Adam.

    The first is a copy, the only one of the parameter's size: passes over memory are what all of this costs.
    """
    if "exp_avg" in state:
        mean, variance = local(state["exp_avg"]), local(state["exp_avg_sq"])
        of_mean, of_variance = (1 - beta ** state["step"] for beta in group["betas"])  # Adam's bias corrections
        denominator = (variance / of_variance).sqrt_().add_(group["eps"])
        direction = torch.div(mean, denominator, out=denominator).div_(of_mean)
        return direction, group["weight_decay"], _square(mean) / of_mean**2, _sum(variance) / of_variance
    zero = torch.zeros((), dtype=torch.float64, device=gradient.device)
    buffer = state.get("momentum_buffer")
    if buffer is not None:  # SGD adds the decay to the gradient, before the momentum
        return local(buffer).clone(), 0.0, zero, zero
    return gradient.clone(), group["weight_decay"], zero, zero


def _sum(values: Tensor) -> Tensor:
    """Sum each row first, then the rows in float64: on a CPU a float64 sum of all would copy the whole tensor."""
    rows = values.sum(dim=-1) if values.dim() > 1 else values
    return rows.sum(dtype=torch.float64)


def _square(values: Tensor) -> Tensor:
    wide = torch.promote_types(values.dtype, torch.float32)
    return torch.linalg.vector_norm(values, dtype=wide).double() ** 2
