"""What autograd saves for the backward pass waits in the host's memory, and comes back when it is needed."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from batchscout.trainers.model.losses import LossFunction

SMALLEST_BYTES = 1 << 20
"""What is smaller stays: to move it would take longer than the bytes are worth."""


class Moved(NamedTuple):
    host: Tensor
    device: torch.device


class ActivationOffload:
    """Moves what a forward pass saves, but not the weights, which are on the device anyway (torch's own `save_on_cpu` moves these,
    too, once for every use)."""

    def __init__(self, module: nn.Module) -> None:
        self._weights = {p.untyped_storage().data_ptr() for p in module.parameters()}
        self._shapes = {_sides(p) for p in module.parameters() if p.dim() > 1}

    def during(self, loss_function: LossFunction) -> LossFunction:
        """Return the same loss, whose forward pass saves on the host."""

        def offloading(module: nn.Module, batch: Any) -> tuple[Tensor, Tensor]:
            with saved_tensors_hooks(self._pack, self._unpack):
                return loss_function(module, batch)

        return offloading

    def moves(self, tensor: Tensor) -> bool:
        """True if the tensor is worth moving: large, and no weight. Autocast's copy of a weight, which it holds itself until the
        forward pass has ended, is told by its shape."""
        is_weight = tensor.untyped_storage().data_ptr() in self._weights or _sides(tensor) in self._shapes
        return tensor.numel() * tensor.element_size() >= SMALLEST_BYTES and not is_weight

    def _pack(self, tensor: Tensor) -> Tensor | Moved:
        if not self.moves(tensor):
            return tensor
        host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.is_cuda)
        # On the stream that made the tensor: its memory is free for others once the copy is done.
        return Moved(host.copy_(tensor, non_blocking=True), tensor.device)

    def _unpack(self, packed: Tensor | Moved) -> Tensor:
        return packed.host.to(packed.device, non_blocking=True) if isinstance(packed, Moved) else packed


def _sides(tensor: Tensor) -> tuple[int, ...]:
    """Return the sides of a tensor, whichever way it is turned."""
    return tuple(sorted(tensor.shape))
