"""How a connection to Ray begins and ends, and what it is made of."""

from __future__ import annotations

import contextlib
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import grpc
import ray
import ray._private.utils as ray_utils
import ray._private.worker as ray_worker
from ray._common.usage import usage_lib
from ray._private import ray_constants, services
from ray._private.authentication.authentication_token_setup import maybe_enable_token_auth_if_token_available
from ray._private.grpc_utils import init_grpc_channel
from ray._private.state import state
from ray._raylet import GcsClient  # pyright: ignore[reportAttributeAccessIssue]
from ray.core.generated.gcs_service_pb2 import GetClusterIdRequest  # pyright: ignore[reportAttributeAccessIssue]
from ray.core.generated.gcs_service_pb2_grpc import NodeInfoGcsServiceStub
from ray.exceptions import AuthenticationError

from batchscout.orchestrator import signals
from batchscout.trainers.having import having

SECONDS_TO_CONNECT, SECONDS_TO_ANSWER = 5, 15
"""How long --address has to accept a connection, and to answer: a cluster may be busy."""


@dataclass(frozen=True)
class Versions:
    ray: str
    python: str

    def __str__(self) -> str:
        return f"Ray {self.ray} with Python {self.python}"


def address_of_auto() -> str:
    """Return host:port of the cluster that Ray takes for `auto`: what RAY_ADDRESS names, or what runs or ran last on this node. Raises
    ConnectionError where there is none, and ValueError where RAY_ADDRESS is nothing of the kind. From here on a token of this user's
    (~/.ray/auth_token) is shown where RAY_AUTH_MODE says nothing, as ray.init does where it finds a cluster itself."""
    maybe_enable_token_auth_if_token_available(warn_if_disabled=False)
    found = services.canonicalize_bootstrap_address("auto")
    if found is None:
        raise ValueError("RAY_ADDRESS is local, which names no cluster")
    return found


def answer_at(address: str) -> Literal["Ray", "Ray that wants a token", "no Ray"]:
    """Return who answers at host:port.

    ray.init asks again for 20 s to minutes, prints a line each time, and then says that it found no cluster.
    """
    try:
        with contextlib.closing(init_grpc_channel(address)) as channel:
            NodeInfoGcsServiceStub(channel).GetClusterId(GetClusterIdRequest(), timeout=SECONDS_TO_ANSWER)
    except AuthenticationError:  # a token is to be shown, and there is none
        return "Ray that wants a token"
    except grpc.RpcError as error:
        wants_token = isinstance(error, grpc.Call) and error.code() is grpc.StatusCode.UNAUTHENTICATED
        return "Ray that wants a token" if wants_token else "no Ray"
    return "Ray"


def other_versions_at(address: str) -> tuple[Versions, Versions] | None:
    """Return the versions of the cluster and of this process where Ray would join the two by no means; None where it would."""
    told = usage_lib.get_cluster_metadata(GcsClient(address=address))
    try:
        ray_utils.check_version_info(told, "this process")
    except RuntimeError:
        ours, python = ray_utils.compute_version_info()
        return Versions(told["ray_version"], told["python_version"]), Versions(ours, python)
    return None


def sigterm_left_alone() -> contextlib.AbstractContextManager[None]:
    """Keep ray.init from taking SIGTERM for itself: it would end this process at once, with exit code 15."""
    return having(ray_utils, "set_sigterm_handler", lambda handler: None)


def shut_down() -> None:
    """Call ray.shutdown, and go on hearing SIGTERM.

    Ray's part in C++ has a handler of its own for it, and when it ends, half a second into the call, it leaves the signal's
    default action behind, whatever was there before: to end this process at once.
    """
    disconnect = state.disconnect  # the first thing that Ray does after that

    def hear_and_disconnect() -> None:
        signals.hear_again()
        disconnect()

    with having(state, "disconnect", hear_and_disconnect):
        ray.shutdown()


def loopback_only() -> contextlib.AbstractContextManager[None]:
    """Have ray.init start a cluster that listens on loopback alone.

    Ray does so on systems where it supports no cluster of several machines; an address of loopback that it is given, it
    replaces by one that others reach.
    """
    return having(ray_constants, "ENABLE_RAY_CLUSTER", False)


def num_cpus_by_default() -> int:
    """Return how many CPUs a cluster of this machine has that is not told."""
    return int(ray_utils.get_num_cpus())


def files_in(folder: Path) -> dict[str, str]:
    """Return the argument of ray.init for a cluster that keeps its files in this folder."""
    return {"_temp_dir": str(folder)}


def servers() -> dict[str, subprocess.Popen[bytes]]:
    """Return the two processes that the cluster which this one has started cannot do without, by their names."""
    node = ray_worker._global_node
    assert node is not None
    return {name: node.all_processes[name][0].process for name in ("gcs_server", "raylet")}


def raylet_socket() -> str:
    """Return where the raylet listens by which this process reaches its cluster."""
    node = ray_worker._global_node
    assert node is not None
    return node.raylet_socket_name


def uploading_nothing() -> contextlib.AbstractContextManager[None]:
    """Have ray.init start a local cluster without a runtime environment: its workers have this machine's files and this process's Python.

    Under `uv run`, in a job of another cluster, or with RAY_RUNTIME_ENV_HOOK, Ray would zip the current directory, refuse a large one or one
    without pyproject.toml, and start every worker through uv.
    """
    return having(ray_worker, "_maybe_modify_runtime_env", lambda environment, skips_hook: {})


def without_its_errors() -> contextlib.AbstractContextManager[None]:
    """Have ray.init print no errors of the local cluster that it starts: of a raylet that has died, twenty lines of its log. The
    study says itself what has died of what.

    Ray's thread that would print them dies with a traceback where the gcs ends while it subscribes: at a study that is stopped
    while Ray starts.
    """
    return having(ray_worker, "listen_error_messages", lambda worker, threads_stopped: None)
