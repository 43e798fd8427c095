"""Whether float32 may be rounded to TF32 is a run's own choice. On a CPU the settings are those of a GPU, unused."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from batchscout.trainers.device import tensor_float
from batchscout.trainers.device.tensor_float import tensor_float_32
from batchscout.trainers.loop import train
from batchscout.trainers.report import Report
from tests.support.tiny import config, in_fresh_process

pytestmark = pytest.mark.slow


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


def newer_settings() -> list[str]:
    """What the kernels obey: of convolutions, of recurrent layers, and of a GPU's and a CPU's products."""
    backends: Any = torch.backends
    operations = backends.cudnn.conv, backends.cudnn.rnn, backends.cuda.matmul, backends.mkldnn.matmul
    return [operation.fp32_precision for operation in operations]


def users_own_products_and_convolutions() -> list[Any]:
    backends: Any = torch.backends
    backends.cuda.matmul.fp32_precision, backends.cudnn.conv.fp32_precision = "tf32", "ieee"
    return before_inside_and_after()


def users_own_default() -> list[Any]:
    backends: Any = torch.backends
    backends.fp32_precision = "tf32"
    return before_inside_and_after()


def before_inside_and_after() -> list[Any]:
    tensor_float.on_cuda = lambda: True
    found: list[Any] = [newer_settings()]
    for allowed in (True, False):
        with tensor_float_32(allowed):
            found.append([*settings(), newer_settings()])
    return [*found, newer_settings()]


@pytest.mark.parametrize("users_module", [users_own_products_and_convolutions, users_own_default])
def test_a_module_that_sets_torchs_newer_flags_changes_no_run_and_finds_them_as_it_left_them(
    users_module: Callable[[], list[Any]],
) -> None:
    """Of these torch refuses to say the older ones. In a process of its own: not all of this can be taken back."""
    before, with_tf32, without, after = in_fresh_process(users_module)
    assert with_tf32 == ["high", True, ["tf32"] * 4]
    assert without == ["highest", False, ["ieee"] * 4]
    assert after == before


def test_a_cpu_is_left_as_it_is() -> None:
    before = settings()
    with tensor_float_32(True):
        assert settings() == before
