"""A script that trains over several processes, watched as the first and only one of its run: the study has ranks of its own."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from typing import Any

import torch.distributed
import torch.nn.parallel.distributed as parallel_module
from torch import Tensor, nn

from batchscout.trainers.having import having
from batchscout.trainers.launcher import ALONE, without_launcher


def asks_for_a_launcher(error: BaseException | None) -> bool:
    """True if a script has raised this because it was not launched as one of several processes."""
    return isinstance(error, KeyError) and error.args[:1] != () and error.args[0] in ALONE


class _Alone(nn.Module):
    """In place of DistributedDataParallel: the module, of which there is no other copy."""

    def __init__(self, module: nn.Module, *_: object, **__: object) -> None:
        super().__init__()
        self.module = module

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.module(*args, **kwargs)

    def no_sync(self) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()


_Alone.__name__ = "DistributedDataParallel"


class _Done:
    """What a collective returns that need not be waited for."""

    def wait(self, *_: object, **__: object) -> bool:
        return True

    def is_completed(self) -> bool:
        return True


def _done(*_: object, **__: object) -> _Done:
    return _Done()


# What all processes have, gathered, is what this one has, without its graph. The arguments are called as torch calls them.


def _all_gather(tensor_list: list[Tensor], tensor: Tensor, *_: object, **__: object) -> _Done:
    tensor_list[0].detach().copy_(tensor.detach())
    return _Done()


def _all_gather_into_tensor(output_tensor: Tensor, input_tensor: Tensor, *_: object, **__: object) -> _Done:
    output_tensor.detach().view_as(input_tensor).copy_(input_tensor.detach())
    return _Done()


def _all_gather_object(object_list: list[Any], obj: Any, *_: object, **__: object) -> None:
    object_list[0] = obj


def _gather(tensor: Tensor, gather_list: list[Tensor] | None = None, *_: object, **__: object) -> _Done:
    return _Done() if gather_list is None else _all_gather(gather_list, tensor)


def _gather_object(obj: Any, object_gather_list: list[Any] | None = None, *_: object, **__: object) -> None:
    if object_gather_list is not None:
        object_gather_list[0] = obj


@contextlib.contextmanager
def one_process(*, launched: bool) -> Iterator[None]:
    """Within this, torch.distributed has one process, and no group unless the script makes one; what this process is a rank of is not to be
    seen. launched: the environment is that of a launcher. What this sets there is put back by others."""
    made = list[bool]()
    stand_ins: dict[str, Any] = {
        "init_process_group": lambda *_, **__: made.append(True),
        "destroy_process_group": lambda *_, **__: made.clear(),
        "is_initialized": lambda: bool(made),
        "get_rank": lambda *_, **__: 0,
        "get_world_size": lambda *_, **__: 1,
        "get_backend": lambda *_, **__: "gloo",
        "new_group": lambda *_, **__: None,
        **dict.fromkeys(("barrier", "all_reduce", "reduce", "broadcast", "broadcast_object_list"), _done),
        "all_gather": _all_gather,
        "all_gather_into_tensor": _all_gather_into_tensor,
        "all_gather_object": _all_gather_object,
        "gather": _gather,
        "gather_object": _gather_object,
    }
    with without_launcher(), contextlib.ExitStack() as stack:
        if launched:
            os.environ.update(ALONE)
        for name, stand_in in stand_ins.items():
            stack.enter_context(having(torch.distributed, name, stand_in))
        for module in (torch.nn.parallel, parallel_module):
            stack.enter_context(having(module, "DistributedDataParallel", _Alone))
        yield
