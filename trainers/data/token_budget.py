"""The samples of a step, cut into micro-batches that hold no more than so many tokens, padding included. Pure.

A micro-batch is padded to its longest sample, so it has (its samples) x (its longest) tokens. Filled from the longest sample
down, a step needs the fewest micro-batches there can be. Proof: whichever micro-batch has the longest sample, of length L, holds
at most budget // L samples. Put the next longest ones there, as many as it holds, and what they change places with into the others: these
get no more samples, and none that is longer than what left. So some fewest cut begins as this one does; the rest follows in the same way.
"""

from __future__ import annotations

import heapq
import itertools
from bisect import bisect_left
from collections.abc import Sequence

import numpy as np


def cut(lengths: Sequence[int] | np.ndarray, budget: int, num_ranks: int) -> list[list[list[int]]]:
    """Return for each rank its micro-batches, as places in `lengths`; the largest first, beside which no gradient is held yet.

    All ranks have equally many, which FSDP2 needs, since every forward pass gathers weights; and the fewest that the budget allows. Among
    these cuts it is one whose largest micro-batch is as small as can be, so that ranks wait little for each other.
    lengths: at least `num_ranks` of them, each from 1 to `budget`.
    """
    order = np.argsort(-np.asarray(lengths), kind="stable")
    falling: list[int] = np.asarray(lengths)[order].tolist()
    assert falling[-1] > 0
    assert falling[0] <= budget
    assert len(falling) >= num_ranks
    count = -(-len(filled(falling, budget)) // num_ranks) * num_ranks
    budgets = range(falling[0], budget + 1)
    least = budgets[bisect_left(budgets, True, key=lambda tokens: len(filled(falling, tokens)) <= count)]
    sizes = divided(filled(falling, least), falling, count)
    ends = list(itertools.accumulate(sizes))
    micro_batches = [order[end - size : end].tolist() for size, end in zip(sizes, ends, strict=True)]
    tokens = [size * falling[end - size] for size, end in zip(sizes, ends, strict=True)]
    return [[micro_batches[number] for number in mine] for mine in dealt(tokens, num_ranks)]


def filled(falling: Sequence[int], budget: int) -> list[int]:
    """Return the sizes of the fewest micro-batches within the budget. falling: lengths, the longest first."""
    sizes, place = list[int](), 0
    while place < len(falling):
        sizes.append(min(budget // falling[place], len(falling) - place))
        place += sizes[-1]
    return sizes


def divided(sizes: Sequence[int], falling: Sequence[int], count: int) -> list[int]:
    """Return `count` sizes: the micro-batches with the most tokens are halved until there are as many."""
    places = [0, *itertools.accumulate(sizes)]
    heap = [(-size * falling[place], place, size) for size, place in zip(sizes, places, strict=False)]
    heapq.heapify(heap)
    alone = list[tuple[int, int]]()  # (place, 1): nothing to halve
    while len(heap) + len(alone) < count:
        _, place, size = heapq.heappop(heap)
        if size == 1:
            alone.append((place, size))
            continue
        for begin, part in ((place, size // 2), (place + size // 2, size - size // 2)):
            heapq.heappush(heap, (-part * falling[begin], begin, part))
    return [size for _, size in sorted([*alone, *((place, size) for _, place, size in heap)])]


def dealt(tokens: Sequence[int], num_ranks: int) -> list[list[int]]:
    """Return the numbers of each rank's micro-batches: equally many, the one with the most tokens to the rank that has the fewest."""
    ranks: list[list[int]] = [[] for _ in range(num_ranks)]
    loads = [0] * num_ranks
    for number in sorted(range(len(tokens)), key=lambda number: -tokens[number]):
        waiting = [rank for rank in range(num_ranks) if len(ranks[rank]) < len(tokens) // num_ranks]
        rank = min(waiting, key=lambda rank: loads[rank])
        ranks[rank].append(number)
        loads[rank] += tokens[number]
    return ranks
