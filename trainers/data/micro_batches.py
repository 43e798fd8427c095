"""Which samples each micro-batch of a step takes: so many of them, or so many tokens. The step's samples are the same either way."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from batchscout.trainers.config import MicroBatch, Split, TrialConfig
from batchscout.trainers.data.order import LongestFirst, Order, micro_batch_numbers, permuted
from batchscout.trainers.data.samples import Samples, SampleSet
from batchscout.trainers.data.streams import Stream
from batchscout.trainers.data.token_budget import cut


@dataclass(frozen=True)
class Tokens:
    """What a step that was cut by tokens holds, over all ranks."""

    num_micro_batches: int
    num_tokens: int
    """Of the samples themselves."""
    num_padded_tokens: int
    """With what they are padded by."""


@dataclass(frozen=True)
class StepPlan:
    """The micro-batches of one step."""

    micro_batches: list[list[int]]
    """Those of this rank, as indices of the data."""
    tokens: Tokens | None = None
    """None where they are not cut by tokens."""


def micro_batches_of(
    config: TrialConfig, train_set: Samples, order: Order, rank: int
) -> BySamples | ByTokens | ByCountFirst:
    """Return what plans the steps of a run. Raises ValueError where samples are to be cut by tokens that cannot be.

    A plan depends on nothing that happens in the run, so steps may be planned ahead of it. A run that takes the longest
    samples first cuts these by count: that is the fullest micro-batch that the budget allows.
    """
    if config.micro_batch is None:
        return BySamples(order, rank, config.sample_permutation)
    assert not isinstance(train_set, Stream), "it was refused"
    lengths = check_tokens(config.micro_batch, config.micro_batch_size, train_set)
    by_tokens = ByTokens(order, rank, config.sample_permutation, lengths, int(lengths.max()))
    if not isinstance(order, LongestFirst):
        return by_tokens
    return ByCountFirst(BySamples(order, rank, config.sample_permutation), by_tokens, order.num_samples)


@dataclass(frozen=True)
class BySamples:
    """Micro-batches of as many samples each."""

    order: Order
    rank: int
    sample_permutation: int | None

    def of_step(self, first_sample: int, split: Split) -> StepPlan:
        numbers = (
            micro_batch_numbers(first_sample, micro_step, self.rank, split)
            for micro_step in range(split.gradient_accumulation_steps)
        )
        return StepPlan([self.order.indices(permuted(one, self.sample_permutation)) for one in numbers])


@dataclass(frozen=True)
class ByTokens:
    """Micro-batches that hold at most as many tokens as `micro_batch_size` of the longest samples."""

    order: Order
    rank: int
    sample_permutation: int | None
    lengths: np.ndarray
    """Of all samples of the data."""
    longest: int

    def of_step(self, first_sample: int, split: Split) -> StepPlan:
        indices = np.array(self.order.indices(range(first_sample, first_sample + split.effective_batch_size)))
        lengths = self.lengths[indices]
        ranks = cut(lengths, split.micro_batch_size * self.longest, split.world_size)
        padded = [len(places) * int(lengths[places].max()) for mine in ranks for places in mine]
        mine = [indices[permuted(places, self.sample_permutation)].tolist() for places in ranks[self.rank]]
        return StepPlan(mine, Tokens(len(padded), int(lengths.sum()), sum(padded)))


@dataclass(frozen=True)
class ByCountFirst:
    """Micro-batches of as many samples each, up to this sample, and then cut by tokens."""

    first: BySamples
    then: ByTokens
    num_samples: int

    def of_step(self, first_sample: int, split: Split) -> StepPlan:
        return (self.first if first_sample < self.num_samples else self.then).of_step(first_sample, split)


def lengths_of(train_set: SampleSet) -> np.ndarray:
    """Return how many tokens each sample has. Raises ValueError where the set does not say so of every one."""
    found = getattr(train_set, "lengths", None)
    if found is None:
        raise ValueError(
            "micro_batch cuts a step by the tokens of its samples, and the train set does not say how many they have; give it "
            "`lengths`, one number for each sample, or name in data.pad what is padded, or leave micro_batch out"
        )
    return np.maximum(np.asarray(found, dtype=np.int64), 1)  # an empty sample takes a place, too


def check_tokens(micro_batch: MicroBatch, micro_batch_size: int, train_set: SampleSet) -> np.ndarray:
    """Return the lengths of the samples. Raises ValueError where the budget does not hold `micro_batch_size` of the longest ones."""
    lengths, tokens = lengths_of(train_set), micro_batch.tokens
    index, longest = int(lengths.argmax()), int(lengths.max())
    if tokens == "auto" or micro_batch_size * longest <= tokens:
        return lengths
    if longest > tokens:
        raise ValueError(
            f"micro_batch.tokens is {tokens}, and sample {index} of the train set has {longest}; raise it to {longest} at least, or "
            "shorten such samples"
        )
    raise ValueError(
        f"micro_batch.tokens is {tokens}, and {micro_batch_size} of the longest samples (micro_batch_size) have "
        f"{micro_batch_size * longest}, {longest} each; lower micro_batch_size to {tokens // longest}, or raise micro_batch.tokens"
    )
