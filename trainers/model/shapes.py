"""Follows a model with torch's fake tensors, which have shapes and no values, and says why one cannot be followed."""

from __future__ import annotations

import contextlib
import logging
import os
import warnings
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensorMode,
    UnsupportedOperatorException,
)
from torch.utils._python_dispatch import TorchDispatchMode

from batchscout.trainers.errors import NotFollowed, Obstacle, innermost_line, raised_text
from batchscout.trainers.having import having

_TORCH = f"{Path(torch.__file__).parent}{os.sep}"
_LOGGER = "torch._subclasses.fake_tensor"
# What a user has written where torch calls this operation.
_AS_WRITTEN = {
    "aten._local_scalar_dense": "item(), or a condition on a tensor",
    "aten.nonzero": "nonzero(), or a mask as an index",
}


@contextlib.contextmanager
def shapes_alone() -> Iterator[FakeTensorMode]:
    """Give tensors that are made in this block shapes and no values. What torch warns of and logs about them is not shown: whoever
    follows a model says himself what he could not."""
    unlogged = having(logging.getLogger(_LOGGER), "disabled", True)
    with unlogged, warnings.catch_warnings(), FakeTensorMode(allow_non_fake_inputs=True) as mode:
        warnings.simplefilter("ignore")
        with _conversions_without_swaps():
            yield mode


def _conversions_without_swaps() -> contextlib.AbstractContextManager[None]:
    """Let a module's .to(), .float() and their kind put what they make in the place of a fake parameter. torch exchanges the insides of
    the two, which it refuses where anything refers to one weakly, as its own fake mode does."""
    # Which parameter has taken the place of which, so that tied ones stay tied. None is kept alive here: its bytes are counted.
    replaced: dict[int, tuple[weakref.ref[nn.Parameter], weakref.ref[nn.Parameter]]] = {}

    def converted(parameter: nn.Parameter, convert: Callable[[Tensor], Tensor]) -> nn.Parameter:
        before, after = (ref() for ref in replaced.get(id(parameter), (lambda: None,) * 2))
        if before is parameter and after is not None:
            return after
        with torch.no_grad():
            found = convert(parameter)
        if found is parameter:
            return parameter
        made = nn.Parameter(found, parameter.requires_grad)
        replaced[id(parameter)] = weakref.ref(parameter), weakref.ref(made)
        return made

    def apply(self: nn.Module, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> nn.Module:
        for child in self.children() if recurse else ():
            child._apply(fn)
        kept = {name: converted(p, fn) for name, p in self._parameters.items() if p is not None}
        self._parameters.update(kept)
        self._buffers.update({name: fn(buffer) for name, buffer in self._buffers.items() if buffer is not None})
        return self

    return having(nn.Module, "_apply", apply)


def why_not_followed(error: Exception) -> NotFollowed:
    """Return why fake tensors could not follow what raised this error."""
    where = innermost_line(error, leave_out=_TORCH)
    match error:
        case DataDependentOutputException() | DynamicOutputShapeException():
            operation = _name(error.func)
            return NotFollowed(Obstacle.READS_VALUES, _AS_WRITTEN.get(operation, operation), where)
        case UnsupportedOperatorException():
            return NotFollowed(Obstacle.UNKNOWN_OPERATION, _name(error.func), where)
        case _:
            return NotFollowed(Obstacle.RAISED, raised_text(error), where)


def _name(operation: object) -> str:
    """Return an operation's name without that of its overload."""
    return str(getattr(operation, "overloadpacket", operation))


class NumbersAre(TorchDispatchMode):
    """Answers with one number to whoever reads one that is not known, where no number changes a shape: 1 in an optimizer's step,
    which divides by what it reads, and 0 where weights are drawn, which goes on as long as one of them is out of bounds."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self._number = number

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        try:
            return func(*args, **(kwargs or {}))
        except DataDependentOutputException:
            return float(self._number) if args[0].is_floating_point() else self._number
