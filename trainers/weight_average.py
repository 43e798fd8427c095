"""An exponential moving average of the weights, its memory in samples: the same for every batch size."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch
from torch import Tensor, nn
from torch.optim.swa_utils import get_ema_multi_avg_fn

from trainers.parallel import like, local, whole


class WeightAverage:
    """Moves once per optimizer step; holds one more copy of the weights."""

    def __init__(self, parameters: list[nn.Parameter], half_life_samples: int, effective_batch_size: int) -> None:
        """half_life_samples: weights that were left so many samples ago count half."""
        self._parameters = parameters
        self._values = [parameter.detach().clone() for parameter in parameters]
        self._move = get_ema_multi_avg_fn(0.5 ** (effective_batch_size / half_life_samples))

    @torch.no_grad()
    def update(self) -> None:
        now = [local(parameter.detach()) for parameter in self._parameters]
        self._move([local(value) for value in self._values], now, None)

    @contextlib.contextmanager
    def in_place(self) -> Iterator[None]:
        """Put the averaged weights into the model for as long as the block runs."""
        self._swap()
        try:
            yield
        finally:
            self._swap()

    @torch.no_grad()
    def _swap(self) -> None:
        for parameter, value in zip(self._parameters, self._values, strict=True):
            mine, theirs = local(parameter.detach()), local(value)
            kept = mine.clone()
            mine.copy_(theirs)
            theirs.copy_(kept)

    def state(self) -> list[Tensor]:
        """Return whole tensors. Where they are sharded, all ranks call this together."""
        return [whole(value).cpu() for value in self._values]

    def load(self, state: list[Tensor]) -> None:
        self._values = [like(value, parameter) for value, parameter in zip(state, self._parameters, strict=True)]
