"""Every tenth sample of what has no data to validate on is held out."""

from __future__ import annotations

from typing import Any

import pytest
from torch.utils.data import DataLoader

from batchscout.trainers.sources.held_out import Tenths, held_out


@pytest.mark.parametrize("count", [10, 19, 25])
def test_each_sample_of_a_stream_is_trained_on_or_held_out(count: int) -> None:
    train, val = (list(Tenths(range(count), held_out=kept)) for kept in (False, True))
    assert sorted(train + val) == list(range(count))
    assert len(val) == count // 10


@pytest.mark.parametrize("kept", [False, True])
def test_a_stream_of_which_none_can_be_held_out_is_refused(kept: bool) -> None:
    with pytest.raises(ValueError, match=r"\(9, at least 10\).*; give it data to validate on"):
        list(Tenths(range(9), held_out=kept))


@pytest.mark.parametrize("own", [{"batch_sampler": [[0, 1], [2, 3]] * 20}, {"batch_size": None}])
def test_batches_that_a_loader_makes_itself_are_refused(own: dict[str, Any]) -> None:
    samples: Any = range(40)
    with pytest.raises(
        ValueError, match=r"batch_sampler\).*; leave it out|batch_size=None.*give the DataLoader a batch_size"
    ):
        held_out(DataLoader(samples, **own))


def test_a_single_sample_is_refused() -> None:
    samples: Any = [1]
    with pytest.raises(ValueError, match=r"\(1, at least 2\).*; give it data to validate on"):
        held_out(DataLoader(samples))
