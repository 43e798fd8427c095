"""Cross-entropy summed over targets: from logits that are held whole, or a chunk of them at a time.

Shapes: B micro-batch, T sequence, N = B x T targets, D hidden, V vocabulary.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from batchscout.trainers.criteria import IGNORED_TARGET
from batchscout.trainers.model.chunked_loss import loss_in_chunks


def summed_cross_entropy(logits: Tensor, targets: Tensor, label_smoothing: float = 0.0) -> tuple[Tensor, Tensor]:
    """Return the cross-entropy summed over the targets that count, and how many they are; logits (B, T, V), targets
    (B, T)."""
    loss_sum = F.cross_entropy(
        logits.flatten(0, 1).float(),
        targets.flatten(),
        ignore_index=IGNORED_TARGET,
        reduction="sum",
        label_smoothing=label_smoothing,
    )
    return loss_sum, (targets != IGNORED_TARGET).sum()


def chunked_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    label_smoothing: float = 0.0,
    *,
    bias: Tensor | None = None,
    ignore_index: int = IGNORED_TARGET,
) -> tuple[Tensor, Tensor]:
    """Return the same from hidden (..., D) and the head's weight (V, D) and bias (V), in autocast's precision where that is on.
    The logits of all targets never exist at once: the gradient of a chunk is taken in the forward pass, and its logits are let
    go."""
    rows, wanted = hidden.reshape(-1, hidden.shape[-1]), targets.flatten()
    if ignore_index != IGNORED_TARGET:
        wanted = wanted.masked_fill(wanted == ignore_index, IGNORED_TARGET)
    if torch.compiler.is_compiling():
        # It imports the compiler, which is loaded here.
        from batchscout.trainers.model.uncompiled_loss import loss_outside_graphs

        loss_sum = loss_outside_graphs(rows, weight, wanted, label_smoothing, bias)  # pyright: ignore[reportCallIssue]  (torch's)
    else:
        loss_sum = loss_in_chunks(rows, weight, wanted, label_smoothing, bias)
    return loss_sum, (wanted != IGNORED_TARGET).sum()
