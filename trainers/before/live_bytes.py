"""Counts the bytes of the tensors that are alive, operation by operation."""

from __future__ import annotations

import contextlib
import gc
import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode, is_traceable_wrapper_subclass
from torch.utils._pytree import tree_map_only

from batchscout.trainers.having import having


class LiveBytes(TorchDispatchMode):
    """Counts the bytes of the storages that are made within it, until they are freed."""

    def __init__(self) -> None:
        super().__init__()
        self.timeline: list[float] = []
        """The bytes after each operation."""
        self._bytes_of: dict[int, int] = {}
        self._now = 0
        self._until_exit = contextlib.ExitStack()

    def __enter__(self) -> LiveBytes:
        self._until_exit.enter_context(_resizing_seen_by(self._resized))
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self._until_exit.close()

    def only(self, tensors: Iterable[torch.Tensor]) -> None:
        """Begin anew, with these tensors alone of all that was made so far."""
        self.timeline.clear()
        self._bytes_of.clear()
        self._now = 0
        for tensor in tensors:
            self._see(tensor)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        tree_map_only(torch.Tensor, self._see, result)
        self.timeline.append(self._now)
        return result

    def _see(self, tensor: torch.Tensor) -> None:
        """Count a tensor. One that is made of others, such as a DTensor of its shard, has a storage itself, which holds nothing."""
        if is_traceable_wrapper_subclass(tensor):
            names, _ = tensor.__tensor_flatten__()
            parts = [getattr(tensor, name) for name in names]  # a DTensor's mesh is among them
            for part in parts:
                if isinstance(part, torch.Tensor):
                    self._see(part)
            return
        storage = tensor.untyped_storage()
        if storage._cdata not in self._bytes_of:
            self._bytes_of[storage._cdata] = storage.nbytes()
            self._now += storage.nbytes()
            weakref.finalize(storage, self._forget, storage._cdata)

    def _resized(self, storage: torch.UntypedStorage) -> None:
        if storage._cdata in self._bytes_of:
            self._now += storage.nbytes() - self._bytes_of[storage._cdata]
            self._bytes_of[storage._cdata] = storage.nbytes()

    def _forget(self, address: int) -> None:
        self._now -= self._bytes_of.pop(address, 0)


def _resizing_seen_by(see: Callable[[torch.UntypedStorage], None]) -> contextlib.AbstractContextManager[None]:
    """Have `see` called with each storage that changes its size: FSDP2 frees and fills whole weights so, and no operation
    tells of it."""
    resize = torch.UntypedStorage.resize_

    def resize_and_see(storage: torch.UntypedStorage, *size: Any) -> Any:
        result = resize(storage, *size)
        see(storage)
        return result

    return having(torch.UntypedStorage, "resize_", resize_and_see)


@contextlib.contextmanager
def no_collection() -> Iterator[None]:
    """Keep the garbage collector from freeing tensors at a moment that differs from time to time."""
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
