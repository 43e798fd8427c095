"""Against which peak utilisation is told."""

from __future__ import annotations

import pytest
import torch

from batchscout.trainers.config import Precision
from batchscout.trainers.device.device_peak import data_sheet_flops, device_peak, device_peaks

CPU = torch.device("cpu")


def test_a_cpu_is_measured_once_and_every_trial_of_a_process_is_held_against_the_same_peak() -> None:
    first = device_peak(CPU, "float32")
    assert first.source == "measured"
    assert first.flops_per_second > 1e8
    assert device_peak(CPU, "float32") == first
    assert device_peaks(CPU, ["float32"]) == {"float32": first}


@pytest.mark.parametrize(
    ("name", "multiprocessors", "precision", "teraflops"),
    [
        ("NVIDIA H200", 132, "bfloat16", 989),
        ("NVIDIA GH200 480GB", 132, "bfloat16", 989),
        ("NVIDIA H100 80GB HBM3", 132, "float16", 989),
        ("NVIDIA H100 PCIe", 114, "bfloat16", 756),
        ("NVIDIA A100-SXM4-40GB", 108, "float32", 19.5),
        ("NVIDIA A10", 72, "bfloat16", 125),
        ("NVIDIA L4", 58, "bfloat16", 121),
        ("NVIDIA L40S", 142, "bfloat16", 362),
        ("NVIDIA GeForce RTX 3090", 82, "float32", 35.6),
        ("Tesla V100-SXM2-16GB", 80, "float16", 125),
        ("Tesla T4", 40, "float16", 65),
        ("AMD Instinct MI300X", 304, "bfloat16", 1307),
    ],
)
def test_a_known_gpu_has_its_data_sheets_peak(
    name: str, multiprocessors: int, precision: Precision, teraflops: float
) -> None:
    assert data_sheet_flops(name, multiprocessors, precision) == teraflops * 1e12


@pytest.mark.parametrize(
    ("name", "multiprocessors", "teraflops"),
    [("NVIDIA A100-SXM4-40GB", 108, 156), ("NVIDIA H100 80GB HBM3", 132, 494.5), ("Tesla V100-SXM2-16GB", 80, 15.7)],
)
def test_float32_that_may_be_tf32_has_its_peak_where_the_gpu_has_it(
    name: str, multiprocessors: int, teraflops: float
) -> None:
    assert data_sheet_flops(name, multiprocessors, "float32", allow_tf32=True) == teraflops * 1e12
    half = data_sheet_flops(name, multiprocessors, "float16")
    assert data_sheet_flops(name, multiprocessors, "float16", allow_tf32=True) == half


def test_a_slice_of_a_gpu_has_the_share_of_its_multiprocessors() -> None:
    assert data_sheet_flops("NVIDIA A100-SXM4-40GB MIG 1g.5gb", 14, "bfloat16") == pytest.approx(312e12 * 14 / 108)
    assert data_sheet_flops("NVIDIA H100 80GB HBM3 MIG 3g.40gb", 60, "bfloat16") == pytest.approx(989e12 * 60 / 132)


@pytest.mark.parametrize(
    ("name", "multiprocessors"),
    [
        ("NVIDIA RTX 6000 Ada", 142),
        ("NVIDIA A10G", 80),
        ("NVIDIA GB200", 148),
        ("NVIDIA GeForce RTX 4090 Laptop GPU", 76),
        ("NVIDIA GeForce RTX 3090 Ti", 84),
        ("NVIDIA A100-SXM-64GB", 124),
        ("Tesla T4", 40),
        ("Tesla V100-SXM2-16GB", 80),
    ],
)
def test_what_no_sheet_tells_is_to_be_measured(name: str, multiprocessors: int) -> None:
    """Other chips, also under a known one's name, and bfloat16 where the chip has no units for it."""
    assert data_sheet_flops(name, multiprocessors, "bfloat16") is None
