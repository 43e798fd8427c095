"""Whether the nodes that run trials see the run directory. A trial may be paused on one node and go on from its checkpoint on
another, so on several nodes the directory must be on storage that all of them see, or in an object store that all may use."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import ray
from ray.exceptions import RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from batchscout.orchestrator.execution.nodes.node_kinds import Node, names_of
from batchscout.orchestrator.study.storage.marker import Marker, RunMarker, StoreMarker, is_seen, mark
from batchscout.orchestrator.study.storage.place import ObjectStore
from batchscout.orchestrator.units import counted
from batchscout.trainers.files import own_file, quoted

# How long a node has to answer: it may first have to start a process, with the code that the study ships.
SECONDS_TO_ANSWER = 60.0


def shared_marker(
    folder: Path, nodes: Sequence[Node], say: Callable[[str], None], *, others_may_come: bool
) -> Marker | None:
    """Return a marker that all these nodes see, by which those that join later are told apart; None where there is one node alone, which is
    another than the driver's and does not see it. nodes: those that are there. others_may_come: an autoscaler may start others, or replace this
    one. Raises ValueError where some of several nodes do not see it."""
    marker = mark(folder)
    here = ray.get_runtime_context().get_node_id()
    if not nodes or [node.id for node in nodes] == [here]:
        return marker
    blind = _blind(marker, nodes, say)
    if blind and (len(nodes) > 1 or others_may_come):
        with own_file(folder, "removed"):
            Path(marker.path).unlink(missing_ok=True)
        raise ValueError(unshared(folder.parent, blind, len(nodes), others_may_come=others_may_come))
    return None if blind else marker


def store_marker(store: ObjectStore, nodes: Sequence[Node], say: Callable[[str], None]) -> StoreMarker:
    """Return what a node sees that may read in the store; arguments as of `shared_marker`. Raises ValueError where some may not."""
    marker = StoreMarker(store)
    if blind := _blind(marker, nodes, say):
        do = "does" if len(blind) == 1 else "do"
        raise ValueError(
            f"{len(blind)} of {counted(len(nodes), 'node')} that trials may run on {do} not reach {quoted(str(store))} ({names_of(blind)}), where "
            "their checkpoints go; give every node the credentials and the network that the driver has: a role of the machine, "
            "~/.aws, or AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY set where its `ray start` runs"
        )
    return marker


def _blind(marker: RunMarker, nodes: Sequence[Node], say: Callable[[str], None]) -> list[Node]:
    """Return which of the nodes say that they do not see it."""
    sees = _asked(marker, nodes)
    if silent := [node for node in nodes if node.id not in sees]:
        say(f"{names_of(silent)} did not say in time whether it sees the run directory; its ranks will be asked again")
    return [node for node in nodes if not sees.get(node.id, True)]


def _asked(marker: RunMarker, nodes: Sequence[Node]) -> Mapping[str, bool]:
    """Return by their ids which nodes see the marker, as far as they answer in time."""
    look = ray.remote(num_cpus=0, max_retries=0)(is_seen)
    answers = {
        look.options(scheduling_strategy=NodeAffinitySchedulingStrategy(node.id, soft=False)).remote(marker): node.id
        for node in nodes
    }
    come, late = ray.wait(list(answers), num_returns=len(answers), timeout=SECONDS_TO_ANSWER)
    for answer in late:
        ray.cancel(answer, force=True)
    return {answers[answer]: sees for answer in come if (sees := _answer(answer)) is not None}


def _answer(answer: ray.ObjectRef) -> bool | None:
    """Return the answer; None where the node was lost before it gave one."""
    try:
        return ray.get(answer)
    except RayError:
        return None


def unshared(run_dir: Path, blind: Sequence[Node], num_nodes: int, *, others_may_come: bool) -> str:
    """Return for people that some of the nodes do not see the run directory, and what to do."""
    do = "does" if len(blind) == 1 else "do"
    alone = "" if others_may_come else ", name with placement.device a kind that one node alone has"
    return (
        f"{len(blind)} of {counted(num_nodes, 'node')} that trials may run on {do} not see the run directory {quoted(run_dir)} "
        f"({names_of(blind)}): a trial that is paused on one could not go on on another. Give with --dir a directory on storage that all "
        f"nodes see (NFS, EFS, Lustre){alone}, or leave --address out to use this machine alone"
    )
