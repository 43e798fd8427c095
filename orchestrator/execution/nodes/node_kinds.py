"""Which kind of device a study runs on where a cluster has several, and which nodes it then leaves idle. Pure.

Speed and memory that one kind of GPU measured hold for no other, so all lanes of a study have the same. A kind is what a
node announces as Ray's resource `accelerator_type:<kind>`: Ray does so by itself for GPUs that it knows.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from batchscout.orchestrator.execution.ray_private.cluster import ACCELERATOR, HEAD
from batchscout.orchestrator.units import counted
from batchscout.trainers.errors import first_of

ONE_KIND = "measurements of one kind of device are not valid for another"
# So many nodes are named where some are left idle.
MOST_NAMED = 4


@dataclass(frozen=True)
class Node:
    """A node of the cluster, and what it announces."""

    name: str
    num_cpus: int
    num_gpus: int = 0
    kind: str | None = None
    """None: it announces none."""
    id: str = ""
    """The cluster's own name for it."""
    is_there: bool = True
    """False: an autoscaler may start it, and its name is that of its type."""
    is_head: bool = False

    @property
    def is_of_any_kind(self) -> bool:
        """True if an autoscaler may start it and its file does not say of which kind it will be: Ray fills that in on AWS alone."""
        return self.kind is None and not self.is_there


@dataclass(frozen=True)
class Choice:
    """The nodes that lanes may run on, and those that have room and are left idle."""

    nodes: tuple[Node, ...]
    idle: tuple[Node, ...] = ()
    kind: str | None = None
    """What the former have; None where no node announces a kind."""
    is_named: bool = False
    """True if the study file names the kind: nodes that join later may have another."""

    @property
    def nodes_there(self) -> tuple[Node, ...]:
        """Those of the former that have been started."""
        return tuple(node for node in self.nodes if node.is_there)

    @property
    def on_gpus(self) -> bool:
        return any(node.num_gpus for node in self.nodes)

    @property
    def demanded(self) -> str | None:
        """The kind that lanes must ask Ray for. Where there is no choice they ask for none, and neither do they where an autoscaler
        does not know what the nodes that it could start will announce: it would start none."""
        return self.kind if (self.idle or self.is_named) and not self._takes_any_kind else None

    @property
    def _takes_any_kind(self) -> bool:
        return any(node.is_of_any_kind for node in self.nodes)

    def refuse_another_kind(self, there: Iterable[Node]) -> None:
        """Raise ValueError where an autoscaler that did not say of which kind its nodes are has started none of this study's."""
        with_room = [node for node in there if _devices(node, on_gpus=self.on_gpus)]
        if self._takes_any_kind and self.kind and with_room and not any(map(self.takes, with_room)):
            has = " and ".join(sorted({_type(node.kind or "") for node in with_room}))
            raise ValueError(
                f"the study runs on devices of type {self.kind}, and what the cluster has is {has}: {ONE_KIND}; "
                f'say of which kind each type of the autoscaler\'s file is (resources: {{"{ACCELERATOR}{self.kind}": 1}}), have it start '
                f"{self.kind}, or start another study on these, with another --dir"
            )

    def said(self) -> str:
        """Return for people which nodes are left idle and why; empty if none are."""
        now = [node for node in self.idle if node.is_there]
        if not now:
            return ""
        kinds = sorted({node.kind or "" for node in now})
        told = [(kind, [node for node in now if (node.kind or "") == kind]) for kind in kinds]
        idle = " and ".join(f"{_told(nodes)} {_type(kind)} ({names_of(nodes)})" for kind, nodes in told)
        return (
            f"the study runs on the {_told(self.nodes)} of type {self.kind} alone, and leaves {idle} idle: {ONE_KIND}. "
            "To use those instead, give a study of its own placement: {device: ...}"
        )

    def takes(self, node: Node) -> bool:
        """True if lanes may run on a node that has joined since."""
        has_devices = _devices(node, on_gpus=self.on_gpus) > 0
        has_kind = node.kind == self.kind or (node.is_of_any_kind and self._takes_any_kind)
        return has_devices and (self.kind is None or has_kind)


def nodes_of(described: Iterable[Mapping[str, Any]]) -> list[Node]:
    """Return the nodes that live, from what `ray.nodes` tells of all."""
    return [
        Node(
            one["NodeManagerHostname"],
            int(one["Resources"].get("CPU", 0)),
            int(one["Resources"].get("GPU", 0)),
            kind_in(one["Resources"]),
            id=one["NodeID"],
            is_head=HEAD in one["Resources"],
        )
        for one in described
        if one["Alive"]
    ]


def kind_in(resources: Iterable[str]) -> str | None:
    """Return the kind of device that a node with these resources announces; None if it announces none."""
    return next((name.removeprefix(ACCELERATOR) for name in resources if name.startswith(ACCELERATOR)), None)


def chosen_nodes(nodes: Sequence[Node], named: str | None = None, measured_on: str | None = None) -> Choice:
    """Return the nodes of one kind: that which the study file names, or on which the study has measured, or else the one of
    which there is the most. Raises ValueError where no node has it.

    Nodes that may yet be started, of a kind that their file does not say, count as of that kind where it is the only one there, and
    the file says of no type which it has.
    """
    on_gpus = any(node.num_gpus for node in nodes)
    with_room = [node for node in nodes if _devices(node, on_gpus=on_gpus)]
    there = Counter[str]()
    for node in with_room:
        if node.kind is not None:
            there[node.kind] += _devices(node, on_gpus=on_gpus)
    wanted = named or measured_on
    may_be_any = bool(with_room) and all(node.is_of_any_kind for node in with_room)
    if wanted is not None and wanted not in there and not may_be_any:
        raise ValueError(_not_there(wanted, there) if named else _other_than_measured(wanted, there))
    kind = wanted or min(there, key=lambda one: (-there[one], one), default=None)
    if kind is None:
        return Choice(tuple(with_room))
    is_the_only_one = all(node.is_of_any_kind or (node.kind == kind and node.is_there) for node in with_room)
    ours = tuple(node for node in with_room if node.kind == kind or (node.is_of_any_kind and is_the_only_one))
    return Choice(ours, tuple(node for node in with_room if node not in ours), kind, is_named=named is not None)


def _devices(node: Node, *, on_gpus: bool) -> int:
    return node.num_gpus if on_gpus else node.num_cpus


def _not_there(named: str, there: Counter[str]) -> str:
    if not there:
        return (
            f"placement.device is {named}, and no node of the cluster announces which kind it has; leave placement.device out, or "
            f"start Ray there with --resources='{{\"{ACCELERATOR}{named}\": 1}}'"
        )
    return (
        f"placement.device is {named}, and the cluster has {_kinds(there)}; name one of these, leave placement.device out, or add "
        f"a node with {named}"
    )


def _other_than_measured(measured_on: str, there: Counter[str]) -> str:
    has = _kinds(there) if there else "none that it announces"
    return (
        f"this study has measured on devices of type {measured_on}, and the cluster has {has}: {ONE_KIND}; "
        f"add a node with {measured_on}, or begin another study here with --dir"
    )


def _kinds(there: Counter[str]) -> str:
    return " and ".join(f"{number} of type {kind}" for kind, number in sorted(there.items()))


def _type(kind: str) -> str:
    return f"of type {kind}" if kind else "of a type that is not announced"


def _told(nodes: Sequence[Node]) -> str:
    gpus = sum(node.num_gpus for node in nodes)
    return counted(gpus, "GPU") if gpus else counted(sum(node.num_cpus for node in nodes), "CPU")


def names_of(nodes: Sequence[Node]) -> str:
    """Return the names of these nodes for people, the first few of many."""
    return first_of(sorted({node.name for node in nodes}), MOST_NAMED)
