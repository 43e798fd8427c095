"""A study's connection to Ray: a cluster of its own or the user's, and the environment that its processes need."""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import socket
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NoReturn

import ray

from batchscout.orchestrator.config.keys import StudyConfig
from batchscout.orchestrator.environment import settings_to_suspect
from batchscout.orchestrator.execution.cluster_servers import Gcs, Raylet, loss_of
from batchscout.orchestrator.execution.code_shipping import absolute_paths, runtime_env
from batchscout.orchestrator.execution.local_cluster import (
    end_what_ray_started,
    ended,
    logs_told,
    own_token,
    private_folder,
    protect_local_cluster,
    watched,
)
from batchscout.orchestrator.execution.nodes.autoscaler import Autoscaler, MayStart, Unreadable
from batchscout.orchestrator.execution.nodes.node_kinds import ONE_KIND, Choice
from batchscout.orchestrator.execution.nodes.placement import LaneShape
from batchscout.orchestrator.execution.ray_private.connection import (
    SECONDS_TO_CONNECT,
    address_of_auto,
    answer_at,
    files_in,
    loopback_only,
    num_cpus_by_default,
    other_versions_at,
    raylet_socket,
    servers,
    shut_down,
    sigterm_left_alone,
    uploading_nothing,
    without_its_errors,
)
from batchscout.orchestrator.execution.ray_private.environment import (
    DRIVER_ENVIRONMENT,
    LANE_ENVIRONMENT,
    RANK_ENVIRONMENT,
)
from batchscout.orchestrator.execution.ray_private.tune import forward_no_keys
from batchscout.orchestrator.signals import interrupts_afterwards, left_if_stuck
from batchscout.orchestrator.study.messages import Device
from batchscout.orchestrator.units import counted
from batchscout.trainers.descendants import adopts_orphans, end_descendants
from batchscout.trainers.device.cgroup import usable_cpus
from batchscout.trainers.files import StorageLost

# How long a study waits for the cluster's first CPU, and for nodes that it was told to wait for.
SECONDS_FOR_A_NODE, SECONDS_FOR_ALL_NODES = 60, 900
# How long Ray's start may go on after it was told to stop: a signal to all processes of a study ends Ray's first.
SECONDS_TO_START = 10


# The ranks of a local study talk to each other over loopback; a choice of the user's own stands.
LOOPBACK_ENVIRONMENT = {"GLOO_SOCKET_IFNAME": os.environ.get("GLOO_SOCKET_IFNAME", "lo")}


@contextlib.contextmanager
def rays_of_users_ended(say: Callable[[str], None]) -> Iterator[None]:
    """End on leaving the Ray that a user's code has started meanwhile, as data of Ray's own do unasked: the study would run in it, and its ports
    and files are open to others. One that was there before is the caller's."""
    was_connected = ray.is_initialized()
    yield
    if ray.is_initialized() and not was_connected:
        say("ending the Ray that your code has started: the study has one of its own")
        shut_down()


@contextlib.contextmanager
def ray_cluster(
    config: StudyConfig, address: str | None, run_dir: Path, lost: Callable[[str], int], stopped: Callable[[], int]
) -> Iterator[None]:
    """Connect to Ray, and disconnect on leaving; a connection that the caller has already is used and left open.

    The process is ended in another thread, while the main one may wait for what never comes, if the cluster dies, or if Ray's start
    goes on after a signal has come. Each function says the last words of one of these, `lost` with what the cluster died
    of, and returns the exit code.
    """
    if ray.is_initialized():
        yield
        return

    def leave(exit_code: int) -> NoReturn:
        """End this process, once all is said: Ray would end it with words of its own, where it finds its servers ended."""
        end_what_ray_started()
        if adopts_orphans():
            end_descendants()
        os._exit(exit_code)

    def all_lost(what: str) -> NoReturn:
        leave(lost(what))

    try:
        # Ray waits for minutes for a gcs that was there a moment before.
        connecting = watched(Gcs(address).loss, all_lost) if address else contextlib.nullcontext()
        with left_if_stuck(SECONDS_TO_START, lambda: leave(stopped())), connecting:
            start_ray(config, address, run_dir)
        with watched(_look_at_cluster() if address else functools.partial(ended, servers()), all_lost):
            yield
    finally:
        shut_down()
        if address is None:
            end_what_ray_started()


def _look_at_cluster() -> Callable[[], str | None]:
    """Return what tells whether the cluster that this process is connected to has lost what it cannot do without."""
    return functools.partial(loss_of, Gcs(ray.get_runtime_context().gcs_address), Raylet(raylet_socket()))


def start_ray(config: StudyConfig, address: str | None, run_dir: Path, **options: Any) -> None:
    """Call ray.init as a study needs it: quiet, no dashboard of its own, and the environment that its workers need."""
    # Ray's own import sets the first, an earlier start in this process the second.
    of_before = {"RAY_CLIENT_MODE": "0", "RAY_AUTH_TOKEN": own_token()}
    ours = DRIVER_ENVIRONMENT | LANE_ENVIRONMENT | of_before
    of_the_user = {name: value for name, value in os.environ.items() if ours.get(name) != value}
    for name, value in DRIVER_ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    environment = runtime_env(address, run_dir, absolute_paths(config.data.kwargs))
    options = {"log_to_driver": False, "logging_level": logging.ERROR, **options}
    forward_no_keys()
    with interrupts_afterwards(), sigterm_left_alone():
        if address is None:
            _start_local_cluster(environment, options, settings_to_suspect(of_the_user))
        else:
            _connect(address, environment, options)


def _start_local_cluster(environment: dict[str, Any], options: dict[str, Any], suspects: str) -> None:
    protect_local_cluster()
    # Ray counts the machine's. More threads than cores make every speed that of threads that wait for each other.
    options.setdefault("num_cpus", min(num_cpus_by_default(), usable_cpus()))
    options |= files_in(private_folder())
    # The environment is inherited and not in the runtime_env, so that Ray can give the study processes that wait idle.
    with (
        environment_with(LOOPBACK_ENVIRONMENT | worker_environment()),
        loopback_only(),
        uploading_nothing(),
        without_its_errors(),
        _start_told(suspects),
    ):
        ray.init("local", runtime_env=environment, include_dashboard=False, **options)


@contextlib.contextmanager
def _start_told(suspects: str) -> Iterator[None]:
    """Say what it means that Ray gives up a start: after half a minute, which it cannot be told to lengthen; and what may be to blame where
    it raises something else. suspects: the user's settings that may be to blame, in words."""
    try:
        yield
    except Exception as error:
        if type(error) is not Exception:  # what Ray raises then has no class of its own
            if isinstance(error, (OSError, StorageLost)) or not suspects:
                raise
            said = " ".join(str(error).split())
            raise ValueError(
                f"Ray does not start on this machine ({type(error).__name__}: {said}); {suspects}"
            ) from error
        seen = [told for told in (suspects, logs_told()) if told]
        raise ValueError(
            f"Ray did not start on this machine: {str(error).splitlines()[0]} It gives up after half a minute, as it does where the machine is "
            f"busy or short of memory; {'; '.join([*seen, 'run the same command again when there is room'])}"
        ) from error


def _connect(address: str, environment: dict[str, Any], options: dict[str, Any]) -> None:
    try:
        ray.init(address, runtime_env=environment | {"env_vars": RANK_ENVIRONMENT}, **options)
    except (ConnectionError, RuntimeError) as error:
        said = " ".join(str(error).split())
        raise ValueError(
            f"the Ray cluster at {address} cannot be used from here: {said}; run on a node of the cluster with --address auto, or leave --address "
            "out to use this machine alone"
        ) from error


@contextlib.contextmanager
def environment_with(changes: dict[str, str]) -> Iterator[None]:
    """Change the environment that processes started meanwhile inherit."""
    before = {key: os.environ.get(key) for key in changes}
    os.environ.update(changes)
    try:
        yield
    finally:
        for key, value in before.items():
            if value is None:
                del os.environ[key]
            else:
                os.environ[key] = value


def worker_environment() -> dict[str, str]:
    """Return what every process of a local study inherits. Where trials run on GPUs, the lanes are given the rest."""
    from batchscout.trainers.device.device import on_cuda  # here, because torch comes with it

    return RANK_ENVIRONMENT if on_cuda() else _cpu_environment() | RANK_ENVIRONMENT


def lane_environment(shape: LaneShape, *, is_local: bool, deterministic: bool = False) -> dict[str, str]:
    """Return the environment that the processes of a lane are to be given, beside what they inherit."""
    if shape.use_gpu:
        from batchscout.trainers.device.determinism import CUBLAS_ENVIRONMENT

        exact = CUBLAS_ENVIRONMENT if deterministic else {}
        return allocator_environment(os.environ) | {"TORCHINDUCTOR_COMPILE_THREADS": str(shape.cpus_per_rank)} | exact
    return {} if is_local else _cpu_environment()


def _cpu_environment() -> dict[str, str]:
    """Return what makes a CPU host's memory honest. On a GPU it would only slow down how batches are put together."""
    from batchscout.trainers.device.memory import MALLOC_ENVIRONMENT

    # One compile thread: a pool of compiler processes would take memory that no limit counts.
    return {**MALLOC_ENVIRONMENT, "TORCHINDUCTOR_COMPILE_THREADS": "1"}


def allocator_environment(environ: Mapping[str, str]) -> dict[str, str]:
    """Return how torch's allocator is set up on a GPU: as the user has it, else so that it leaves no holes.

    Micro-batches of many sizes would otherwise fragment its memory, and one that fits run out of it.
    """
    names = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF")
    own = {name: environ[name] for name in names if name in environ}
    return own or {"PYTORCH_ALLOC_CONF": "expandable_segments:True"}


def wait_for_nodes(num_nodes: int, say: Callable[[str], None], seconds: float | None = None) -> None:
    """Wait until so many nodes have joined the cluster and it has a CPU: it has none while its only worker is being started or
    replaced. Raises ValueError where fewer nodes have joined in time than the study was told to wait for."""
    seconds = seconds if seconds is not None else (SECONDS_FOR_ALL_NODES if num_nodes > 1 else SECONDS_FOR_A_NODE)
    deadline, lacks = time.monotonic() + seconds, _lacking(num_nodes)
    if lacks:
        say(f"the cluster has {lacks}: waiting for a node (at most {seconds:g} s)")
    while lacks and time.monotonic() < deadline:
        time.sleep(0.5)
        lacks = _lacking(num_nodes)
    if lacks and num_nodes > 1:
        raise ValueError(
            f"the cluster has {lacks} after {seconds:g} s, and --min-nodes is {num_nodes}: see why the others have not joined (ray status, and what "
            "`ray start` said on them), or lower --min-nodes (in a job it is the number of its nodes)"
        )


def refuse_too_many_nodes(scaler: Autoscaler, choice: Choice, num_nodes: int, min_nodes: int) -> None:
    """Raise ValueError where a study would wait for ever: for more nodes than there are, with those of its kind that may yet be started."""
    may_come = sum(not node.is_there for node in choice.nodes)
    if isinstance(scaler, MayStart) and min_nodes > num_nodes + may_come:
        raise ValueError(
            f"--min-nodes is {min_nodes}, and the cluster can have {num_nodes + may_come}: {counted(num_nodes, 'node')} that "
            f"{'is' if num_nodes == 1 else 'are'} there, and {may_come} that the autoscaler may start for this study; lower --min-nodes, "
            "or raise max_workers in the autoscaler's file, that of the cluster and that of this type of node"
        )


def refuse_other_devices(
    choice: Choice, scaler: Autoscaler, num_nodes: int, min_nodes: int, measured_on: Device | None
) -> None:
    """Raise ValueError where the study has measured on CPUs and trials would run on GPUs, or the other way round, or where they would run
    on CPUs and an autoscaler of which nobody knows what it may start could bring GPUs."""
    if choice.on_gpus:
        if measured_on is not None and not measured_on.is_gpu:
            raise ValueError(
                f"this study has measured on CPUs ({measured_on}), and now there are GPUs: {ONE_KIND}; hide them (CUDA_VISIBLE_DEVICES= "
                "before the command; on a cluster, start Ray with --num-gpus=0), or begin another study on them with --dir"
            )
        return
    cpus = counted(sum(node.num_cpus for node in choice.nodes), "CPU")
    if measured_on is not None and measured_on.is_gpu:
        raise ValueError(
            f"this study has measured on {measured_on}, and the cluster has {cpus} and no GPU now: {ONE_KIND}; add nodes with "
            "GPUs and have the study wait for them (--min-nodes), or begin another study here with --dir"
        )
    if isinstance(scaler, Unreadable) and not 1 < min_nodes <= num_nodes:
        raise ValueError(
            f"the cluster has {cpus} and no GPU now, on {counted(num_nodes, 'node')}, and what KubeRay's autoscaler may start cannot be read from "
            "here; have it keep the nodes that the study is to run on (minReplicas), and give --min-nodes their number and one more "
            "for the head: the study then waits for them, and runs on CPUs if they have no GPU"
        )


def _lacking(num_nodes: int) -> str:
    """Return what the cluster has too little of, in words; nothing where it has enough."""
    there = sum(node["Alive"] for node in ray.nodes())
    if there < num_nodes:
        return f"{there} of {num_nodes} nodes"
    return "" if ray.cluster_resources().get("CPU") else "no CPUs"


def _host_and_port(address: str) -> tuple[str, int] | None:
    """Return these two; None for another form."""
    host, colon, port = address.rpartition(":")
    return (host.strip("[]"), int(port)) if colon and "/" not in host and port.isdigit() else None


class ClusterRefused(ValueError):
    """There is no cluster that a study could use."""

    def __init__(self, finding: str, remedy: str) -> None:
        super().__init__(f"{finding}; {remedy}")
        self.finding, self.remedy = finding, remedy


def reachable_address(typed: str) -> str:
    """Return host:port of the cluster that --address names. Raises ClusterRefused where nothing listens there, no Ray, one that wants a token,
    or one of another version: Ray itself would try for minutes."""
    address, named = _named_address(typed)
    where = _host_and_port(address)
    if where is None:
        raise ClusterRefused(
            f"{named} is not of the form host:port",
            "give the head's address (6379 is Ray's default port), run on a node of the cluster with "
            "--address auto, or leave --address out to use this machine alone"
            + ("; or unset RAY_ADDRESS" if typed == "auto" else ""),
        )
    try:
        socket.create_connection(where, timeout=SECONDS_TO_CONNECT).close()
    except OSError as error:
        raise ClusterRefused(f"nothing answers at {named} ({error})", _remedy(typed)) from error
    match answer_at(address):
        case "no Ray":
            raise ClusterRefused(
                f"what answers at {named} is no Ray cluster (8265 is the port of its dashboard)", _remedy(typed)
            )
        case "Ray that wants a token":
            raise ClusterRefused(
                f"the Ray cluster at {named} demands a token, and this process has none or another one",
                "copy ~/.ray/auth_token from a node of the cluster and set RAY_AUTH_MODE=token, or run on a node of the cluster with "
                "--address auto",
            )
        case "Ray":
            if (versions := other_versions_at(address)) is not None:
                theirs, ours = versions
                raise ClusterRefused(
                    f"the Ray cluster at {named} is {theirs}, and this process {ours}, which must be the same",
                    f"run in an environment that has both as the cluster (pip install ray=={theirs.ray}), or start the cluster from this one",
                )
    return address


def _named_address(typed: str) -> tuple[str, str]:
    """Return what --address stands for, and how it is named."""
    if typed != "auto":
        return typed, f"--address {typed}"
    if variable := os.environ.get("RAY_ADDRESS"):
        return variable, f"RAY_ADDRESS={variable} (--address auto)"
    try:
        found = address_of_auto()
    except ConnectionError as error:
        raise ClusterRefused("there is no Ray cluster on this node for --address auto", _remedy(typed)) from error
    return found, f"{found}, where the latest cluster of this node was (--address auto)"


def _remedy(typed: str) -> str:
    if typed == "auto":
        here = "start Ray on this node (ray up CLUSTER.yaml, where the cluster was started from, or ray start)"
        return f"{here}, or leave --address out to use this machine alone" + (
            "; or unset RAY_ADDRESS" if "RAY_ADDRESS" in os.environ else ""
        )
    return "check the address and port (6379 is Ray's default), or run on a node of the cluster with --address auto"
