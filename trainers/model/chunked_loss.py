"""Cross-entropy from a head's input, a chunk of logits at a time: those of all targets never exist at once.

Shapes: N targets, D hidden, V vocabulary.
"""

from __future__ import annotations

import itertools
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from batchscout.trainers.criteria import IGNORED_TARGET

NUM_CHUNKS = 16
"""As many whatever the micro-batch, so that memory stays a line in it. With fewer, more logits are held at once; with more,
products are too small for a GPU, and the head's gradient is passed over more often."""


def loss_in_chunks(
    hidden: Tensor, weight: Tensor, targets: Tensor, label_smoothing: float, bias: Tensor | None = None
) -> Tensor:
    device = hidden.device.type
    low = torch.is_autocast_enabled(device)
    dtype = torch.get_autocast_dtype(device) if low else hidden.dtype
    with torch.autocast(device, enabled=False):
        loss_sum = _Chunked.apply(hidden, weight, bias, targets, label_smoothing, dtype)
    assert isinstance(loss_sum, Tensor)
    return loss_sum


class _Chunked(torch.autograd.Function):
    """hidden (N, D), weight (V, D), bias (V) or None, targets (N) -> the sum of the losses. The gradients are made in the
    forward pass, and the backward pass scales them."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        targets: Tensor,
        label_smoothing: float,
        dtype: torch.dtype,
    ) -> Tensor:
        factor, counted = weight.to(dtype), targets != IGNORED_TARGET
        gradients = _Gradients(hidden, weight, bias) if any(ctx.needs_input_grad) else None
        loss_sum = torch.zeros((), dtype=torch.float32, device=hidden.device)
        for rows in _chunks(len(hidden)):
            chunk, counts = hidden[rows].to(dtype), counted[rows].unsqueeze(1)
            logits = F.linear(chunk, factor, None if bias is None else bias.to(dtype))
            log_shares = torch.log_softmax(logits, dim=1, dtype=torch.float32)
            loss_sum += _losses(log_shares, targets[rows], label_smoothing).mul_(counts).sum()
            if gradients is not None:
                of_logits = _gradient(log_shares, targets[rows], label_smoothing).to(dtype)
                # What does not count is left out here, where a row has D entries, and not V.
                gradients.of_hidden[rows] = (of_logits @ factor).mul_(counts)
                gradients.add_to_weight(of_logits, chunk * counts)
                gradients.add_to_bias(of_logits, counts)
        if gradients is not None:
            ctx.save_for_backward(gradients.of_hidden, gradients.of_weight, gradients.of_bias)
        return loss_sum

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *upstream: Tensor) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]  (torch's)
        of_hidden, of_weight, of_bias = ctx.saved_tensors
        scaled_bias = None if of_bias is None else of_bias * upstream[0]
        return of_hidden * upstream[0], of_weight * upstream[0], scaled_bias, None, None, None


class _Gradients:
    def __init__(self, hidden: Tensor, weight: Tensor, bias: Tensor | None) -> None:
        self.of_hidden, self.of_weight = torch.empty_like(hidden), torch.zeros_like(weight)
        self.of_bias = None if bias is None else torch.zeros_like(bias)

    def add_to_weight(self, of_logits: Tensor, chunk: Tensor) -> None:
        if chunk.dtype == self.of_weight.dtype:
            torch.addmm(self.of_weight, of_logits.t(), chunk, out=self.of_weight)
        else:
            self.of_weight += of_logits.t() @ chunk

    def add_to_bias(self, of_logits: Tensor, counts: Tensor) -> None:
        if self.of_bias is not None:
            self.of_bias += (of_logits.t() @ counts.to(of_logits.dtype)).squeeze(1)


def _chunks(num_rows: int) -> list[slice]:
    """Return NUM_CHUNKS parts whose sizes differ by one row at most; fewer where there are fewer rows."""
    bounds = [num_rows * number // NUM_CHUNKS for number in range(NUM_CHUNKS + 1)]
    return [slice(begin, end) for begin, end in itertools.pairwise(bounds) if begin < end]


def _losses(log_shares: Tensor, targets: Tensor, label_smoothing: float) -> Tensor:
    """Return the loss of each row (N, 1)."""
    losses = -log_shares.gather(1, targets.clamp(min=0).unsqueeze(1))
    if label_smoothing:
        losses = (1 - label_smoothing) * losses - label_smoothing * log_shares.mean(dim=1, keepdim=True)
    return losses


def _gradient(log_shares: Tensor, targets: Tensor, label_smoothing: float) -> Tensor:
    """Return the gradient of each row's loss by its logits (N, V), in the memory of log_shares: what the model expects less
    what the target says."""
    shares = log_shares.exp_()
    at = targets.clamp(min=0).unsqueeze(1)
    if label_smoothing:
        shares -= label_smoothing / shares.shape[1]
    return shares.scatter_add_(1, at, torch.full_like(at, label_smoothing - 1, dtype=shares.dtype))
