"""How many classes a model's outputs tell apart, and targets that are none of them: torch's text names no numbers, and a GPU's assertion ends
the process."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

from batchscout.trainers.errors import DataFault


@dataclass(frozen=True)
class Classes:
    """Of a loss over classes."""

    number: int
    ignored: int
    """The target that does not count."""

    def check(self, targets: Tensor, what: str) -> None:
        """Raise DataFault where one of the targets is no class. what: whose they are, in words."""
        counted = targets[targets != self.ignored]
        outside = counted[(counted < 0) | (counted >= self.number)]
        if outside.numel():
            raise DataFault(
                f"{what} has the target {outside.flatten()[0].item()}, and the model has {self.number} outputs, for the classes 0 to "
                f"{self.number - 1}; give the model as many outputs as there are classes, or fix the target (one that is not to count is "
                f"{self.ignored})"
            )


class ClassesSeen(TorchFunctionMode):
    """Looks at every cross-entropy that is computed within this, whoever calls it."""

    def __init__(self, what: str) -> None:
        """what: whose targets they are, in words."""
        super().__init__()
        self.found: Classes | None = None
        """Those of the last one; None where there was none."""
        self._what = what

    def __torch_function__(
        self, func: Callable[..., Any], types: Iterable[type], args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func in (F.cross_entropy, F.nll_loss) and not torch.compiler.is_compiling():
            given = inspect.signature(func).bind(*args, **(kwargs or {}))
            given.apply_defaults()
            self._look(**{name: given.arguments[name] for name in ("input", "target", "ignore_index")})
        return func(*args, **(kwargs or {}))

    def _look(self, input: object, target: object, ignore_index: int) -> None:
        if not isinstance(input, Tensor) or not isinstance(target, Tensor):  # torch refuses them in its own words
            return
        if target.is_floating_point():  # shares of the classes
            return
        self.found = Classes(input.shape[min(1, input.dim() - 1)], ignore_index)
        self.found.check(target, self._what)
