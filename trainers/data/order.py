"""Which samples a step takes: the order of a pass over the data, and the numbers of one micro-batch."""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from batchscout.trainers.config import Split
from batchscout.trainers.data.draws import seed_of
from batchscout.trainers.data.samples import SampleSet


class SampleOrder:
    """Turns sample numbers (0, 1, 2, ... over the whole run) into indices of the data; every pass has an order of its
    own."""

    def __init__(self, num_samples: int, seed: int) -> None:
        self.num_samples, self.seed = num_samples, seed
        self._passes: dict[int, Tensor] = {}

    def indices(self, numbers: Iterable[int]) -> list[int]:
        """Return the indices of the data for these sample numbers."""
        places = (divmod(number, self.num_samples) for number in numbers)
        return [int(self._pass(number_of_pass)[place]) for number_of_pass, place in places]

    def _pass(self, number: int) -> Tensor:
        if number not in self._passes:
            # The micro-batches of one step go back and forth over a pass boundary: keep the neighbour too.
            self._passes = {kept: order for kept, order in self._passes.items() if abs(kept - number) == 1}
            self._passes[number] = permutation(self.num_samples, self.seed, number)
        return self._passes[number]


def permutation(num_samples: int, seed: int, number_of_pass: int) -> Tensor:
    """Return the indices (num_samples,) in the order of that pass."""
    # seed + pass would repeat other seeds' passes.
    generator = torch.Generator().manual_seed(seed_of(seed, number_of_pass))
    return torch.randperm(num_samples, generator=generator)


def of_every_part(num_samples: int, count: int) -> list[int]:
    """Return `count` indices, one drawn from each of as many equal parts of a set, always the same ones; all of a smaller set.

    The first samples would not do: where a set is sorted, by its classes or by length, they are all of one kind.
    """
    draw, count = random.Random(0), min(count, num_samples)
    return [draw.randrange(part * num_samples // count, (part + 1) * num_samples // count) for part in range(count)]


class InOrder:
    """Takes the samples of a stream as they come: their numbers are all there is to know them by."""

    def indices(self, numbers: Iterable[int]) -> list[int]:
        return list(numbers)


class LongestFirst:
    """Takes the longest samples in the steps that are not timed, and then the others in their order: what is to fit must fit with the
    longest, and how fast it is, all samples tell. The first step alone would not do: it has no optimizer state yet."""

    def __init__(self, indices: Sequence[int], num_samples: int, then: SampleOrder) -> None:
        """indices: of the longest samples; where a step takes more, it takes some twice. num_samples: of the steps that are not timed."""
        self.num_samples = num_samples
        self._indices, self._then = indices, then

    def indices(self, numbers: Iterable[int]) -> list[int]:
        return [
            self._indices[number % len(self._indices)] if number < self.num_samples else self._then.indices([number])[0]
            for number in numbers
        ]


Order = SampleOrder | LongestFirst | InOrder
"""What says which samples of the data steps take."""


def longest(samples: SampleSet, count: int, known: Sequence[int] = ()) -> list[int]:
    """Return the indices of the `count` longest samples. known: those of the longest, the longest first, for a set that has no
    `lengths`; where there are none either, the first ones are taken."""
    lengths = getattr(samples, "lengths", None)
    if lengths is None:
        return list(known[:count]) or list(range(min(count, len(samples))))
    return sorted(range(len(samples)), key=lambda index: -int(lengths[index]))[:count]


def micro_batch_numbers(first_sample: int, micro_step: int, rank: int, split: Split) -> range:
    """Return the sample numbers of one micro-batch of the step that begins at `first_sample`: a strided slice of the
    step's, so that every split sees the same set."""
    first = first_sample + micro_step * split.world_size + rank
    return range(first, first_sample + split.effective_batch_size, split.num_micro_batches)


def permuted(numbers: Sequence[int], seed: int | None) -> list[int]:
    """Return the sample numbers of one micro-batch in another order; in their own where the seed is None.

    No sample leaves its micro-batch. If some did, a loss that is a mean, or BatchNorm, would make another gradient, and
    it is the rounding alone that is to change.
    """
    if seed is None:
        return list(numbers)
    return [numbers[place] for place in permutation(len(numbers), seed, numbers[0]).tolist()]
