"""One model on several ranks, whole on each (DDP) or in shards (FSDP2): when gradients meet, and whole tensors
again."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.nn.parallel import DistributedDataParallel

from batchscout.trainers.config import Precision, TrialConfig
from batchscout.trainers.model.activation_checkpointing import as_it_was_made
from batchscout.trainers.model.blocks import find_blocks
from batchscout.trainers.model.frozen import frozen_of, is_loadable, others_of
from batchscout.trainers.model.losses import LossFunction
from batchscout.trainers.model.models import num_batch_norms


def distribute(module: nn.Module, config: TrialConfig, device: torch.device) -> nn.Module:
    """Return the model that ranks call. DDP and FSDP2 average gradients."""
    if config.parallel == "fsdp":
        return shard(module, config, init_device_mesh(device.type, (config.world_size,)))
    module.to(device)
    if config.world_size == 1:
        return module
    ids = [device.index] if device.type == "cuda" else None
    return DistributedDataParallel(ModuleAndLoss(module), device_ids=ids, gradient_as_bucket_view=True)


class ModuleAndLoss(nn.Module):
    """What DDP is put around: a loss may call whatever the module has, and DDP gets ready for the exchange in a forward of its own alone.
    Of a module that was called past it no gradients would meet."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, loss_function: LossFunction, batch: Any) -> tuple[Tensor, Tensor]:
        return loss_function(self.module, batch)


def loss_of(model: nn.Module, loss_function: LossFunction, batch: Any) -> tuple[Tensor, Tensor]:
    """Return what the loss returns. model: what `distribute` returned, or the module itself."""
    if isinstance(model, DistributedDataParallel):
        return model(loss_function, batch)
    return loss_function(model, batch)


def shard(module: nn.Module, config: TrialConfig, mesh: DeviceMesh) -> nn.Module:
    """Shard blocks, then the rest, in place (FSDP2), and return the model.

    The rest (embedding, last norm, head) is gathered in float32: what the blocks add to would otherwise begin rounded, which it
    does under no other mode.
    """
    for block in find_blocks(module, config.model.blocks):
        fully_shard(block.module, mesh=mesh, mp_policy=_mixed_precision(block.module, config.precision))
    fully_shard(module, mesh=mesh)
    return module


def _mixed_precision(block: nn.Module, precision: Precision) -> MixedPrecisionPolicy:
    """Return how a block is gathered: in the precision in which autocast computes it, which halves what is sent and held.

    Its inputs are cast to that, too, since not every kernel takes both. Gradients are summed and exchanged in float32, and
    shards stay in it. So does a block with BatchNorm, whose statistics no policy casts.
    """
    if precision == "float32" or num_batch_norms(block):
        return MixedPrecisionPolicy()
    low = getattr(torch, precision)
    return MixedPrecisionPolicy(param_dtype=low, reduce_dtype=torch.float32)


def several_ranks() -> bool:
    """True if this process is one of several that train together; a process group may also be one process."""
    return dist.is_initialized() and dist.get_world_size() > 1


def gradient_sync(model: nn.Module, last: bool) -> contextlib.AbstractContextManager[None]:
    """Return the context for forward *and* backward of one micro-batch: ranks exchange gradients in a step's last one
    only.

    DDP arms its all-reduce in the forward, so no_sync around the backward alone would save nothing.
    """
    if isinstance(model, FSDPModule):
        model.set_requires_gradient_sync(last)
        model.set_is_last_backward(last)
    elif isinstance(model, DistributedDataParallel) and not last:
        return model.no_sync()
    return contextlib.nullcontext()


def leaves_of(model: nn.Module) -> list[nn.Parameter]:
    """Return the parameters whose hooks see each of this rank's micro-gradients whole.

    Under FSDP2 these are what a forward unshards into, the same objects in every step; the shards never see a gradient
    before it is reduced. Group by group: all of them at once are what sharding is there to avoid.
    """
    groups = [module for module in model.modules() if isinstance(module, FSDPModule)]
    if not groups:
        return [parameter for parameter in model.parameters() if parameter.requires_grad]
    leaves: list[nn.Parameter] = []
    for group in groups:
        group.unshard()
        own = [p for p in group.parameters() if not isinstance(p, DTensor)]  # its members' are shards still
        leaves += [parameter for parameter in own if parameter.requires_grad]
        group.reshard()
    return leaves


def reshard(model: nn.Module) -> None:
    """Shard the model again after a forward without a backward, which FSDP2 leaves partly whole."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


def local(tensor: Tensor) -> Tensor:
    """Return this rank's part of a tensor, sharing its memory; of complex numbers both parts."""
    part = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    return torch.view_as_real(part) if part.is_complex() else part


def whole(tensor: Tensor) -> Tensor:
    """Return the whole tensor. Where it is sharded, all ranks call this together."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def like(tensor: Tensor, other: Tensor) -> Tensor:
    """Place and shard a whole tensor as the other one is."""
    if isinstance(other, DTensor):
        return distribute_tensor(tensor.to(other.device), other.device_mesh, other.placements)
    return tensor.to(other.device)


_WHOLE_ON_RANK_0 = StateDictOptions(full_state_dict=True, cpu_offload=True, ignore_frozen_params=True)


def state_of(module: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Return the state of model and optimizer, whole on rank 0, without weights that are not trained. All ranks call this
    together."""
    if isinstance(module, FSDPModule):
        weights = get_model_state_dict(module, options=_WHOLE_ON_RANK_0)
        state = get_optimizer_state_dict(module, optimizer, options=_WHOLE_ON_RANK_0)
    else:
        weights, state = module.state_dict(), optimizer.state_dict()
    frozen = frozen_of(module)  # torch's own option leaves out but one name of a tied weight
    kept = {name: value for name, value in weights.items() if name not in frozen and is_loadable(value)}
    return {"model": kept, "optimizer": state}


def load_state(module: nn.Module, optimizer: torch.optim.Optimizer, state: dict[str, Any]) -> None:
    """Load what `state_of` has returned. Every rank loads all of it."""
    if isinstance(module, FSDPModule):
        options = StateDictOptions(full_state_dict=True, strict=not frozen_of(module))
        set_model_state_dict(module, state["model"], options=options)
        set_optimizer_state_dict(module, optimizer, state["optimizer"], options=options)
    else:
        load_trained(module, state["model"])
        optimizer.load_state_dict(state["optimizer"])


def unsaved_buffers(module: nn.Module) -> dict[str, Tensor]:
    """Return the buffers that the module's own state leaves out (persistent=False), by their names."""
    with as_it_was_made(module):
        saved = module.state_dict().keys()
        return {name: buffer for name, buffer in module.named_buffers() if name not in saved}


def load_buffers(module: nn.Module, buffers: Mapping[str, Tensor]) -> None:
    """Give the module these buffers, by their names, which its own state leaves out."""
    with as_it_was_made(module):
        for name, value in buffers.items():
            place, _, own = name.rpartition(".")
            parent = module.get_submodule(place)
            before = parent.get_buffer(own)
            if before.shape == value.shape:
                before.copy_(value)
            else:
                parent.register_buffer(own, value.to(before.device), persistent=False)


def load_trained(module: nn.Module, weights: dict[str, Any]) -> None:
    """Load the model's part of what `state_of` has returned; what is not in it, such as weights that are not trained, stays."""
    state = others_of(module.state_dict()) | frozen_of(module) | weights
    try:
        module.load_state_dict(state)
    except RuntimeError:
        # What a part adds to the state it takes out itself when it is loaded alone, which it is not within another module.
        missing, unexpected = module.load_state_dict(state, strict=False)
        if missing or any(isinstance(state[name], Tensor) for name in unexpected):
            raise
