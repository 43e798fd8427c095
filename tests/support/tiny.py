"""Tiny learnable data and models, and a way to run code in a fresh process."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from batchscout.trainers.checkpoints.checkpoint import load_newest
from batchscout.trainers.config import TrialConfig
from batchscout.trainers.device.memory import MALLOC_ENVIRONMENT, give_back, memory_of
from batchscout.trainers.loop import train
from batchscout.trainers.model.parallel import whole
from batchscout.trainers.report import Answer, Report
from batchscout.trainers.run import Run

ROOT = Path(__file__).parents[2]

torch.set_num_threads(1)  # for tensors this small a second thread only waits, and sums are the same on every machine


class Samples(list[dict[str, Tensor]]):
    vocab_size: int
    seq_len: int


class LogitsOnly(nn.Module):
    """A user's module that knows nothing of this project."""

    def __init__(self, *, vocab_size: int) -> None:
        super().__init__()
        self.table = nn.Embedding(vocab_size, vocab_size)

    def forward(self, input_ids: Tensor) -> Tensor:
        return self.table(input_ids)


def data(
    *, num_train: int = 64, num_val: int = 16, seq_len: int = 12, vocab_size: int = 24, padded: bool = False
) -> tuple[Samples, Samples]:
    """Token chains whose next token is mostly a function of the last; `padded` leaves 0 to seq_len targets a sample."""
    sets = (_samples(num_train, seq_len, vocab_size, padded, 1), _samples(num_val, seq_len, vocab_size, padded, 2))
    for samples in sets:
        samples.vocab_size, samples.seq_len = vocab_size, seq_len
    return sets


def _samples(num_samples: int, seq_len: int, vocab_size: int, padded: bool, seed: int) -> Samples:
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(vocab_size, (num_samples, seq_len + 1), generator=generator)
    surprising = torch.rand((num_samples, seq_len + 1), generator=generator) < 0.1
    for place in range(1, seq_len + 1):
        expected = (5 * tokens[:, place - 1] + 3) % vocab_size
        tokens[:, place] = torch.where(surprising[:, place], tokens[:, place], expected)
    inputs, targets = tokens[:, :-1].clone(), tokens[:, 1:].clone()
    if padded:
        lengths = torch.randint(seq_len + 1, (num_samples, 1), generator=generator)
        targets[torch.arange(seq_len) >= lengths] = -100
    return Samples({"input_ids": i, "targets": t} for i, t in zip(inputs, targets, strict=True))


def config(*, padded: bool = False, dropout: float = 0.0, **changes: Any) -> TrialConfig:
    """An eager run of a two-block GPT; `changes` are TrialConfig's fields."""
    model = {"num_layers": 2, "num_heads": 2, "hidden_dim": 16, "dropout": dropout}
    fields: dict[str, Any] = {
        "model": {"target": "gpt", "kwargs": model},
        "data": {"target": "tests.support.tiny:data", "kwargs": {"padded": padded}},
        "micro_batch_size": 4,
        "compile": False,
        "learning_rate": 1e-2,
        "sample_budget": 64,
        "evaluation_samples": 16,
    }
    return TrialConfig.model_validate(fields | changes)


def cpu_run(trial: TrialConfig, steps: int = 0) -> Run:
    """A run that has taken so many steps."""
    run = Run(trial, torch.device("cpu"))
    for _ in range(steps):
        run.step()
    return run


def losses_of(trial: TrialConfig, steps: int) -> list[float]:
    return [step.loss for step in cpu_run(trial, steps).read()]


def gradient_of_step(run: Run) -> Tensor:
    """Take one step and return the whole gradient, flat, as the optimizer was given it."""
    seen: list[Tensor] = []
    hook = run.optimizer.register_step_pre_hook(
        lambda *_: seen.append(
            torch.cat([whole(p.grad).flatten().double() for p in run.parameters if p.grad is not None])
        )
    )
    run.step()
    hook.remove()
    return seen[0]


def peak_of_second_step(trial: TrialConfig) -> float:
    """Peak bytes of a step of a run whose optimizer has its state."""
    run = cpu_run(trial)
    run.step()
    give_back()
    meter = memory_of(torch.device("cpu")).peak()
    run.step()
    return meter.peak_bytes()


def sample_numbers(run: Run) -> list[int]:
    """The sample numbers that the run takes from now on; the list grows with its steps."""
    taken: list[int] = []
    indices = run.order.indices

    def noting(numbers: Iterable[int]) -> list[int]:
        numbers = list(numbers)
        taken.extend(numbers)
        return indices(numbers)

    run.order.indices = noting
    return taken


def relative_error(a: Tensor, b: Tensor) -> float:
    return ((a - b).norm() / b.norm()).item()


def newest_state(folder: Path) -> dict[str, Any]:
    """Return the state in the newest checkpoint there."""
    found = load_newest(folder)
    assert found is not None
    return found[1]


def assert_equal_bit_by_bit(a: dict[str, Any], b: dict[str, Any]) -> None:
    """Two states of runs are one: weights, optimizer, noise, and what is drawn next."""
    assert a["model"].keys() == b["model"].keys()
    assert all(torch.equal(a["model"][name], b["model"][name]) for name in a["model"])
    for first, second in zip(a["optimizer"]["state"].values(), b["optimizer"]["state"].values(), strict=True):
        assert all(torch.equal(first[key], second[key]) for key in first)
    assert a["noise_steps"] == b["noise_steps"]
    assert torch.equal(a["random"][0]["cpu"], b["random"][0]["cpu"])


def stop_at(*rungs: int) -> Callable[[Report], Answer]:
    """A listener that stops the run at each of these rungs, once."""
    left = set(rungs)

    def report(said: Report) -> Answer:
        stopped = left & set(said.rungs)
        left.difference_update(stopped)
        return Answer.STOP if stopped else Answer.GO_ON

    return report


def train_until_killed(trial: TrialConfig, directory: Path, samples_seen: int) -> None:
    """Its process dies when it reports so many samples."""

    def die(report: Report) -> None:
        if report.samples_seen == samples_seen:
            raise KeyboardInterrupt

    try:
        train(trial, die, directory)
    except KeyboardInterrupt:
        return
    raise AssertionError(f"it does not report {samples_seen} samples")


def in_fresh_process(function: Callable[..., Any], *args: Any, **environment: str) -> Any:
    """function(*args) in a process of its own that starts as a lane does; arguments and result go through JSON."""
    code = (
        "import importlib, json, sys\n"
        "module, name, args = json.loads(sys.argv[1])\n"
        "print(json.dumps(getattr(importlib.import_module(module), name)(*args)))"
    )
    call = json.dumps([function.__module__, function.__name__, list(args)])
    settings = {**os.environ, **MALLOC_ENVIRONMENT, **environment}
    done = subprocess.run([sys.executable, "-c", code, call], cwd=ROOT, env=settings, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])
