"""Many runs of one tiny model at once: every weight has a leading dimension of members, each of which is a run of its own.

Members differ in initial weights, learning rate, weight decay and samples, and share the batch size and the schedule. All
weights of a member are one row of one matrix, so that a step of the optimizer is a few operations over that matrix,
however many members and tensors there are. No operation mixes rows: a member that has diverged disturbs no other.

Shapes: M members, P weights of a member, B batch.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

Shapes = Mapping[str, tuple[int, ...]]
"""The shape of each weight of one member"""
Loss = Callable[[Mapping[str, Tensor], Tensor, Tensor], tuple[Tensor, Tensor]]
"""(weights, inputs, targets), each (M, ...), to (sums of the losses, numbers of valid targets), each (M)"""


@dataclass(frozen=True)
class AdamW:
    """AdamW, and how each member's weights of two or more dimensions decay."""

    betas: tuple[float, float] = (0.9, 0.95)
    eps: float = 1e-8


ADAMW = AdamW()


@dataclass(frozen=True)
class Sgd:
    """SGD with momentum; its decay is a part of the gradient, as in torch."""

    momentum: float = 0.9


@dataclass(frozen=True)
class Muon:
    """Muon for some of the matrices and AdamW for all else, at one learning rate (Liu et al. 2025, arXiv 2502.16982)."""

    matrices: frozenset[str]
    """The names of Muon's."""
    others: AdamW = ADAMW
    momentum: float = 0.95


@dataclass(frozen=True)
class Ensemble:
    """The state of all members. `step` moves it in place."""

    shapes: Shapes
    loss: Loss
    optimizer: AdamW | Sgd | Muon
    rates: Tensor
    """(M, 1): each member's learning rate after warm-up"""
    decays: Tensor
    """(M, 1): each member's weight decay, on tensors of two or more dimensions"""
    weights: Tensor
    """(M, P)"""
    first: Tensor
    """(M, P): the moving average of the gradients, or the momentum"""
    second: Tensor
    """(M, P): the moving average of the squared gradients"""
    max_gradient_norm: float = 1.0
    num_steps: int = 0

    def copy(self) -> Ensemble:
        """Return the same members at the same point, to go on from there on another path."""
        return replace(self, weights=self.weights.clone(), first=self.first.clone(), second=self.second.clone())

    def step(self, inputs: Tensor, targets: Tensor, schedule: float) -> Ensemble:
        """Return the ensemble after one optimizer step; `schedule` is the share of the learning rate at this step."""
        gradients = _clipped(self._gradients(inputs, targets), self.max_gradient_norm)
        after = replace(self, num_steps=self.num_steps + 1)
        match self.optimizer:
            case AdamW():
                _adamw(after, self.optimizer, gradients, schedule * self.rates)
            case Sgd():
                _sgd(after, self.optimizer, gradients, schedule * self.rates)
            case Muon():
                _muon(after, self.optimizer, gradients, schedule * self.rates)
        return after

    @torch.no_grad()
    def losses(self, inputs: Tensor, targets: Tensor, chunk: int = 64) -> Tensor:
        """Return (M): each member's mean loss over all valid targets of the same samples (B, ...)."""
        parts = zip(inputs.split(chunk), targets.split(chunk), strict=True)
        weights, members = unstacked(self.weights, self.shapes), len(self.weights)
        found = [self.loss(weights, x.expand(members, *x.shape), y.expand(members, *y.shape)) for x, y in parts]
        sums, numbers = (torch.stack(each).sum(0) for each in zip(*found, strict=True))
        return sums / numbers

    def _gradients(self, inputs: Tensor, targets: Tensor) -> Tensor:
        """Return (M, P). Each row depends on its own member alone, so the sum over members has all rows as gradient."""
        leaf = self.weights.detach().requires_grad_()
        sums, numbers = self.loss(unstacked(leaf, self.shapes), inputs, targets)
        return torch.autograd.grad((sums / numbers).sum(), leaf)[0]

    @property
    def decayed(self) -> Tensor:
        """(1, P): 1 where a weight belongs to a tensor of two or more dimensions."""
        return torch.cat([torch.full((math.prod(shape),), float(len(shape) >= 2)) for shape in self.shapes.values()])


def ensemble(
    shapes: Shapes, loss: Loss, optimizer: AdamW | Sgd | Muon, weights: Tensor, rates: Tensor, decays: Tensor
) -> Ensemble:
    """Return members that have not taken a step yet; `weights` is (M, P), `rates` and `decays` are (M)."""
    zeros = torch.zeros_like(weights)
    return Ensemble(
        shapes, loss, optimizer, rates[:, None], decays[:, None], weights.clone(), zeros, torch.zeros_like(weights)
    )


def unstacked(weights: Tensor, shapes: Shapes) -> dict[str, Tensor]:
    """Return each tensor by its name, (M, *shape), as views of the rows (M, P)."""
    columns = weights.split([math.prod(shape) for shape in shapes.values()], dim=1)
    return {name: part.unflatten(1, shape) for (name, shape), part in zip(shapes.items(), columns, strict=True)}


def _clipped(gradients: Tensor, max_norm: float) -> Tensor:
    """Scale each member's gradient as torch.nn.utils.clip_grad_norm_ does."""
    norms = torch.linalg.vector_norm(gradients, dim=1, keepdim=True)
    return gradients.mul_((max_norm / (norms + 1e-6)).clamp(max=1.0))


def _adamw(state: Ensemble, settings: AdamW, gradients: Tensor, rates: Tensor) -> None:
    """Decoupled weight decay (arXiv:1711.05101), in the order of torch.optim.AdamW."""
    (beta1, beta2), t = settings.betas, state.num_steps
    state.weights.mul_(1 - rates * state.decays * state.decayed)
    state.first.lerp_(gradients, 1 - beta1)
    state.second.mul_(beta2).addcmul_(gradients, gradients, value=1 - beta2)
    scale = (state.second.sqrt() / math.sqrt(1 - beta2**t)).add_(settings.eps)
    state.weights.sub_(state.first.div(scale).mul_(rates / (1 - beta1**t)))


def _sgd(state: Ensemble, settings: Sgd, gradients: Tensor, rates: Tensor) -> None:
    gradients.add_(state.weights * (state.decays * state.decayed))
    state.first.mul_(settings.momentum).add_(gradients)
    state.weights.sub_(state.first * rates)


def _muon(state: Ensemble, settings: Muon, gradients: Tensor, rates: Tensor) -> None:
    """A step of torch.optim.Muon, with its updates as large as AdamW's, and of AdamW.

    AdamW's step takes all columns, and Muon's overwrites those of its matrices: so one layout of the state serves both.
    """
    columns = _columns(state.shapes)
    held = {
        name: (state.weights[:, columns[name]].clone(), state.first[:, columns[name]].clone())
        for name in settings.matrices
    }
    _adamw(state, settings.others, gradients, rates)
    for name, (weights, momentum) in held.items():
        momentum.lerp_(gradients[:, columns[name]], 1 - settings.momentum)
        update = gradients[:, columns[name]].lerp(momentum, settings.momentum)  # Nesterov's
        rows, width = state.shapes[name]
        update = _orthogonal(update.unflatten(1, (rows, width))).flatten(1)
        weights.mul_(1 - rates * state.decays).sub_(update * (0.2 * math.sqrt(max(rows, width)) * rates))
        state.weights[:, columns[name]], state.first[:, columns[name]] = weights, momentum


def _columns(shapes: Shapes) -> dict[str, slice]:
    """Return where each tensor lies in a row of all weights."""
    ends = list(itertools.accumulate(math.prod(shape) for shape in shapes.values()))
    return {name: slice(end - math.prod(shapes[name]), end) for name, end in zip(shapes, ends, strict=True)}


def _orthogonal(matrices: Tensor) -> Tensor:
    """Bring the singular values of each of (M, rows, columns) near 1 by torch.optim.Muon's five steps of Newton and Schulz,
    in bfloat16 as there."""
    x = matrices.bfloat16() if matrices.shape[1] <= matrices.shape[2] else matrices.bfloat16().mT
    x = x / torch.linalg.vector_norm(x, dim=(1, 2), keepdim=True).clamp(min=1e-7)
    for _ in range(5):
        gram = x @ x.mT
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=-4.7750, alpha=2.0315), x, beta=3.4445)
    return (x if matrices.shape[1] <= matrices.shape[2] else x.mT).to(matrices.dtype)
