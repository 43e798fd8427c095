"""Whether float32 may be rounded to TF32 is a run's own choice. On a CPU the settings are those of a GPU, unused."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.support.tiny import config
from trainers.device import tensor_float
from trainers.device.tensor_float import tensor_float_32
from trainers.loop import train
from trainers.report import Report


def settings() -> tuple[str, bool]:
    return torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32


@pytest.mark.parametrize(("allowed", "expected"), [(True, ("high", True)), (False, ("highest", False))])
def test_a_run_on_a_gpu_rounds_products_and_convolutions_or_neither_and_leaves_the_process_as_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, allowed: bool, expected: tuple[str, bool]
) -> None:
    monkeypatch.setattr(tensor_float, "on_cuda", lambda: True)
    before, found = settings(), set[tuple[str, bool]]()

    def look(_: Report) -> None:
        found.add(settings())

    train(config(rungs=(16,), allow_tf32=allowed), look, tmp_path)
    assert found == {expected}
    assert settings() == before


def test_a_cpu_is_left_as_it_is() -> None:
    before = settings()
    with tensor_float_32(True):
        assert settings() == before
