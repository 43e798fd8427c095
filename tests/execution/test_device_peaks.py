"""A study reads its device's peak once, and its trials are told it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import ray
import torch

from batchscout.orchestrator.execution.device_peaks import device_peaks
from batchscout.orchestrator.execution.nodes.placement import LaneShape

SHAPE = LaneShape(num_lanes=1, world_size=1, cpus_per_rank=1, use_gpu=False)


def test_this_hosts_cpus_are_measured_with_the_threads_of_a_rank_and_torch_keeps_its_own() -> None:
    before = torch.get_num_threads()
    peaks = device_peaks(SHAPE, ["float32"], is_local=True)
    assert torch.get_num_threads() == before
    assert peaks is not None
    assert peaks["float32"].source == "measured"


@pytest.mark.ray
def test_a_process_of_the_cluster_measures_what_this_host_cannot_know(ray_cluster: None) -> None:
    peaks = device_peaks(SHAPE, ["float32"], is_local=False)
    assert peaks is not None
    assert peaks["float32"].flops_per_second > 1e8


@pytest.mark.ray
def test_where_torch_can_use_no_gpu_that_ray_has_its_hosts_peak_is_not_taken_for_the_gpus(
    ray_cluster: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    remote: Any = ray.remote

    def without_gpus(**room: Any) -> Any:
        return remote(**room | {"num_gpus": 0})  # this machine may have none to ask for

    monkeypatch.setattr(ray, "remote", without_gpus)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert device_peaks(replace(SHAPE, use_gpu=True), ["float32"], is_local=True) is None
