"""The provider of nodes on this machine that tests give to Ray's autoscaler."""

from __future__ import annotations

import functools
from typing import Any

import ray._private.parameter as parameter
from ray.autoscaler._private.fake_multi_node.node_provider import FakeMultiNodeProvider


class NodesWithFolders(FakeMultiNodeProvider):
    """Gives each node a folder of its own for the code that drivers ship, as a machine has: each node unpacks it anew, and would take it
    from under the processes of another."""

    def _create_node_with_resources_and_labels(
        self, node_config: Any, tags: Any, count: Any, resources: Any, labels: Any
    ) -> None:
        params = parameter.RayParams
        own = f"node-{self._next_node_id + 1}"
        parameter.RayParams = functools.partial(params, runtime_env_dir_name=own)  # pyright: ignore[reportAttributeAccessIssue]
        try:
            super()._create_node_with_resources_and_labels(node_config, tags, count, resources, labels)
        finally:
            parameter.RayParams = params
