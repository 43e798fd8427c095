"""Under which environment the processes of a study run."""

from __future__ import annotations

import pytest
import torch

from orchestrator.execution.placement import LaneShape
from orchestrator.execution.session import allocator_environment, lane_environment, worker_environment
from trainers.device.memory import MALLOC_ENVIRONMENT

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
