"""Against which peak utilisation is told."""

from __future__ import annotations

import pytest
import torch

from trainers.config import Precision
from trainers.device_peak import data_sheet_flops, device_peak, device_peaks

CPU = torch.device("cpu")


def test_a_cpu_is_measured_once_and_every_trial_of_a_process_is_held_against_the_same_peak() -> None:
    first = device_peak(CPU, "float32")
    assert first.source == "measured"
    assert first.flops_per_second > 1e8
    assert device_peak(CPU, "float32") == first
    assert device_peaks(CPU, ["float32"]) == {"float32": first}


@pytest.mark.parametrize(
    ("name", "precision", "teraflops"),
    [
        ("NVIDIA H200", "bfloat16", 989),
        ("NVIDIA H100 80GB HBM3", "float16", 989),
        ("NVIDIA H100 PCIe", "bfloat16", 756),
        ("NVIDIA A100-SXM4-40GB", "float32", 19.5),
    ],
)
def test_a_known_gpu_has_its_data_sheets_peak(name: str, precision: Precision, teraflops: float) -> None:
    assert data_sheet_flops(name, precision) == teraflops * 1e12


@pytest.mark.parametrize(
    "name", ["NVIDIA RTX 6000 Ada", "NVIDIA H100 80GB HBM3 MIG 1g.10gb", "NVIDIA GeForce RTX 4090 Laptop GPU"]
)
def test_an_unknown_gpu_and_a_share_of_a_known_one_are_to_be_measured(name: str) -> None:
    assert data_sheet_flops(name, "bfloat16") is None
