"""A cluster of several nodes on this machine, for studies that are connected to it."""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import pytest


@contextlib.contextmanager
def cluster_of(nodes: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """Start a head without CPUs, and the nodes beside it, each as `add_node` of Ray's Cluster takes it; return the address. Ray keeps
    its files, and the address by which others find the cluster, in a folder of the cluster's own."""
    from ray.cluster_utils import Cluster

    with tempfile.TemporaryDirectory(prefix="bs-", dir="/tmp") as folder, pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_TMPDIR", folder)
        cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 0, "include_dashboard": False})
        try:
            for number, node in enumerate(nodes):
                cluster.add_node(runtime_env_dir_name=f"node-{number}", **node)
            assert cluster.address is not None
            yield cluster.address
        finally:
            cluster.shutdown()
