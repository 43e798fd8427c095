"""A run directory that not all nodes see is refused before anything starts, and a node that joins later without it runs nothing."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest

from batchscout.orchestrator.execution.dispatcher import Dispatcher
from batchscout.orchestrator.execution.nodes import shared_storage
from batchscout.orchestrator.execution.nodes.node_kinds import Node
from batchscout.orchestrator.execution.nodes.shared_storage import shared_marker, unshared
from batchscout.orchestrator.study.messages import Assignment, Host
from batchscout.orchestrator.study.storage.marker import Marker, is_seen, mark
from tests.faults.driver import Driver
from tests.support.blind_node import blind_node, why_there_is_no_blind_node
from tests.support.nodes import cluster_of
from tests.support.processes import of_a_driver_on, python, until
from tests.support.studies import TINY, grid

NODES = [Node(f"node-{letter}", 8, id=letter) for letter in "abcdefg"]


def test_the_refusal_names_the_nodes_their_number_the_path_and_what_to_do() -> None:
    assert unshared(Path("/home/me/runs/one two"), NODES[1:2], 3, others_may_come=False) == (
        "1 of 3 nodes that trials may run on does not see the run directory '/home/me/runs/one two' (node-b): a trial that is paused on "
        "one could not go on on another. Give with --dir a directory on storage that all nodes see (NFS, EFS, Lustre), name with "
        "placement.device a kind that one node alone has, or leave --address out to use this machine alone"
    )
    assert "6 of 7 nodes that trials may run on do not see" in unshared(Path("/r"), NODES[1:], 7, others_may_come=False)
    assert "(node-b, node-c, node-d, node-e and 2 more)" in unshared(Path("/r"), NODES[1:], 7, others_may_come=False)
    assert "(NFS, EFS, Lustre), or leave" in unshared(Path("/r"), NODES[:1], 1, others_may_come=True), (
        "of a kind no node stays alone"
    )


def test_a_marker_is_seen_by_its_word_alone(tmp_path: Path) -> None:
    """A directory of the same name elsewhere may hold an older driver's."""
    marker = mark(tmp_path / "runs" / ".ray")
    assert is_seen(marker, seconds=0)
    assert not is_seen(Marker(marker.path, "another word"), seconds=0)
    assert not is_seen(Marker(str(tmp_path / "absent" / "seen_by_all"), marker.word), seconds=0)
    assert mark(tmp_path / "runs" / ".ray") != marker
    assert not is_seen(marker, seconds=0), "each driver has its own"


@pytest.fixture
def far_and_blind(monkeypatch: pytest.MonkeyPatch) -> None:
    """No node is the driver's, and none sees its run directory."""
    monkeypatch.setattr(shared_storage, "_blind", lambda _, nodes, __: list(nodes))
    monkeypatch.setattr("ray.get_runtime_context", lambda: SimpleNamespace(get_node_id=lambda: "the driver's"))


@pytest.mark.usefixtures("far_and_blind")
def test_a_lone_node_without_the_run_directory_runs_a_study_where_no_other_can_come(tmp_path: Path) -> None:
    assert shared_marker(tmp_path / ".ray", NODES[:1], print, others_may_come=False) is None


@pytest.mark.usefixtures("far_and_blind")
def test_where_another_can_come_it_is_refused_and_nothing_is_left_of_the_question(tmp_path: Path) -> None:
    """Those that an autoscaler starts later would see it no more than this one."""
    with pytest.raises(ValueError, match="1 of 1 node that trials may run on does not see the run directory"):
        shared_marker(tmp_path / ".ray", NODES[:1], print, others_may_come=True)
    assert list((tmp_path / ".ray").glob("*")) == []


async def test_a_lane_on_a_node_that_joined_without_the_run_directory_runs_nothing_and_says_why() -> None:
    dispatcher = Dispatcher(num_lanes=2)
    await dispatcher.introduce("lane", Host("old", "cpu", 0))
    await dispatcher.introduce("other", Host("new", "cpu", 0, sees_run_directory=False))
    await dispatcher.assign(Assignment("a", "{}", "directory", "token", key="a"))
    assert await dispatcher.take("other", "its group", 1) is None
    assert await dispatcher.given_up() == [
        "its rank 0 runs on new, which does not see the run directory: mount there the storage that the other nodes see, or take "
        "the node out of the cluster"
    ]
    taken = await dispatcher.take("lane", "group", 1)
    assert taken is not None
    assert taken.trial_id == "a"


@pytest.mark.cluster
@pytest.mark.timeout(400)
def test_a_run_directory_that_one_node_does_not_see_is_refused_before_anything_starts(tmp_path: Path) -> None:
    if why := why_there_is_no_blind_node():
        pytest.skip(why)
    hidden = tmp_path / "run"
    hidden.mkdir()
    study = TINY | {"name": "hidden", "sample_budget": 64, "stages": grid(learning_rate=[1e-3])}
    with cluster_of([{"num_cpus": 1}]) as address:
        driver = Driver(tmp_path, study, address)
        with blind_node(address, hidden):
            driver.start()
            code, said = driver.end()
            assert code == 2, said
            assert "1 of 2 nodes that trials may run on does not see the run directory" in " ".join(said.split())
            assert str(hidden) in said
            assert "Traceback" not in said
            assert driver.study().trials == {}
        until(lambda: lives_alone(address), "the blind node is gone", 60)
        driver.start()
        code, said = driver.end()
        assert code == 0, said


def lives_alone(address: str) -> bool:
    """True once the cluster has its head and one node."""
    ask = f"import ray; ray.init({address!r}, logging_level=40); print(sum(node['Alive'] for node in ray.nodes()))"
    done = python("-c", ask, cwd=None, **of_a_driver_on(address))
    return done.stdout.split()[-1:] == ["2"]
