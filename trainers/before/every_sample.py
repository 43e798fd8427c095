"""Which sample of a set is no sample: one that raises where it is read, whose loss is no number, or whose class the model has not.

A run meets it after minutes or hours, in a batch of many. Sets are looked through for some seconds, in all of their parts; what that does not
reach is left to the run.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from batchscout.trainers.data.batches import fetch, leaves
from batchscout.trainers.data.long_samples import spread
from batchscout.trainers.data.samples import SampleSet
from batchscout.trainers.errors import DataFault, raised_where

SECONDS = 2.0
"""For each set."""
FEWEST = 32
"""Of so many samples at least one has a target, where any number of them are worth training on."""


def look_through(
    samples: SampleSet,
    name: str,
    indices: Sequence[int],
    loss_of: Callable[[Any], float],
    check: Callable[[Any, str], object],
) -> None:
    """Raise DataFault for the first sample found that no run can train on, or be judged by.

    name: `training` or `validation`. indices: of the samples that a run looks at. loss_of: returns the loss of a batch. check: raises
    DataFault where a batch has what the model knows nothing of, and is told whose it is.
    """
    ends = time.monotonic() + SECONDS
    for place in spread(len(indices)):
        index = indices[place]
        what = f"{name} sample {index}"
        try:
            batch = _as_batch(samples, index)
        except DataFault:
            raise
        except Exception as error:  # of the user's code
            raise DataFault(f"{what} raised {raised_where(error)}; fix it, or leave it out of the set") from error
        check(batch, what)
        # Alone, a mean may be over nothing: of a sample without labels.
        beside_another = [index, (index + 1) % len(samples)]
        if (
            _has_what_is_no_number(batch)
            and not math.isfinite(loss := loss_of(batch))
            and not math.isfinite(loss_of(fetch(samples, beside_another)))
        ):
            raise DataFault(
                f"{what} holds values that are no finite numbers, and its loss is {loss}; fix it, or leave it out of the set"
            )
        if time.monotonic() > ends:
            break


def look_for_targets(samples: SampleSet, name: str, indices: Sequence[int], targets_of: Callable[[Any], float]) -> None:
    """Raise DataFault where no sample has a target. targets_of: returns how many targets a batch has.

    Two samples are looked at at a time: some losses take no single one. Where there is not time for many, or the set shows only a few, as a
    stream does, nothing is said.
    """
    ends, number, looked_at = time.monotonic() + SECONDS, len(indices), 0
    for place in spread(number):
        if targets_of(fetch(samples, [indices[place], indices[(place + 1) % number]])) > 0:
            return
        looked_at += 1
        if time.monotonic() > ends:
            break
    if looked_at >= FEWEST:
        raise DataFault(
            f"no {name} sample of those looked at, in all parts of the set, has a target: every label of theirs is masked (-100, or the loss's "
            "ignore_index), so there is nothing to learn from them; look at how the labels are made"
        )


def _as_batch(samples: SampleSet, index: int) -> Any:
    """Return a sample as a batch; beside the first one where the set's own code makes none of it alone, as it leaves some out."""
    try:
        return fetch(samples, [index])
    except Exception:
        if index == 0:
            raise
    return fetch(samples, [0, index])


def _has_what_is_no_number(batch: Any) -> bool:
    tensors = (leaf for leaf in leaves(batch) if isinstance(leaf, Tensor) and not leaf.is_nested)
    return any(one.is_floating_point() and not bool(torch.isfinite(one).all()) for one in tensors)
