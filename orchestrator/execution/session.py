"""A study's connection to Ray: a cluster of its own or the user's, and the environment that its processes need."""

from __future__ import annotations

import contextlib
import logging
import os
import secrets
import socket
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import ray

from orchestrator.config.keys import StudyConfig
from orchestrator.execution.code_shipping import absolute_paths, runtime_env
from orchestrator.execution.ray_private import DRIVER_ENVIRONMENT, RANK_ENVIRONMENT

# How long a study waits for the cluster's first CPU.
SECONDS_FOR_A_NODE = 60
# How long --address has to accept a connection.
SECONDS_TO_ANSWER = 5


@contextlib.contextmanager
def ray_cluster(config: StudyConfig, address: str | None, run_dir: Path) -> Iterator[None]:
    """Connect to Ray, and disconnect on leaving; a connection that the caller has already is used and left open."""
    if ray.is_initialized():
        yield
        return
    start_ray(config, address, run_dir)
    try:
        yield
    finally:
        ray.shutdown()


def start_ray(config: StudyConfig, address: str | None, run_dir: Path, **options: Any) -> None:
    """Call ray.init as a study needs it: quiet, no dashboard of its own, and the environment that its workers need."""
    for name, value in DRIVER_ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    environment = runtime_env(address, run_dir, absolute_paths(config.data.kwargs))
    options = {"log_to_driver": False, "logging_level": logging.ERROR, **options}
    if address is not None:
        refuse_silent_address(address)
        try:
            ray.init(address, runtime_env=environment | {"env_vars": worker_environment()}, **options)
        except ConnectionError as error:
            raise ValueError(
                f"no Ray cluster answers at --address {address}: {str(error).splitlines()[0]}; run on a node of the cluster "
                "with --address auto, check the address, or leave --address out to use this machine alone"
            ) from error
        return
    protect_local_cluster()
    # The environment is inherited and not in the runtime_env, so that Ray can give the study processes that wait idle.
    with environment_with(worker_environment()):
        ray.init("local", runtime_env=environment, include_dashboard=False, **options)


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
    """Return the environment that every process of a study runs under."""
    from trainers.memory import MALLOC_ENVIRONMENT  # here, because torch comes with it

    # One compile thread: a pool of compiler processes would take memory that no limit counts.
    return {**MALLOC_ENVIRONMENT, "TORCHINDUCTOR_COMPILE_THREADS": "1", **RANK_ENVIRONMENT}


def wait_for_a_node(say: Callable[[str], None], seconds: float = SECONDS_FOR_A_NODE) -> None:
    """Wait until the cluster has a CPU: it has none while its only worker is being started or replaced."""
    deadline = time.monotonic() + seconds
    if not ray.cluster_resources().get("CPU"):
        say(f"the cluster has no CPUs: waiting for a node (at most {seconds:g} s)")
    while not ray.cluster_resources().get("CPU") and time.monotonic() < deadline:
        time.sleep(0.5)


def refuse_silent_address(address: str) -> None:
    """Raise ValueError where nothing listens at host:port: Ray itself would try for minutes."""
    host, colon, port = address.rpartition(":")
    if not colon or "/" in host or not port.isdigit():
        return  # auto, or a form that Ray resolves itself
    try:
        socket.create_connection((host, int(port)), timeout=SECONDS_TO_ANSWER).close()
    except OSError as error:
        raise ValueError(
            f"nothing answers at --address {address} ({error}); check the address and port (6379 is Ray's default), or run "
            "on a node of the cluster with --address auto"
        ) from error


def protect_local_cluster() -> None:
    """Give the local cluster that is about to start a token of its own, where the user has none.

    Without one Ray 2.60 writes ~/.ray/auth_token, and every later `ray start` on this host then demands it of its
    workers and clients. Only the token is set: RAY_AUTH_MODE is Ray's to set, which ignores it once imported.
    """
    chosen = {"RAY_AUTH_MODE", "RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"} & os.environ.keys()
    if not chosen and not (Path.home() / ".ray" / "auth_token").exists():
        os.environ["RAY_AUTH_TOKEN"] = secrets.token_hex(32)
