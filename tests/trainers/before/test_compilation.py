"""What a run needs for the first time is made before its memory and its time are measured."""

from __future__ import annotations

import pytest
import torch

from tests.support.tiny import config
from trainers.before import compilation
from trainers.before.compilation import warm_up
from trainers.config import TrialConfig
from trainers.run import Run

CPU = torch.device("cpu")


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["cpu", "cuda"])
def test_one_step_is_thrown_away_on_every_kind_of_device_and_once_for_each_shape(
    monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    """The runs are real ones, on the CPU whatever the device is called."""
    runs: list[Run] = []

    def run_on_the_cpu(trial: TrialConfig, _: torch.device) -> Run:
        runs.append(Run(trial, CPU))
        return runs[-1]

    monkeypatch.setattr(compilation, "Run", run_on_the_cpu)
    monkeypatch.setattr(compilation, "_warm", set())
    device = torch.device(kind)
    assert warm_up(config(micro_batch_size=8), device) > 0
    assert warm_up(config(micro_batch_size=16), device) == 0, "eager code is the same for every size"
    other_betas = {"betas": (0.9, 0.998), "weight_decay": 0.3}
    assert warm_up(config(optimizer=other_betas), device) == 0, "its numbers follow batch and rate, and change no code"
    assert [(run.config.micro_batch_size, run.num_steps) for run in runs] == [(2, 1)]
    assert warm_up(config(micro_batch_size=8, compile=False, precision="bfloat16"), device) > 0
    assert [run.num_steps for run in runs] == [1, 1]
