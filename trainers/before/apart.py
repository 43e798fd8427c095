"""Whether samples of one set that are validated on are apart from those of it that are trained on. Their places alone do not say so."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Subset

from batchscout.trainers.data.batches import leaves
from batchscout.trainers.data.draws import drawing_from, seed_of
from batchscout.trainers.data.loaders import Loaded
from batchscout.trainers.data.samples import SampleSet
from batchscout.trainers.sources.contents import contents, digest_of

NUM_COMPARED = 4
MOST_SHIFTS = 16
REMEDY = "val_loss then shows no overfitting; give it data to validate on that are of another part of what it reads"


def not_held_apart(sets: Mapping[str, SampleSet]) -> str | None:
    """Return, in words, how validation samples are of what is trained on, where both are parts of one set; None where that was not seen.
    sets: by their names."""
    (whole, trained), (other, validated) = map(whole_and_places, (sets["training"], sets["validation"]))
    if whole is not other or isinstance(whole, list) or len(whole) < NUM_COMPARED:
        return None
    try:
        if _is_drawn_at_any_place(whole):
            return (
                "training and validation samples are parts of one set, which draws them at random whatever their index, so that none is apart: unless "
                f"each is made anew, {REMEDY}"
            )
        if _overlap(whole) and _are_beside(trained, validated):
            return (
                "training and validation samples are parts of one set in which each sample overlaps the next, as windows of one series do, and most of "
                f"the validation samples are beside one that is trained on: {REMEDY}"
            )
    except Exception:  # samples that cannot be read are told of elsewhere
        return None
    return None


def whole_and_places(samples: Any) -> tuple[Any, Sequence[int]]:
    """Return the set that samples are a part of, and their places in it."""
    places: Sequence[int] = range(len(samples))
    while isinstance(samples, Loaded | Subset):
        inside, whole = (
            (samples.places, samples.whole) if isinstance(samples, Loaded) else (samples.indices, samples.dataset)
        )
        places, samples = places if inside is None else [inside[place] for place in places], whole
    return samples, places


def _is_drawn_at_any_place(whole: Any) -> bool:
    def drawn(place: int, seed: int) -> str:
        with drawing_from(seed_of(seed)):
            return digest_of(contents(whole[place]))

    places = [turn * (len(whole) - 1) // (NUM_COMPARED - 1) for turn in range(NUM_COMPARED)]
    return len({drawn(place, 0) for place in places}) == 1 and drawn(0, 1) != drawn(0, 0)


def _are_beside(trained: Sequence[int], validated: Sequence[int]) -> bool:
    known = {*trained}
    return 2 * sum(place - 1 in known or place + 1 in known for place in validated) > len(validated)


def _overlap(whole: Any) -> bool:
    """True if, of some table of numbers in it, each sample has most rows of the one before."""
    rows = [[*_tables_in(whole[place])] for place in range(NUM_COMPARED)]
    return any(map(_is_shifted, zip(*rows, strict=True)))


def _tables_in(sample: Any) -> list[Tensor]:
    found = (torch.as_tensor(leaf) for leaf in leaves(sample) if isinstance(leaf, Tensor | np.ndarray))
    return [table for table in found if table.ndim and len(table) > 1]


def _is_shifted(tables: Sequence[Tensor]) -> bool:
    """True if each begins where the one before has come to by a number of rows, the same for all, that is at most half of them."""
    first, second, *_ = tables
    if len({table.shape for table in tables}) > 1:
        return False
    begin = (first[1 : len(first) // 2 + 1] == second[0]).reshape(len(first) // 2, -1).all(1)
    for by in (begin.nonzero().flatten() + 1).tolist()[:MOST_SHIFTS]:
        shared = first[by:]
        if len(shared.unique()) > 2 and all(
            torch.equal(one[by:], other[:-by]) for one, other in itertools.pairwise(tables)
        ):
            return not torch.equal(first, second)
    return False
