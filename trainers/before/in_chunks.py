"""Whether a model's loss in chunks is its loss: what it adds to the cross-entropy of its logits, as a router's balance or a z-loss, is
left out where these never exist."""

from __future__ import annotations

import copy
import math
from typing import Any

import torch
from torch import nn

from batchscout.trainers.config import TrialConfig
from batchscout.trainers.device.tensor_float import tensor_float_32
from batchscout.trainers.errors import raised_text
from batchscout.trainers.knobs import chunked_cross_entropy as chunked
from batchscout.trainers.model.adding_up import RANDOM_ABOVE, buffers_kept, eager, norm_of_gradient, seeded
from batchscout.trainers.model.contract import check_loss
from batchscout.trainers.model.linear_head import head_in, with_chunks
from batchscout.trainers.model.losses import LossFunction, loss_function

# What the order of sums in float32 changes, with room to spare.
LOSS_WITHIN, GRADIENT_WITHIN = 1e-5, 1e-3
# The same of a model that keeps weights in less.
LOW_PRECISION_WITHIN = 0.03


def another_in_chunks(module: nn.Module, config: TrialConfig, batch: Any) -> str | None:
    """Return, in words, how the loss of a batch or its gradient is another in chunks; "" where they are the same. None where that
    cannot be told, and where the model does not go with chunks. From then on the module may compute in chunks.

    It is compared in float32, whatever the trial's precision: there a small weight of what is added shows beside what is rounded.
    """
    if chunked.KNOB.incompatible_with(config) or config.model.target == "gpt":  # which is written to take chunks
        return None
    whole = loss_function(config.loss)
    with tensor_float_32(False):
        module.zero_grad()
        try:
            with seeded(module, 0), buffers_kept(module), torch.no_grad():
                head = head_in(module, config, batch)
            with torch.no_grad():
                other = _taken(module, whole, batch)[0]
            loss, num_targets = _taken(module, whole, batch)
            norm = norm_of_gradient(module)
        except Exception:  # of a layer that there is not, or of an operation that float32 has not
            return None
        if not num_targets or not math.isclose(loss, other, rel_tol=RANDOM_ABOVE):
            return None
        try:
            in_chunks, _ = _taken(module, with_chunks(module, config, head, whole), batch, sign=-1)
        except Exception as error:
            return f"in chunks its forward raises {raised_text(error)}"
        apart = norm_of_gradient(module)
    is_low = any(p.is_floating_point() and p.dtype != torch.float32 for p in module.parameters())
    if not math.isclose(in_chunks, loss, rel_tol=LOW_PRECISION_WITHIN if is_low else LOSS_WITHIN):
        return f"the loss of its first samples is {in_chunks / num_targets:.6g} in chunks, and {loss / num_targets:.6g} as it computes it"
    if apart > (LOW_PRECISION_WITHIN if is_low else GRADIENT_WITHIN) * norm:
        return f"the gradient of its first samples is {apart / norm:.2%} of its length away from what it is in chunks"
    return ""


def _taken(module: nn.Module, loss: LossFunction, batch: Any, sign: int = 1) -> tuple[float, float]:
    """Return (loss_sum, num_targets) in training mode, and add the gradient, times `sign`, to what is there."""
    with seeded(module, 0), buffers_kept(module), eager():
        loss_sum, num_targets = check_loss(loss(module, copy.deepcopy(batch)))  # which it may change
        if loss_sum.requires_grad:
            (sign * loss_sum).backward()
    return loss_sum.item(), num_targets.item()
