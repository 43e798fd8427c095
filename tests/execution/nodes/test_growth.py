"""The laws of how many lanes a study has on a cluster that grows and shrinks, over every small scene; and what nodes hold."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import replace

import pytest

from batchscout.orchestrator.decisions.director import Wanted
from batchscout.orchestrator.execution.nodes.autoscaler import MayStart, NoAutoscaler, may_start
from batchscout.orchestrator.execution.nodes.growth import Growth, OpenLane, ScalingState, decide
from batchscout.orchestrator.execution.nodes.node_kinds import Choice, Node, chosen_nodes
from batchscout.orchestrator.execution.nodes.placement import LaneShape
from batchscout.orchestrator.execution.nodes.room import at_most, bundles_of, bundles_of_whole, lanes_held

RELEASE_AFTER = 60.0
BUSY, JUST_IDLE, LONG_IDLE = None, 1.0, 100.0
STATES = [(BUSY, "node"), (JUST_IDLE, "node"), (LONG_IDLE, "node"), (JUST_IDLE, ""), (LONG_IDLE, "")]


def scenes() -> Iterator[ScalingState]:
    """Every number of trials and lanes up to three, in every state, with any room for them."""
    lanes_of = [
        [OpenLane(f"lane-{number}", idle, node) for number, (idle, node) in enumerate(states)]
        for count in range(4)
        for states in itertools.product(STATES, repeat=count)
    ]
    for lanes, trials, room, most, more in itertools.product(lanes_of, range(4), range(5), range(4), (False, True)):
        yield ScalingState(Wanted(trials, more), lanes, room, most, RELEASE_AFTER)


def after(scene: ScalingState, growth: Growth) -> ScalingState:
    """The scene once the decision was carried out: the new lanes have no trial yet."""
    kept = [lane for lane in scene.lanes if lane.name not in growth.release]
    return replace(scene, lanes=kept + [OpenLane(f"new-{number}", 0.0, "") for number in range(growth.open)])


def test_no_more_lanes_are_opened_than_there_are_trials_and_than_nodes_hold() -> None:
    for scene in scenes():
        growth = decide(scene)
        if growth.open:
            assert len(scene.lanes) + growth.open <= min(scene.wanted.num_trials, scene.room, scene.most), scene


def test_a_trial_that_finds_a_node_finds_a_lane() -> None:
    for scene in scenes():
        lanes = len(after(scene, decide(scene)).lanes)
        assert lanes >= min(scene.wanted.num_trials, scene.room, scene.most), scene


def test_the_autoscaler_is_asked_for_what_trials_lack_and_for_nothing_else() -> None:
    """Until their lanes have come up: a node on which nothing runs yet might end."""
    for scene in scenes():
        useful = min(scene.wanted.num_trials, scene.most)
        up = sum(lane.node == "node" for lane in scene.lanes)
        lacks = (useful > scene.room or useful > up) and len(scene.lanes) <= useful
        assert decide(scene).ask == (useful if lacks else 0), scene


def test_only_idle_lanes_are_given_back_and_none_that_a_trial_may_take() -> None:
    for scene in scenes():
        growth = decide(scene)
        idle = {lane.name for lane in scene.lanes if lane.idle_seconds is not None}
        assert set(growth.release) <= idle, scene
        if growth.release:
            assert len(after(scene, growth).lanes) >= min(scene.wanted.num_trials, scene.most), scene
            assert (growth.open, growth.ask) == (0, 0), scene


def test_a_lane_that_trials_may_yet_come_for_is_kept_for_the_time_that_the_study_file_says() -> None:
    for scene in scenes():
        released = decide(scene).release
        for lane in scene.lanes:
            waited = lane.idle_seconds is not None and lane.idle_seconds >= RELEASE_AFTER
            assert lane.name not in released or waited or not scene.wanted.more_may_come, scene


def test_no_lane_is_kept_idle_once_no_trial_can_come() -> None:
    for scene in scenes():
        if not scene.wanted.more_may_come:
            kept = after(scene, decide(scene)).lanes
            spare = len(kept) - min(scene.wanted.num_trials, scene.most)
            assert spare <= 0 or all(lane.idle_seconds is None for lane in kept), scene


def test_a_decision_that_was_carried_out_leaves_nothing_to_do_and_whatever_is_done_has_a_reason() -> None:
    for scene in scenes():
        growth = decide(scene)
        again = decide(after(scene, growth))
        assert (again.open, again.release) == (0, ()), scene
        assert bool(growth.reason) == bool(growth.open or growth.ask or growth.release), scene


def test_of_idle_lanes_those_whose_node_can_then_end_are_given_back_first() -> None:
    lanes = [OpenLane("busy", BUSY, "a"), OpenLane("beside it", 90.0, "a"), OpenLane("alone", 70.0, "b")]
    growth = decide(
        ScalingState(Wanted(2, more_may_come=True), lanes, room=3, most=4, idle_release_seconds=RELEASE_AFTER)
    )
    assert growth.release == ("alone",)
    assert growth.reason == "1 lane has had no trial for 60 s (placement.idle_release_seconds)"


def test_a_lane_that_has_lost_its_node_is_given_back_before_one_that_has_not() -> None:
    lanes = [OpenLane("up", LONG_IDLE, "a"), OpenLane("lost", JUST_IDLE, "")]
    growth = decide(
        ScalingState(Wanted(1, more_may_come=False), lanes, room=1, most=2, idle_release_seconds=RELEASE_AFTER)
    )
    assert growth.release == ("lost",)


def test_the_reasons_name_both_numbers() -> None:
    asked = decide(ScalingState(Wanted(3, more_may_come=True), [], room=1, most=2, idle_release_seconds=RELEASE_AFTER))
    assert asked == Growth(
        1, 2, (), "3 trials can run and the nodes hold 1 lane: the autoscaler is asked for room for 2"
    )
    idle = [OpenLane("a", JUST_IDLE), OpenLane("b", JUST_IDLE)]
    over = decide(
        ScalingState(Wanted(0, more_may_come=False), idle, room=2, most=2, idle_release_seconds=RELEASE_AFTER)
    )
    assert over.reason == "no trial is left for them: 2 lanes given back"


# What nodes hold, and what an autoscaler may start

HEAD = Node("head", 0, is_head=True)
ON_AWS = {
    "max_workers": 4,
    "head_node_type": "head",
    "available_node_types": {
        "head": {"resources": {"CPU": 0}, "max_workers": 0},
        "gpu": {"resources": {"CPU": 48, "GPU": 4, "accelerator_type:L4": 1}, "max_workers": 3},
        "cpu": {"resources": {"CPU": 8}},
        "unknown": {"resources": {}, "max_workers": 9},
    },
}


def shape(world_size: int = 1, *, use_gpu: bool = True, **more: str) -> LaneShape:
    return LaneShape(9, world_size, 1, use_gpu, **more)  # pyright: ignore[reportArgumentType]


def test_a_file_for_ray_up_says_what_may_be_started() -> None:
    scaler = may_start(ON_AWS)
    assert isinstance(scaler, MayStart)
    assert [(node.name, node.num_cpus, node.num_gpus, node.kind) for node in scaler.nodes] == [
        *[("gpu", 48, 4, "L4")] * 3,
        *[("cpu", 8, 0, None)] * 4,
    ]
    assert not any(node.is_there for node in scaler.nodes)


@pytest.mark.parametrize("config", [{}, ON_AWS | {"max_workers": 0}, ON_AWS | {"available_node_types": {"head": {}}}])
def test_a_file_that_lets_nothing_be_started_is_no_autoscaler(config: dict[str, object]) -> None:
    assert may_start(config) == NoAutoscaler()


def test_the_most_nodes_are_those_that_are_there_and_the_largest_that_may_come_beside_them() -> None:
    scaler = may_start(ON_AWS)
    assert isinstance(scaler, MayStart)
    there = Node("10.0.0.7", 48, 4, "L4")
    assert [node.name for node in at_most([HEAD], scaler)] == ["head", "gpu", "gpu", "gpu", "cpu"]
    assert [node.name for node in at_most([HEAD, there], scaler)] == ["head", "10.0.0.7", "gpu", "gpu", "cpu"]
    own = [HEAD, *[Node(f"own-{number}", 2, 1, "T4") for number in range(5)]]
    assert at_most(own, scaler) == own, "who has more nodes than the autoscaler would start has these"


def test_gpus_that_may_come_are_what_the_study_runs_on_and_cpus_that_are_there_hold_no_lane_of_it() -> None:
    scaler, there = may_start(ON_AWS), [replace(HEAD, num_cpus=16)]
    assert isinstance(scaler, MayStart)
    choice = chosen_nodes(at_most(there, scaler))
    assert (choice.on_gpus, choice.kind) == (True, "L4")
    assert lanes_held(there, choice, shape()) == 0
    assert lanes_held([*there, Node("new", 48, 4, "L4")], choice, shape()) == 4
    assert lanes_held([*there, Node("new", 48, 4, "T4")], choice, shape()) == 0, "of another kind"


@pytest.mark.parametrize(("strategy", "lanes"), [("pack", 4), ("spread", 4), ("strict_pack", 3)])
def test_nodes_hold_as_many_lanes_as_their_strategy_lets_them(strategy: str, lanes: int) -> None:
    nodes = [Node("a", 8, 3), Node("b", 8, 3), Node("c", 8, 2)]
    assert lanes_held(nodes, Choice(tuple(nodes)), shape(2, strategy=strategy)) == lanes


def test_a_lane_that_must_be_on_one_node_is_asked_for_as_one() -> None:
    assert bundles_of(2, shape(2)) == [{"CPU": 1.0, "GPU": 1.0}] * 4
    assert bundles_of(2, shape(2, strategy="strict_pack")) == [{"CPU": 2.0, "GPU": 2.0}] * 2
    assert bundles_of(1, shape(use_gpu=False)) == [{"CPU": 1.0}]
    assert bundles_of(0, shape()) == []


def test_nodes_are_asked_for_as_wholes() -> None:
    nodes = [Node("a", 48, 4, "L4"), Node("b", 8)]
    assert bundles_of_whole(nodes, shape()) == [{"CPU": 48.0, "GPU": 4.0}, {"CPU": 8.0, "GPU": 0.0}]
    assert bundles_of_whole(nodes, shape(use_gpu=False)) == [{"CPU": 48.0}, {"CPU": 8.0}]
