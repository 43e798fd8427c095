"""The longest samples of a set that does not tell how long they are: it is read, as far as a few seconds go."""

from __future__ import annotations

import heapq
import itertools
import math
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from torch import Tensor
from torch.utils._pytree import tree_leaves
from torch.utils.data import default_collate

from batchscout.trainers.data.batches import read
from batchscout.trainers.data.samples import Samples, SampleSet
from batchscout.trainers.data.streams import Stream
from batchscout.trainers.sources.kinds import library_of

MOST_KEPT = 64
"""Of a micro-batch of more samples some are among the longest twice."""


@dataclass(frozen=True)
class LongSamples:
    """What was found."""

    indices: tuple[int, ...]
    """Of the longest, the longest first; none where all that were looked at are of one size."""
    num_looked_at: int


def long_samples(samples: Samples, seconds: float) -> LongSamples | None:
    """Return the longest samples of those that so many seconds are enough to read, spread over the set; None of a set that tells
    `lengths`, or whose samples are stacked, and so of one size."""
    if isinstance(samples, Stream) or getattr(samples, "lengths", None) is not None or not _batches_itself(samples):
        return None
    ends, sizes = time.monotonic() + seconds, dict[int, int]()
    for index in spread(len(samples)):
        sizes[index] = sum(map(_numbers_in, tree_leaves(read(samples, [index]))))
        if time.monotonic() > ends:
            break
    longest = heapq.nsmallest(MOST_KEPT, sizes, key=lambda index: (-sizes[index], index))
    return LongSamples(tuple(longest) if len(set(sizes.values())) > 1 else (), len(sizes))


def _batches_itself(samples: SampleSet) -> bool:
    """True if a set of the user's own puts its samples together, and may pad them."""
    collates = getattr(samples, "collate_fn", default_collate) is not default_collate
    return collates or library_of(getattr(samples, "__getitems__", None)) not in ("", "torch", "datasets", "batchscout")


def spread(number: int) -> Iterator[int]:
    """Yield all indices, each part of them spread over the whole set."""
    stride = next(one for one in itertools.count(round(0.618 * number) or 1) if math.gcd(one, number) == 1)
    return (place * stride % number for place in range(number))


def _numbers_in(leaf: Any) -> int:
    """Return how many numbers, or characters, it holds."""
    if isinstance(leaf, Tensor):
        return leaf.numel()
    if isinstance(leaf, np.ndarray):
        return leaf.size
    return len(leaf) if isinstance(leaf, str | bytes) else 1
