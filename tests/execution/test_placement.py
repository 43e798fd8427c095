"""How many CPUs a rank gets, without Ray."""

from __future__ import annotations

import pytest

from orchestrator.execution.placement import largest_share


@pytest.mark.parametrize(
    ("nodes", "ranks", "share"),
    [([2], 1, 2), ([2], 2, 1), ([8] * 4, 1, 8), ([8] * 4, 4, 8), ([8] * 4, 5, 4), ([9, 3], 2, 4), ([1], 2, 1)],
)
def test_a_rank_gets_the_most_cpus_that_every_rank_can_have_on_one_node(
    nodes: list[int], ranks: int, share: int
) -> None:
    assert largest_share(nodes, ranks) == share
