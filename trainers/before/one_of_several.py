"""One rank of several, followed without the others: what it holds beside a rank that trains alone."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.nn.parallel import DistributedDataParallel
from torch.testing._internal.distributed.fake_pg import FakeStore

from batchscout.trainers.config import TrialConfig
from batchscout.trainers.model.parallel import ModuleAndLoss, shard


@contextlib.contextmanager
def ranks_of(config: TrialConfig) -> Iterator[DeviceMesh | None]:
    """Let this process be the first of the trial's ranks; exchanges with the others return at once, with anything in the
    tensors. Yields None where there are no others."""
    if config.world_size == 1 and config.parallel == "ddp":
        yield None
        return
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=config.world_size)
    try:
        yield init_device_mesh("cpu", (config.world_size,))
    finally:
        dist.destroy_process_group()


def followed(module: nn.Module, config: TrialConfig, device: torch.device, *, mesh: DeviceMesh | None) -> nn.Module:
    """Return the model that a rank calls, as `distribute` does; its tensors are fake ones."""
    if mesh is None:
        return module
    return shard(module, config, mesh) if config.parallel == "fsdp" else Bucketed(ModuleAndLoss(module))


class Bucketed(DistributedDataParallel):
    """DDP as far as memory goes; torch's own reads tensors in C++, where fake ones have nothing to read.

    Its buckets hold a gradient of every parameter from the beginning to the end. A micro-batch after which ranks do not meet
    has gradients of its own beside them; in one after which they meet, each is copied into its bucket as soon as it is known,
    and is a view of it from then on (Li et al. 2020, arXiv 2006.15704, section 4.2, and `gradient_as_bucket_view`).
    """

    def __init__(self, module: nn.Module) -> None:
        nn.Module.__init__(self)
        self.module = module
        self.require_backward_grad_sync = True
        self._in_bucket: dict[nn.Parameter, Tensor] = {}
        for parameter in module.parameters():
            if parameter.requires_grad:
                self._in_bucket[parameter] = torch.empty_like(parameter)
                parameter.register_post_accumulate_grad_hook(self._meet)

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        return self.module(*inputs, **kwargs)

    def _meet(self, parameter: Tensor) -> None:
        if self.require_backward_grad_sync:
            assert isinstance(parameter, nn.Parameter)
            parameter.grad = self._in_bucket[parameter]
