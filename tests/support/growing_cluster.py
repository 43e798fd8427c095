"""A cluster on this machine whose nodes Ray's own autoscaler starts and ends, by a provider of Ray's that starts nodes here."""

from __future__ import annotations

import contextlib
import json
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ray.autoscaler.v2.sdk import get_cluster_status, request_cluster_resources

from tests.support.ports import free_ports
from tests.support.processes import descendants, kill, read, servers_among, without_rays_settings

CLONE = Path(__file__).parents[2]
SECONDS_TO_START = 120
HEAD_ID = f"{'f' * 51}00000"
"""The name that the provider gives the head."""


@dataclass(frozen=True)
class GrowingCluster:
    """A head without CPUs, and at most so many workers with one CPU each."""

    address: str
    head: subprocess.Popen[bytes]
    folder: Path

    def workers(self) -> list[int]:
        """The raylets of the workers that live, the oldest first."""
        return [pid for pid in servers_among(descendants(self.head.pid), "raylet") if not _is_the_heads(pid)]

    def num_asked_for(self) -> int:
        """For how many nodes a driver has asked."""
        asked = get_cluster_status(self.address).resource_demands.cluster_constraint_demand
        return sum(bundles.count for demand in asked for bundles in demand.bundles_by_count)

    def ask_for_nothing(self) -> None:
        request_cluster_resources(self.address, [])

    def said_by_autoscaler(self) -> str:
        """Return the end of its log, without what it says of the file that it reads every second."""
        lines = read(self.folder / "ray" / "session_latest" / "logs" / "monitor.log").splitlines()
        return "\n".join([line for line in lines if "legacy field" not in line][-200:])

    def kill(self, worker: int) -> None:
        """End a worker as a cloud does that takes a machine back without a word: its processes, and those that they have started."""
        kill(worker, *descendants(worker))


def _is_the_heads(raylet: int) -> bool:
    return "--head" in read(Path(f"/proc/{raylet}/cmdline")).split("\0")


def config_of(num_workers: int, address: str, idle_seconds: float) -> dict[str, Any]:
    provider = {
        "type": "external",
        "module": "tests.support.fake_nodes.NodesWithFolders",
        "gcs_address": address,
        "head_node_id": HEAD_ID,
        "launch_multiple": True,
        "disable_node_updaters": True,
        "disable_launch_config_check": True,
    }
    return {
        "cluster_name": "growing",
        "provider": provider,
        "auth": {},
        "max_workers": num_workers,
        "idle_timeout_minutes": idle_seconds / 60,
        "upscaling_speed": 10.0,
        "head_node_type": "ray.head.default",
        "available_node_types": {
            "ray.head.default": {"resources": {"CPU": 0}, "node_config": {}, "min_workers": 0, "max_workers": 0},
            "worker": {
                "resources": {"CPU": 1, "object_store_memory": 100 * 2**20},
                "node_config": {},
                "min_workers": 0,
                "max_workers": num_workers,
            },
        },
        "file_mounts": {},
        "cluster_synced_files": [],
        "file_mounts_sync_continuously": False,
        "rsync_exclude": [],
        "rsync_filter": [],
        "initialization_commands": [],
        "setup_commands": [],
        "head_setup_commands": [],
        "worker_setup_commands": [],
        "head_start_ray_commands": [],
        "worker_start_ray_commands": [],
    }


@contextlib.contextmanager
def growing_cluster(num_workers: int, idle_seconds: float = 5.0) -> Iterator[GrowingCluster]:
    """Start the head; no worker is there until one is asked for. A worker without work ends after so long."""
    with tempfile.TemporaryDirectory(prefix="bs-", dir="/tmp") as name:
        folder, (gcs,) = Path(name), free_ports(1)
        file = folder / "cluster.json"
        file.write_text(json.dumps(config_of(num_workers, f"127.0.0.1:{gcs}", idle_seconds)))
        with _head(folder, "--num-cpus=0", f"--autoscaling-config={file}", gcs=gcs) as (address, head):
            yield GrowingCluster(address, head, folder)


@contextlib.contextmanager
def _head(folder: Path, *words: str, gcs: int | None = None) -> Iterator[tuple[str, subprocess.Popen[bytes]]]:
    one, client = free_ports(2)
    head = _start(folder, gcs or one, client, *words)
    try:
        yield _address_of(head, folder, gcs or one), head
    finally:
        kill(*descendants(head.pid), head.pid)
        head.wait()


@contextlib.contextmanager
def head_in_kuberay(num_cpus: int) -> Iterator[str]:
    """Start a head as KubeRay does where its autoscaler runs in a container beside it; return the address."""
    with tempfile.TemporaryDirectory(prefix="bs-", dir="/tmp") as name, _head(Path(name), f"--num-cpus={num_cpus}", "--no-monitor") as (address, _):  # fmt: skip
        yield address


def _start(folder: Path, gcs: int, client: int, *more: str) -> subprocess.Popen[bytes]:
    words = [
        *("--head", f"--port={gcs}", "--node-ip-address=127.0.0.1", f"--ray-client-server-port={client}"),
        *("--include-dashboard=false", "--object-store-memory=104857600", f"--temp-dir={folder / 'ray'}", "--block"),
        *more,
    ]
    own = without_rays_settings()
    kuberay = {"RAY_USAGE_STATS_KUBERAY_IN_USE": "1"} if "--no-monitor" in more else {}
    environment = (
        own
        | kuberay
        | {
            "RAY_FAKE_CLUSTER": "1",
            "RAY_enable_autoscaler_v2": "1",  # as `ray up` starts a head
            "RAY_CLOUD_INSTANCE_ID": HEAD_ID,
            "RAY_NODE_TYPE_NAME": "ray.head.default",
            "AUTOSCALER_UPDATE_INTERVAL_S": "1",
            "RAY_worker_niceness": "0",
            "RAY_AUTH_MODE": "disabled",  # whoever runs a local study meanwhile may write another token to ~/.ray
            "PYTHONPATH": str(CLONE),
            "PATH": f"{Path(sys.executable).parent}:{own['PATH']}",
        }
    )
    with (folder / "head.log").open("wb") as log:
        return subprocess.Popen(["ray", "start", *words], env=environment, stdout=log, stderr=subprocess.STDOUT)


def _address_of(head: subprocess.Popen[bytes], folder: Path, gcs: int) -> str:
    deadline = time.monotonic() + SECONDS_TO_START
    while "will now block" not in (said := read(folder / "head.log")):
        assert head.poll() is None, said
        assert time.monotonic() < deadline, said
        time.sleep(0.1)
    return re.findall(rf"[0-9.]+:{gcs}", said)[0]
