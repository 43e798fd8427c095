"""Which nodes a study uses where they have several kinds of devices, without Ray."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest

from batchscout.orchestrator.execution.nodes.node_kinds import Node, chosen_nodes, nodes_of

HEAD = Node("head", 4)
BIG, SMALL = Node("node-a", 16, 8, "H100"), Node("node-b", 8, 4, "T4")


def test_what_ray_tells_of_a_node_is_read_and_a_dead_one_left_out() -> None:
    has = {"CPU": 16.0, "GPU": 8.0, "accelerator_type:H100": 1.0, "node:10.0.0.1": 1.0}
    alive = {"Alive": True, "NodeManagerHostname": "node-a", "NodeID": "f00", "Resources": has}
    assert nodes_of([alive, alive | {"Alive": False, "Resources": {}}]) == [replace(BIG, id="f00")]


def test_a_cluster_of_one_kind_is_used_whole_and_nobody_has_to_name_it() -> None:
    choice = chosen_nodes([HEAD, BIG, BIG])
    assert (choice.nodes, choice.idle, choice.kind, choice.demanded, choice.said()) == (
        (BIG, BIG),
        (),
        "H100",
        None,
        "",
    )


def test_nodes_that_announce_nothing_are_used_as_they_are() -> None:
    assert chosen_nodes([HEAD]).nodes == (HEAD,)
    assert chosen_nodes([HEAD, Node("node-a", 16, 8)]).nodes == (Node("node-a", 16, 8),)


def test_the_kind_of_which_there_is_the_most_is_used_and_the_rest_named_as_idle() -> None:
    unknown = Node("node-c", 8, 1)
    choice = chosen_nodes([HEAD, SMALL, BIG, unknown])
    assert (choice.nodes, choice.idle, choice.demanded) == ((BIG,), (SMALL, unknown), "H100")
    assert choice.said() == (
        "the study runs on the 8 GPUs of type H100 alone, and leaves 1 GPU of a type that is not announced (node-c) and 4 GPUs of "
        "type T4 (node-b) idle: measurements of one kind of device are not valid for another. To use those instead, give a study of its "
        "own placement: {device: ...}"
    )


def test_many_idle_nodes_are_not_all_named() -> None:
    small = [Node(f"node-{number}", 1, 1, "T4") for number in range(6)]
    assert "6 GPUs of type T4 (node-0, node-1, node-2, node-3 and 2 more) idle" in chosen_nodes([BIG, *small]).said()


def test_the_kind_that_the_study_file_names_is_used_though_there_is_less_of_it() -> None:
    assert chosen_nodes([BIG, SMALL], named="T4").nodes == (SMALL,)
    assert chosen_nodes([SMALL], named="T4").demanded == "T4", "a node that joins later may have another"


def test_a_study_goes_on_with_the_kind_that_it_has_measured_on() -> None:
    assert chosen_nodes([BIG, SMALL], measured_on="T4").nodes == (SMALL,)


# An autoscaler's types, whose file names a kind on AWS alone

TO_COME = Node("gpu_worker", 8, 1, is_there=False)
STARTED = Node("node-d", 8, 1, "T4")


def test_a_node_to_come_of_a_kind_that_nobody_knows_counts_with_those_of_the_only_one_there_is() -> None:
    choice = chosen_nodes([HEAD, STARTED, TO_COME, TO_COME])
    assert (choice.nodes, choice.idle, choice.kind) == ((STARTED, TO_COME, TO_COME), (), "T4")
    assert choice.takes(TO_COME)
    assert choice.takes(STARTED)
    assert not choice.takes(BIG)
    assert choice.demanded is None, "the autoscaler would start nothing for a kind that its file does not name"


@pytest.mark.parametrize(("named", "measured_on"), [("T4", None), (None, "T4")])
def test_a_study_of_one_kind_goes_on_where_all_of_its_nodes_are_yet_to_be_started(
    named: str | None, measured_on: str | None
) -> None:
    choice = chosen_nodes([HEAD, TO_COME, TO_COME], named, measured_on)
    assert (choice.nodes, choice.kind, choice.demanded) == ((TO_COME, TO_COME), "T4", None)
    assert choice.takes(STARTED)


def test_a_study_does_not_wait_beside_a_node_of_another_kind_that_was_started_for_it() -> None:
    choice = chosen_nodes([HEAD, TO_COME, TO_COME], measured_on="T4")
    choice.refuse_another_kind([HEAD])
    choice.refuse_another_kind([HEAD, STARTED, BIG])
    said = (
        "the study runs on devices of type T4, and what the cluster has is of type H100: measurements of one kind of device are not valid for another; say of "
        'which kind each type of the autoscaler\'s file is (resources: {"accelerator_type:T4": 1}), have it start T4, or start another study on these'
    )
    with pytest.raises(ValueError, match=re.escape(said)):
        choice.refuse_another_kind([HEAD, BIG])
    chosen_nodes([STARTED], named="T4").refuse_another_kind([BIG])
    chosen_nodes([HEAD, TO_COME]).refuse_another_kind([BIG])


def test_where_other_kinds_are_there_nobody_counts_on_nodes_to_come_of_which_nothing_is_known() -> None:
    choice = chosen_nodes([BIG, STARTED, TO_COME])
    assert (choice.nodes, choice.idle, choice.demanded) == ((BIG,), (STARTED, TO_COME), "H100")
    assert not choice.takes(TO_COME)
    with pytest.raises(ValueError, match="has measured on devices of type T4, and the cluster has 8 of type H100"):
        chosen_nodes([BIG, TO_COME], measured_on="T4")


def test_a_type_that_does_say_its_kind_is_used_for_that_alone() -> None:
    other = Node("l4_worker", 8, 1, "L4", is_there=False)
    assert chosen_nodes([STARTED, other], measured_on="T4").nodes == (STARTED,)
    assert chosen_nodes([other, TO_COME], named="L4").demanded == "L4"


@pytest.mark.parametrize(
    ("nodes", "named", "measured_on", "said"),
    [
        (
            [BIG, SMALL],
            "A100",
            None,
            "placement.device is A100, and the cluster has 8 of type H100 and 4 of type T4; name one of these, leave "
            "placement.device out, or add a node with A100",
        ),
        (
            [HEAD],
            "A100",
            None,
            "placement.device is A100, and no node of the cluster announces which kind it has; leave placement.device out, or start "
            "Ray there with --resources='{\"accelerator_type:A100\": 1}'",
        ),
        (
            [BIG],
            None,
            "T4",
            "this study has measured on devices of type T4, and the cluster has 8 of type H100: measurements of one kind of device are "
            "not valid for another; add a node with T4, or begin another study here with --dir",
        ),
    ],
)
def test_a_kind_that_is_not_there_is_refused_with_what_is(
    nodes: list[Node], named: str | None, measured_on: str | None, said: str
) -> None:
    with pytest.raises(ValueError, match=re.escape(said)):
        chosen_nodes(nodes, named, measured_on)
