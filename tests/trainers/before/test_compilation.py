"""What a run needs for the first time is made before its memory and its time are measured."""

from __future__ import annotations

import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.utils import counters

from batchscout.trainers import run as run_module
from batchscout.trainers.before import compilation
from batchscout.trainers.before.compilation import warm_up
from batchscout.trainers.config import TrialConfig
from batchscout.trainers.device import memory
from batchscout.trainers.device.host_memory import HostMemory
from batchscout.trainers.loop import train
from batchscout.trainers.model import activation_checkpointing
from batchscout.trainers.run import Run
from batchscout.trainers.speed.meter import Meter
from tests.support.tiny import config

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


class ThrownAway(Run):
    """Tells when it takes its step."""

    def __init__(self, told: list[str], trial: TrialConfig, device: torch.device) -> None:
        super().__init__(trial, device)
        self.told = told

    def step(self) -> None:
        super().step()
        self.told.append("step")


def test_what_the_thrown_away_step_took_is_given_back_before_the_runs_own_memory_is_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else it would count as the process's own, and the first trial of a process would need more than all others."""
    told: list[str] = []
    models: list[weakref.ref[Any]] = []
    give_back, idle_bytes = memory.give_back, HostMemory.idle_bytes

    def thrown_away(trial: TrialConfig, device: torch.device) -> Run:
        run = ThrownAway(told, trial, device)
        models.append(weakref.ref(run.module))
        return run

    def tell_give_back() -> None:
        give_back()
        told.append("given back" if models[0]() is None else "given back all but the model")

    def tell_idle_bytes(memory: HostMemory) -> int:
        told.append("idle")
        return idle_bytes(memory)

    def tell_meter(*args: Any) -> Meter:
        told.append("meter")
        return Meter(*args)

    monkeypatch.setattr(compilation, "_warm", set())
    monkeypatch.setattr(compilation, "Run", thrown_away)
    monkeypatch.setattr(compilation, "give_back", tell_give_back)
    monkeypatch.setattr(HostMemory, "idle_bytes", tell_idle_bytes)
    monkeypatch.setattr(run_module, "Meter", tell_meter)
    train(config(evaluation_samples=0), lambda _: None, tmp_path)
    assert told == ["meter", "step", "given back", "idle", "meter"]


class Deeper(nn.Module):
    """Its blocks differ in a number, as those of a model with stochastic depth do, so each is compiled by itself."""

    def __init__(self, *, vocab_size: int) -> None:
        super().__init__()
        self.table = nn.Embedding(vocab_size, vocab_size)
        self.blocks = nn.ModuleList(Scaled(1 + number / 10) for number in range(3))

    def forward(self, input_ids: Tensor) -> Tensor:
        hidden = self.table(input_ids)
        for block in self.blocks:
            hidden = block(hidden)
        return hidden


class Scaled(nn.Module):
    def __init__(self, factor: float) -> None:
        super().__init__()
        self.factor = factor
        self.weight = nn.Parameter(torch.ones(()))

    def forward(self, hidden: Tensor) -> Tensor:
        return hidden * self.weight * self.factor


@pytest.mark.compiled
@pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated:DeprecationWarning")  # torch's own
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")
def test_a_process_compiles_size_after_size_of_a_model_whose_blocks_all_differ(monkeypatch: pytest.MonkeyPatch) -> None:
    """The compiler keeps three pieces of code for each size, all of one function."""
    monkeypatch.setattr(activation_checkpointing, "RECOMPILE_LIMIT", 4)
    monkeypatch.setitem(counters["frames"], "ok", 0)  # whatever other tests have compiled
    loss = {"type": "cross_entropy", "targets": "targets"}
    trial = config(model={"target": f"{__name__}:Deeper"}, loss=loss, compile=True)
    for size in (2, 3, 4):
        assert warm_up(trial.model_copy(update={"micro_batch_size": size}), CPU) > 0
    assert warm_up(trial.model_copy(update={"micro_batch_size": 2}), CPU) == 0, "and keeps those of the first"
