"""Under which environment the processes of a study run."""

from __future__ import annotations

import json
import os
import re
import shlex
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from unittest.mock import Mock

import pytest
import ray
import torch
from ray.exceptions import AuthenticationError

from batchscout.orchestrator.config.load import parse_study
from batchscout.orchestrator.execution.nodes.autoscaler import MayStart, NoAutoscaler, Unreadable
from batchscout.orchestrator.execution.nodes.node_kinds import Choice, Node, chosen_nodes
from batchscout.orchestrator.execution.nodes.placement import LaneShape
from batchscout.orchestrator.execution.nodes.room import at_most
from batchscout.orchestrator.execution.ray_private.connection import SECONDS_TO_CONNECT
from batchscout.orchestrator.execution.ray_private.environment import DRIVER_ENVIRONMENT, RANK_ENVIRONMENT
from batchscout.orchestrator.execution.session import (
    allocator_environment,
    lane_environment,
    reachable_address,
    refuse_other_devices,
    refuse_too_many_nodes,
    start_ray,
    worker_environment,
)
from batchscout.orchestrator.study.messages import Device
from batchscout.trainers.device.memory import MALLOC_ENVIRONMENT
from tests.support.studies import ON_TEXT

ROOT = Path(__file__).parents[2]
ON_CPU = LaneShape(num_lanes=1, world_size=1, cpus_per_rank=2, use_gpu=False)
ON_GPU = LaneShape(num_lanes=1, world_size=1, cpus_per_rank=6, use_gpu=True)
HONEST_MEMORY = {**MALLOC_ENVIRONMENT, "TORCHINDUCTOR_COMPILE_THREADS": "1"}


def test_a_lane_on_a_cpu_has_the_settings_that_make_its_memory_honest_however_it_comes_by_them() -> None:
    assert worker_environment().items() >= HONEST_MEMORY.items()
    assert lane_environment(ON_CPU, is_local=True) == {}, "a process that waits idle could not be used"
    assert lane_environment(ON_CPU, is_local=False) == HONEST_MEMORY


@pytest.mark.parametrize("is_local", [True, False])
def test_a_lane_on_a_gpu_has_none_of_them_and_the_compiler_has_its_ranks_cpus(
    monkeypatch: pytest.MonkeyPatch, is_local: bool
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.delenv("PYTORCH_CUDA_ALLOC_CONF", raising=False)
    given = worker_environment() | lane_environment(ON_GPU, is_local=is_local)
    assert not MALLOC_ENVIRONMENT.keys() & given.keys()
    assert given["TORCHINDUCTOR_COMPILE_THREADS"] == "6"
    assert given["PYTORCH_ALLOC_CONF"] == "expandable_segments:True"
    assert "CUBLAS_WORKSPACE_CONFIG" not in given
    exact = lane_environment(ON_GPU, is_local=is_local, deterministic=True)
    assert exact == lane_environment(ON_GPU, is_local=is_local) | {"CUBLAS_WORKSPACE_CONFIG": ":4096:8"}


@pytest.mark.parametrize("name", ["PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF"])
def test_what_the_user_has_told_torchs_allocator_stands(name: str) -> None:
    """All three names are read (c10/cuda/CUDAAllocatorConfig.h, torch 2.13), and a second one would contradict it."""
    assert allocator_environment({name: "max_split_size_mb:512", "HOME": "/"}) == {name: "max_split_size_mb:512"}
    assert allocator_environment({"HOME": "/"}) == {"PYTORCH_ALLOC_CONF": "expandable_segments:True"}


def test_a_start_that_ray_gives_up_is_told_with_the_remedy(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """As Ray 2.60 raises it: it would take a machine without any time left to see it happen."""
    said = "The current node timed out during startup. This could happen because some of the raylet failed to startup."
    monkeypatch.setattr(ray, "init", Mock(side_effect=Exception(said)))
    monkeypatch.setenv("RAY_BACKEND_LOG_LEVEL", "debug")
    told = r"^Ray did not start on this machine: The current node timed out.*RAY_BACKEND_LOG_LEVEL.*run the same command again"
    with pytest.raises(ValueError, match=told) as raised:
        start_ray(parse_study(ON_TEXT, "it"), None, tmp_path)
    assert not [
        name for name in (*DRIVER_ENVIRONMENT, *RANK_ENVIRONMENT, "RAY_AUTH_TOKEN") if name in str(raised.value)
    ]


def test_a_start_that_a_setting_ends_is_told_with_the_setting(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """As Ray 2.60 raises it for a token's file that is not there: it reads that setting once, when it is imported."""
    said = "RAY_AUTH_TOKEN_PATH is set but file cannot be opened or is empty: /nowhere."
    monkeypatch.setattr(ray, "init", Mock(side_effect=AuthenticationError(said)))
    for name in [name for name in os.environ if name.startswith(("PYTHON", "RAY_", "TORCH"))]:
        monkeypatch.delenv(name)
    with pytest.raises(AuthenticationError):
        start_ray(parse_study(ON_TEXT, "it"), None, tmp_path)
    monkeypatch.setenv("RAY_AUTH_TOKEN_PATH", "/nowhere")
    told = r"^Ray does not start on this machine \(AuthenticationError: .*/nowhere.*\); the environment has RAY_AUTH_TOKEN_PATH: try it without$"
    with pytest.raises(ValueError, match=told):
        start_ray(parse_study(ON_TEXT, "it"), None, tmp_path)


def test_no_study_waits_for_more_nodes_than_there_may_be() -> None:
    """Of other kinds the autoscaler may start as many as it likes: the study asks for its own."""
    choice = Choice((Node("worker", 8, is_there=False),) * 4)
    scaler = MayStart((*choice.nodes, Node("other", 8, is_there=False)), most=10)
    said = (
        "--min-nodes is 6, and the cluster can have 5: 1 node that is there, and 4 that the autoscaler may start for this study; lower "
        "--min-nodes, or raise max_workers in the autoscaler's file, that of the cluster and that of this type of node"
    )
    with pytest.raises(ValueError, match=re.escape(said)):
        refuse_too_many_nodes(scaler, choice, 1, 6)
    refuse_too_many_nodes(scaler, choice, 1, 5)


def test_nor_for_more_than_the_cluster_may_have_of_all_kinds() -> None:
    head, worker = Node("head", 2, is_head=True), Node("worker", 8, is_there=False)
    scaler = MayStart((worker,) * 4, most=2)
    choice = chosen_nodes(at_most([head], scaler))
    with pytest.raises(
        ValueError, match="--min-nodes is 4, and the cluster can have 3: 1 node that is there, and 2 that"
    ):
        refuse_too_many_nodes(scaler, choice, 1, 4)
    refuse_too_many_nodes(scaler, choice, 1, 3)


def test_a_study_may_wait_for_as_many_nodes_as_are_there_or_as_nobody_knows_of() -> None:
    all_there = Choice((Node("worker", 8),) * 4)
    scaler = MayStart(all_there.nodes, most=4)
    said = "--min-nodes is 6, and the cluster can have 5: 5 nodes that are there, and 0 that the autoscaler"
    with pytest.raises(ValueError, match=said):
        refuse_too_many_nodes(scaler, all_there, 5, 6)
    refuse_too_many_nodes(scaler, all_there, 5, 5)
    refuse_too_many_nodes(NoAutoscaler(), all_there, 5, 6)


@pytest.fixture
def port() -> Iterator[int]:
    """A port at which nothing listens, and nobody else can either."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        yield taken.getsockname()[1]


@pytest.mark.parametrize("by", ["--address", "RAY_ADDRESS"])
def test_an_address_at_which_nothing_listens_is_refused_at_once(
    by: str, port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ray tries for ten minutes, and prints a line each time."""
    typed = f"127.0.0.1:{port}"
    if by == "RAY_ADDRESS":
        monkeypatch.setenv("RAY_ADDRESS", typed)
        typed = "auto"
    began = time.monotonic()
    with pytest.raises(ValueError, match=rf"nothing answers at {by}.127.0.0.1:{port}.*refused.*; ") as refused:
        reachable_address(typed)
    assert time.monotonic() - began < SECONDS_TO_CONNECT
    assert ("unset RAY_ADDRESS" in str(refused.value)) == (by == "RAY_ADDRESS")


def test_so_is_one_at_which_something_else_listens() -> None:
    with ThreadingHTTPServer(("127.0.0.1", 0), BaseHTTPRequestHandler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        try:
            with pytest.raises(ValueError, match=r"what answers at --address 127.0.0.1:\d+ is no Ray cluster"):
                reachable_address(f"127.0.0.1:{server.server_port}")
        finally:
            server.shutdown()


@pytest.mark.parametrize("typed", ["ray://head:10001", "head", "local"])
def test_an_address_of_another_form_is_told_which_one_is_wanted(typed: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match=f"--address {typed} is not of the form host:port; give"):
        reachable_address(typed)
    monkeypatch.setenv("RAY_ADDRESS", typed)
    with pytest.raises(
        ValueError, match=rf"RAY_ADDRESS={typed} .* is not of the form host:port; .*; or unset RAY_ADDRESS$"
    ):
        reachable_address("auto")


@pytest.mark.ray
@pytest.mark.usefixtures("ray_cluster")
def test_a_cluster_of_another_ray_is_refused_with_both_versions(monkeypatch: pytest.MonkeyPatch) -> None:
    address = ray.get_runtime_context().gcs_address
    assert reachable_address(address) == address
    theirs = ray.__version__
    monkeypatch.setattr(ray, "__version__", "2.1.0")
    with pytest.raises(
        ValueError, match=rf"is Ray {theirs} with Python .*, and this process Ray 2.1.0 .*ray=={theirs}"
    ):
        reachable_address(address)


def test_what_ray_says_of_a_cluster_that_it_does_not_join_is_told_with_what_to_do(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(ray, "init", Mock(side_effect=ConnectionError("Could not find any running Ray instance.")))
    said = "at 10.0.0.1:6379 cannot be used from here: Could not find any running Ray instance.; run on a node of the cluster"
    with pytest.raises(ValueError, match=re.escape(said)):
        start_ray(parse_study(ON_TEXT, "it"), "10.0.0.1:6379", tmp_path)


STARTS_RAY = """
import pathlib, sys, ray
from batchscout.orchestrator.execution.session import start_ray
from batchscout.orchestrator.config.load import parse_study
from tests.support.studies import ON_TEXT
start_ray(parse_study(ON_TEXT, "it"), None, pathlib.Path("run"), num_cpus=1)
print(ray.get(ray.remote(lambda: sys.executable).remote()) == sys.executable, ray.get_runtime_context().runtime_env)
"""


@pytest.mark.ray
def test_a_local_study_uploads_nothing_whatever_has_started_it(tmp_path: Path) -> None:
    """As `uv run` does: its name and its first word are what Ray looks for among the processes above."""
    (tmp_path / "pyproject.toml").write_text("")
    (folder := tmp_path / "below").mkdir()
    (uv := folder / "uv").symlink_to("/bin/sh")
    (folder / "starts.py").write_text(STARTS_RAY)
    (folder / "run").write_text(f"{shlex.quote(sys.executable)} starts.py; exit $?")
    of_a_job = {"runtime_env": {"working_dir": "gcs://_ray_pkg_0123456789abcdef.zip"}, "metadata": {}}
    settings = {**os.environ, "PYTHONPATH": str(ROOT), "RAY_JOB_CONFIG_JSON_ENV_VAR": json.dumps(of_a_job)}
    done = subprocess.run([str(uv), "run"], cwd=folder, env=settings, capture_output=True, text=True, timeout=200)
    assert done.stdout.splitlines()[-1:] == ["True {}"], done.stderr


# Where CPUs would stand in for GPUs

CPUS = Choice((Node("a", 8), Node("b", 8)))
L4 = Device("NVIDIA L4", 22 << 30, is_gpu=True)


@pytest.mark.parametrize("min_nodes", [1, 4])
def test_no_study_runs_on_cpus_where_an_autoscaler_that_nobody_sees_may_have_gpus(min_nodes: int) -> None:
    said = (
        "the cluster has 16 CPUs and no GPU now, on 3 nodes, and what KubeRay's autoscaler may start cannot be read from here; have it "
        "keep the nodes that the study is to run on (minReplicas), and give --min-nodes their number and one more for the head"
    )
    with pytest.raises(ValueError, match=re.escape(said)):
        refuse_other_devices(CPUS, Unreadable(), 3, min_nodes, None)


def test_a_study_runs_on_the_cpus_that_it_was_told_to_wait_for_and_on_those_of_a_cluster_that_stays_as_it_is() -> None:
    refuse_other_devices(CPUS, Unreadable(), 3, 3, None)
    refuse_other_devices(CPUS, NoAutoscaler(), 3, 1, None)
    refuse_other_devices(Choice((Node("a", 8, 1),)), Unreadable(), 3, 1, L4)


def test_what_has_measured_on_gpus_goes_on_on_no_cpus() -> None:
    said = "this study has measured on NVIDIA L4 (22 GiB), and the cluster has 16 CPUs and no GPU now"
    with pytest.raises(ValueError, match=re.escape(said)):
        refuse_other_devices(CPUS, NoAutoscaler(), 3, 3, L4)
    refuse_other_devices(CPUS, NoAutoscaler(), 3, 3, Device("a CPU", 1 << 30))


def test_what_has_measured_on_cpus_goes_on_on_no_gpus() -> None:
    with pytest.raises(ValueError, match=re.escape("has measured on CPUs (a CPU (1 GiB)), and now there are GPUs")):
        refuse_other_devices(Choice((Node("a", 8, 1),)), NoAutoscaler(), 1, 1, Device("a CPU", 1 << 30))
