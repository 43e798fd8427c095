"""An exponential moving average of the weights, and of the statistics that BatchNorm keeps of them, its memory in samples: the same for
every batch size.

Weights that were left s samples ago count 0.5^(s / half-life), and the initial weights, which are nobody's result, do
not count at all: as in Adam (Kingma and Ba 2014, arXiv 1412.6980, section 3), the sum is divided by the weight that it
has gathered. After S samples this is 1 - 0.5^(S / half-life), so the average moves, in a step of B samples, by

    (1 - 0.5^(B / half-life)) / (1 - 0.5^(S / half-life))

of its distance to the newest weights: all the way in the first step. The law holds where B changes in between.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim.swa_utils import get_ema_multi_avg_fn

from batchscout.trainers.model.parallel import like, local, whole


class WeightAverage:
    """Moves once per optimizer step; holds one more copy of what it averages."""

    def __init__(self, tensors: Sequence[Tensor], half_life_samples: int) -> None:
        """tensors: what is averaged, in place in the model. half_life_samples: values that were left so many samples ago count half."""
        self._tensors, self._half_life_samples = [tensor.detach() for tensor in tensors], half_life_samples
        self._values = [tensor.clone() for tensor in self._tensors]
        self._samples = 0.0

    @torch.no_grad()
    def update(self, effective_batch_size: int) -> None:
        """Move by the step that has just been taken, of so many samples."""
        self._samples += effective_batch_size
        move = get_ema_multi_avg_fn(1 - self._weight(effective_batch_size) / self._weight(self._samples))
        move([local(value) for value in self._values], [local(tensor) for tensor in self._tensors], None)

    def _weight(self, samples: float) -> float:
        """Return what share of an average over endlessly many samples the last `samples` of them have."""
        return -math.expm1(-math.log(2) * samples / self._half_life_samples)

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
        for tensor, value in zip(self._tensors, self._values, strict=True):
            mine, theirs = local(tensor), local(value)
            kept = mine.clone()
            mine.copy_(theirs)
            theirs.copy_(kept)

    def state(self) -> dict[str, Any]:
        """Return whole tensors. Where they are sharded, all ranks call this together."""
        return {"samples": self._samples, "values": [whole(value).cpu() for value in self._values]}

    def load(self, state: dict[str, Any]) -> None:
        """state: what `state` has returned."""
        self._samples, values = state["samples"], state["values"]
        self._values = [like(value, tensor) for value, tensor in zip(values, self._tensors, strict=True)]
