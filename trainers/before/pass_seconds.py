"""How long a pass of a model takes, before a study."""

from __future__ import annotations

import copy
import time
from typing import Any

import torch
from torch import nn

from batchscout.trainers.data.batches import fetch, move
from batchscout.trainers.data.samples import SampleSet
from batchscout.trainers.model.adding_up import buffers_kept, seeded
from batchscout.trainers.model.losses import LossFunction

TIMED_SIZES = (2, 8)
TIMES = 3
SECONDS_TO_REPEAT = 1.0
LONGEST_TO_REPEAT_SECONDS = 1.0
"""A pass of two samples that takes longer is not timed again, at larger sizes: there is little time for what is looked at before a study."""


def pass_seconds(
    module: nn.Module, loss: LossFunction, train_set: SampleSet, device: torch.device
) -> tuple[float, float] | None:
    """Return what a forward and backward pass takes, whatever its size, and for each sample, by passes of two sizes; None where the larger
    one does not go, or the smaller one takes too long."""

    def once(batch: Any) -> float:
        batch = copy.deepcopy(batch)  # which a loss may change
        started = time.perf_counter()
        loss(module, batch)[0].backward()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        return time.perf_counter() - started

    taken = dict[int, float]()
    for size in TIMED_SIZES:
        try:
            batch = move(fetch(train_set, [number % len(train_set) for number in range(size)]), device)
            with seeded(module, 0), buffers_kept(module):
                taken[size] = once(batch)
                if taken[size] < SECONDS_TO_REPEAT:  # the first one of a size makes its kernels ready
                    taken[size] = min(once(batch) for _ in range(TIMES))
        except Exception:  # nothing is known of it then; what is wrong with such a batch the run will say
            return None
        finally:
            module.zero_grad()
        if size == TIMED_SIZES[0] and taken[size] > LONGEST_TO_REPEAT_SECONDS:
            return None
    (small, of_small), (large, of_large) = taken.items()
    of_each = min(max(0.0, (of_large - of_small) / (large - small)), of_small / small)
    return of_small - small * of_each, of_each
