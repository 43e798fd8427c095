"""What the targets of samples are."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from batchscout.trainers.counted import Counted
from batchscout.trainers.data.batches import fetch, leaves
from batchscout.trainers.data.samples import SampleSet


def counted_in(samples: SampleSet, targets_per_sample: float | None) -> Counted:
    """Return what the targets of these samples are. targets_per_sample: None where it is not known."""
    if targets_per_sample == 1:
        return "samples"
    return "tokens" if _are_of_tokens(samples) else "targets"


def _are_of_tokens(samples: SampleSet) -> bool:
    """True of a set that tells of a vocabulary, and of samples that are whole numbers in rows. One that tells the length of its rows may
    have others beside these, such as weights; by itself that says nothing: windows of a time series have one, too."""
    if hasattr(samples, "vocab_size"):
        return True
    batch = fetch(samples, [0])
    batch = dict(batch) if isinstance(batch, Mapping) else batch  # a tokenizer's own kind is else taken for one thing
    tensors = [leaf for leaf in leaves(batch) if isinstance(leaf, Tensor)]
    whole = [tensor for tensor in tensors if not tensor.is_floating_point() and tensor.dim() <= 2]
    are_all = len(whole) == len(tensors) or hasattr(samples, "seq_len")
    return are_all and any(tensor.dim() == 2 for tensor in whole)
