"""Lets transformers see in fake positions what it sees in real ones: that a sample is one sequence."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator, Mapping
from typing import Any

from batchscout.trainers.having import having


@contextlib.contextmanager
def one_sequence_each(sample: Any) -> Iterator[None]:
    """Have models of transformers take each sample for one sequence, unless the batch has positions of its own.

    Without a mask they look whether positions begin anew within a sample. Fake positions tell nothing, so they would build a
    mask that no run has: one of length x length in every layer.
    """
    masking: Any = sys.modules.get("transformers.masking_utils")
    has_positions = isinstance(sample, Mapping) and "position_ids" in sample
    if has_positions or not hasattr(masking, "find_packed_sequence_indices"):
        yield
        return
    with having(masking, "find_packed_sequence_indices", lambda position_ids: None):
        yield
