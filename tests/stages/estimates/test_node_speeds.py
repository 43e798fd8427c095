"""A node that takes longer than its peers for the same steps is seen, with how sure it is; a node that got the larger batches is not."""

from __future__ import annotations

import itertools
import math
import random
from typing import Any

import pytest

from batchscout.orchestrator.config.trial import base_trial
from batchscout.orchestrator.stages.estimates.node_speeds import (
    Straggler,
    Timed,
    place_of,
    slower_places,
    slowness,
    stragglers,
)
from batchscout.orchestrator.stages.estimates.timing import in_turn
from batchscout.orchestrator.study.messages import HeldLane
from batchscout.orchestrator.study.trial import Hold, Proposal, Trial, TrialState
from tests.support.every import for_every
from tests.support.lane_player import study_of

BASE = base_trial(study_of(), None)
NODES = ("node-a", "node-b", "node-c", "node-d")


def timed(slow: dict[str, float], num_nodes: int, num_each: int, noise: float, seed: int) -> list[Timed]:
    """Every node times so many of ten sizes, which take from 1 to 512 seconds, at random."""
    chance, found = random.Random(seed), []
    for node, _ in itertools.product(NODES[:num_nodes], range(num_each)):
        size = chance.randrange(10)
        found.append(Timed(size, (node,), math.log(2**size * slow.get(node, 1.0)) + chance.gauss(0, noise)))
    return found


@pytest.mark.parametrize(("num_nodes", "num_each"), [(2, 15), (4, 10)])
@pytest.mark.parametrize("noise", [0.02, 0.1])
def test_a_straggler_is_found_and_the_interval_holds_how_slow_it_is(
    num_nodes: int, num_each: int, noise: float
) -> None:
    """The intervals of all nodes hold together with 95 %, so this one's holds more often."""
    found = [slower_places(timed({"node-b": 1.6}, num_nodes, num_each, noise, seed)) for seed in range(200)]
    assert all(set(places) <= {("node-b",)} for places in found), "no other one is blamed"
    assert sum(bool(places) for places in found) > 190
    held = [places["node-b",] for places in found if places]
    assert sum(one.low <= 1.6 <= one.high for one in held) > 0.93 * len(held)
    assert {(one.place, one.num_others) for one in held} == {(("node-b",), num_nodes - 1)}


@for_every(size=[(2, 2), (2, 15), (4, 3), (4, 10)], noise=[0.01, 0.1, 0.3])
def test_nodes_that_are_alike_are_hardly_ever_called_slow(size: tuple[int, int], noise: float) -> None:
    num_nodes, num_each = size
    found = [slower_places(timed({}, num_nodes, num_each, noise, seed)) for seed in range(400)]
    assert sum(map(bool, found)) <= 0.05 * len(found)


def test_a_node_that_is_slower_by_less_than_a_tenth_is_none() -> None:
    assert not any(slower_places(timed({"node-b": 1.08}, 4, 40, 0.01, seed)) for seed in range(50))


def test_the_node_that_got_the_larger_batches_is_not_slow_for_it() -> None:
    large = [Timed("large", ("node-b",), math.log(8.0) + 0.01 * n) for n in range(8)]
    small = [Timed("small", ("node-a",), math.log(1.0) + 0.01 * n) for n in range(8)]
    assert slower_places([*large, *small]) == {}, "no steps were run on both"


def test_a_single_timing_that_something_held_up_makes_no_straggler() -> None:
    quiet = [Timed(size, (node,), 0.01 * size) for size in range(6) for node in ("node-a", "node-b")]
    held_up = [Timed(one.steps, one.place, one.log_seconds + 1.5 * (n == 1)) for n, one in enumerate(quiet)]
    assert slower_places(held_up) == {}


def test_two_timings_tell_nothing() -> None:
    assert slower_places([Timed("x", ("node-a",), 0.0), Timed("x", ("node-b",), 1.0)]) == {}


def trial(name: str, seconds: float | None, *nodes: str, micro_batch_size: int = 4) -> Trial:
    config = BASE.model_copy(update={"micro_batch_size": micro_batch_size})
    holds = tuple(Hold(0.0, 1.0, lane=HeldLane(0, node)) for node in nodes)
    metrics: dict[str, Any] = {} if seconds is None else {"step_seconds": seconds}
    return Trial(Proposal(name, "train", config, candidate=name), TrialState.COMPLETE, metrics=metrics, holds=holds)


def on_two_nodes() -> list[Trial]:
    """Node b takes 1.5 times as long, give or take 2 %."""
    return [
        trial(f"{size}{node}{n}", size * factor * (1 + 0.02 * (-1) ** n), node, micro_batch_size=size)
        for size in (4, 8)
        for node, factor in (("node-a", 1.0), ("node-b", 1.5))
        for n in range(3)
    ]


def test_what_is_said_has_the_figures_and_the_remedy() -> None:
    (found,) = stragglers(on_two_nodes()).values()
    assert str(found) == (
        f"node-b takes 1.50 x [{found.low:.2f}, {found.high:.2f}] as long as the other for the same steps (in 6 trials there): its speeds are "
        "compared as if it had been as fast, so that no candidate loses for where it ran. See what else runs there, and its clocks "
        "and cooling, or leave the node out"
    )
    assert 1.4 < found.low < 1.5 < found.high < 1.6
    several = Straggler(("node-b", "node-c"), 1.5, 1.4, 1.6, 1, 3)
    assert str(several).startswith(
        "node-b with node-c takes 1.50 x [1.40, 1.60] as long as the 3 others for the same steps (in 1 trial"
    )


def test_only_who_ran_on_the_straggler_alone_is_corrected() -> None:
    found = stragglers(on_two_nodes())
    on_it, beside, on_both = trial("x", 1.0, "node-b"), trial("x", 1.0, "node-a"), trial("x", 1.0, "node-a", "node-b")
    assert slowness(on_it, found) == pytest.approx(1.5, rel=0.02)
    assert slowness(beside, found) == slowness(on_both, found) == slowness(trial("x", 1.0), found) == 1.0


def test_a_trial_that_moved_or_has_no_lane_says_nothing_of_a_node() -> None:
    assert place_of(trial("x", 1.0, "node-a", "node-a")) == ("node-a",)
    assert place_of(trial("x", 1.0, "node-a", "node-b")) is None
    assert place_of(trial("x", 1.0)) is None
    assert stragglers([trial("x", 1.0), trial("y", None, "node-a"), trial("z", 2.0, "node-b")]) == {}


def test_a_round_on_several_lanes_begins_with_another_one_each_time() -> None:
    """With as many lanes as there are to time, each would be timed on the same node in every round."""
    assert [in_turn("abc", number, num_lanes=3) for number in (1, 2, 3, 4)] == [["a", "b", "c"], ["b", "c", "a"], ["c", "a", "b"], ["a", "b", "c"]]  # fmt: skip
    assert [in_turn("abc", number, num_lanes=1) for number in (1, 2)] == [["a", "b", "c"]] * 2
    assert in_turn("", 1, num_lanes=2) == []
