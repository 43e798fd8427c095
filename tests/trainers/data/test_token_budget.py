"""A step that is cut by tokens: each sample once, the budget held, the fewest micro-batches, as many on every rank."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator

import numpy as np

from batchscout.trainers.data.token_budget import cut, dealt, divided, filled
from tests.support.every import for_every

Step = tuple[list[int], int, int]
"""(lengths, budget, ranks)"""


def steps() -> Iterator[Step]:
    """Uneven ones, equal ones, one of each, and ones where few samples meet many ranks."""
    random = np.random.default_rng(0)
    for number_of_ranks in (1, 2, 3, 8):
        for num_samples in (number_of_ranks, 4 * number_of_ranks, 24 * number_of_ranks):
            for longest, micro_batch_size in ((1, 1), (7, 1), (300, 4), (300, num_samples // number_of_ranks)):
                lengths = np.clip(random.lognormal(3.5, 1.0, num_samples), 1, longest).astype(int).tolist()
                yield lengths, micro_batch_size * longest, number_of_ranks
                yield [longest] * num_samples, micro_batch_size * longest, number_of_ranks


ALL = list(steps())


@for_every(step=ALL)
def test_each_sample_comes_once_within_the_budget_and_ranks_have_equally_many_micro_batches(step: Step) -> None:
    lengths, budget, num_ranks = step
    ranks = cut(lengths, budget, num_ranks)
    micro_batches = list(itertools.chain(*ranks))
    assert sorted(itertools.chain(*micro_batches)) == list(range(len(lengths)))
    assert all(len(places) * max(lengths[place] for place in places) <= budget for places in micro_batches)
    assert len(ranks) == num_ranks
    assert {len(mine) for mine in ranks} == {math.ceil(len(filled(sorted(lengths)[::-1], budget)) / num_ranks)}
    assert ranks == cut(lengths, budget, num_ranks)


@for_every(step=ALL)
def test_there_are_never_more_micro_batches_than_where_all_samples_are_the_longest(step: Step) -> None:
    lengths, budget, num_ranks = step
    micro_batch_size = budget // max(lengths)
    assert len(cut(lengths, budget, num_ranks)[0]) <= math.ceil(len(lengths) / num_ranks / micro_batch_size)


def fewest_by_trying_all(lengths: list[int], budget: int) -> int:
    """The fewest sets within the budget into which samples can be divided, in whatever order."""

    def tried(rest: list[int], sets: list[list[int]], best: int) -> int:
        if len(sets) >= best:
            return best
        if not rest:
            return len(sets)
        for number, one in enumerate([*sets, []]):
            if (len(one) + 1) * max([*one, rest[0]]) <= budget:
                grown = [*sets[:number], [*one, rest[0]], *sets[number + 1 :]]
                best = min(best, tried(rest[1:], grown, best))
        return best

    return tried(lengths, [], len(lengths) + 1)


def test_no_other_way_to_cut_a_step_has_fewer_micro_batches() -> None:
    random = np.random.default_rng(1)
    for _ in range(60):
        lengths = random.integers(1, 12, size=random.integers(1, 8)).tolist()
        budget = int(random.integers(max(lengths), 30))
        assert len(cut(lengths, budget, 1)[0]) == fewest_by_trying_all(lengths, budget)


def test_the_largest_micro_batch_is_as_small_as_their_number_allows() -> None:
    """Nine samples of 10 in two: five and four, and not the eight and one that a budget of 80 would hold."""
    assert sorted(len(places) for places in cut([10] * 9, 80, 1)[0]) == [4, 5]


def test_micro_batches_are_halved_until_every_rank_has_one() -> None:
    assert [len(mine) for mine in cut([5, 4, 3, 2], 1000, 4)] == [1, 1, 1, 1]
    assert divided([4], [9, 5, 2, 2], 3) == [1, 1, 2]


def test_padding_falls_to_a_fraction_of_that_of_micro_batches_cut_by_count() -> None:
    """Lengths as those of instruction data: most short, a few long."""
    random = np.random.default_rng(2)
    lengths = np.clip(random.lognormal(5.5, 0.8, 256), 8, 2048).astype(int)
    by_tokens = sum(len(places) * int(lengths[places].max()) for places in cut(lengths, 8 * 2048, 1)[0])
    by_count = sum(8 * int(lengths[place::32].max()) for place in range(32))
    assert 1 - lengths.sum() / by_count > 0.55
    assert 1 - lengths.sum() / by_tokens < 0.25


def test_ranks_have_about_as_many_tokens() -> None:
    lengths = np.random.default_rng(3).integers(1, 100, 256)
    loads = [sum(len(p) * int(lengths[p].max()) for p in mine) for mine in cut(lengths, 800, 4)]
    assert max(loads) <= 1.05 * min(loads)


def test_a_rank_that_has_its_number_gets_no_more() -> None:
    assert dealt([9, 1, 1, 1], 2) == [[0, 3], [1, 2]]
