"""Small studies that run in seconds, and what a user's own module may do wrong."""

from __future__ import annotations

import ctypes
import json
import os
import signal
import threading
import time
import zlib
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from batchscout.orchestrator.config.keys import StudyConfig
from batchscout.orchestrator.config.load import parse_study
from batchscout.trainers.model.gpt import GPT

TINY: dict[str, Any] = {
    "name": "tiny",
    "model": {"target": "gpt", "kwargs": {"num_layers": 2, "num_heads": 2, "hidden_dim": 32}},
    "data": {"target": "python_stdlib", "kwargs": {"seq_len": 32, "tokenizer": "bytes", "max_text_bytes": 300_000}},
    "optimizer": {"lr": 1e-3, "reference_batch_size": 8},
    "sample_budget": 128,
    "evaluation_samples": 16,
    "evaluations": 4,
}


def tiny_study(**changes: Any) -> StudyConfig:
    return parse_study(TINY | changes, "the test's study")


def grid(**stage: Any) -> list[dict[str, Any]]:
    """One grid stage of eager runs."""
    return [{"type": "grid", "compile": [False], "micro_batch_size": [4], **stage}]


class SaysWhereItIs(GPT):
    """A model that leaves its process's number in a file whenever it is built."""

    def __init__(self, *, vocab_size: int, seq_len: int, log: str) -> None:
        super().__init__(vocab_size=vocab_size, seq_len=seq_len, num_layers=1, hidden_dim=32)
        with Path(log).open("a") as file:
            file.write(f"{os.getpid()}\n")


class SaysItsNode(GPT):
    """A model that leaves in a file the node of Ray's on which it is built, where that is a lane's."""

    def __init__(self, *, vocab_size: int, seq_len: int, log: str) -> None:
        super().__init__(vocab_size=vocab_size, seq_len=seq_len, num_layers=1, hidden_dim=32)
        import ray

        if ray.is_initialized():
            with Path(log).open("a") as file:
                file.write(f"{ray.get_runtime_context().get_node_id()}\n")


class LogsItsBatches(GPT):
    """A model that leaves in a file when and where it is built, and the checksum of every batch that it trains on."""

    def __init__(self, *, vocab_size: int, seq_len: int, log: str) -> None:
        super().__init__(vocab_size=vocab_size, seq_len=seq_len, num_layers=1, hidden_dim=32)
        self.log = Path(log)
        self._append(time=time.time(), rank=int(os.environ.get("RANK", "-1")))

    def forward(self, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
        if self.training:
            time.sleep(0.02)  # slow enough to be caught in the act
            self._append(batch=zlib.crc32(batch["input_ids"].numpy().tobytes()))
        return super().forward(batch)

    def _append(self, **fields: float) -> None:
        with self.log.open("a") as file:
            file.write(json.dumps({"pid": os.getpid(), **fields}) + "\n")


class Sleeps(GPT):
    """A model whose batches take a fixed time, however many processes share the machine's cores."""

    def __init__(self, *, vocab_size: int, seq_len: int, seconds: float) -> None:
        super().__init__(vocab_size=vocab_size, seq_len=seq_len, num_layers=1, hidden_dim=32)
        self.seconds = seconds

    def forward(self, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
        if self.training:
            time.sleep(self.seconds)
        return super().forward(batch)


class EndsItsProcess:
    """Aborts its process when it is freed, as what is left on a GPU does after a device assert."""

    def __del__(self) -> None:
        os.abort()


class Misbehaves(GPT):
    """A user's model that fails in its own code, takes its process down as a bad kernel does, or waits for what never comes.

    `faults` names what it does by the size of the micro-batch, and how often; `folder` remembers how often it has.
    """

    SAMPLES_BEFORE = 64
    """Trained on by a process before the fault: more than the 32 after which the first checkpoint is saved."""

    def __init__(self, *, vocab_size: int, seq_len: int, faults: dict[str, tuple[str, int]], folder: str) -> None:
        super().__init__(vocab_size=vocab_size, seq_len=seq_len, num_layers=1, hidden_dim=32)
        self.faults, self.folder, self.num_samples = faults, Path(folder), 0

    def forward(self, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
        size = len(batch["input_ids"])
        if self.training:
            self.num_samples += size
        fault, times = self.faults.get(str(size), ("", 0))
        if self.num_samples >= self.SAMPLES_BEFORE and self._times_so_far(fault) < times:
            with (self.folder / fault).open("a") as file:
                file.write("x")
            self._do(fault)
        return super().forward(batch)

    def _times_so_far(self, fault: str) -> int:
        marker = self.folder / fault
        return len(marker.read_text()) if marker.is_file() else 0

    def _do(self, fault: str) -> None:
        if fault == "raises":
            _kept_by_the_traceback = EndsItsProcess()
            raise ArithmeticError("my own mistake")
        if fault == "exits":
            raise SystemExit(3)
        if fault == "crashes twice":
            ctypes.string_at(0)
        if fault == "hangs":
            threading.Event().wait()
        os.kill(os.getpid(), signal.SIGKILL)


class BatchNormModel(nn.Module):
    """Its statistics are those of a micro-batch, so a split of the batch is another experiment."""

    def __init__(self, *, vocab_size: int, seq_len: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocab_size, 16)
        self.norm = nn.BatchNorm1d(16)
        self.head = nn.Linear(16, vocab_size)

    def forward(self, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
        hidden = self.norm(self.embedding(batch["input_ids"]).flatten(0, 1))
        loss_sum = nn.functional.cross_entropy(self.head(hidden), batch["targets"].flatten(), reduction="sum")
        return loss_sum, torch.tensor(batch["targets"].numel())


class Points(list[Tensor]):
    """Points around (20, ..., 20), each coordinate with a deviation of 1."""


def points() -> tuple[Points, Points]:
    train, val = (20 + torch.randn(count, 8, generator=torch.Generator().manual_seed(count)) for count in (4096, 256))
    return Points(train), Points(val)


class Mean(nn.Module):
    """Learns where points lie: the steps count while it is far, and the samples once it is near. So its critical batch
    grows."""

    def __init__(self) -> None:
        super().__init__()
        self.place = nn.Parameter(torch.zeros(8))
        self.blocks = nn.ModuleList([nn.Identity()])

    def forward(self, batch: Tensor) -> tuple[Tensor, Tensor]:
        return ((self.place - batch) ** 2).sum() / 2, torch.tensor(len(batch))


def reading_a_value(module: nn.Module, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    """A user's loss that asks a tensor for its value, which a fake tensor does not have."""
    loss_sum, num_targets = module(batch)
    return loss_sum * (1 if loss_sum.item() > 0 else -1), num_targets


def over_the_longest(module: nn.Module, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    """A loss that two equal samples make twice as large, and that is no sum all the same."""
    loss_sum, num_targets = module(batch)
    return loss_sum / (batch["targets"] != -100).sum(1).max().clamp(min=1), num_targets


ON_TEXT: dict[str, Any] = {
    "name": "mine",
    "model": {"target": "gpt", "kwargs": {"num_layers": 1, "num_heads": 1, "hidden_dim": 8}},
    "data": {
        "target": "text",
        "kwargs": {"train": "train.txt", "val_fraction": 0.2, "seq_len": 8, "tokenizer": "bytes"},
    },
    "stages": [{"type": "grid", "compile": [False], "micro_batch_size": [2]}],
}
"""Trains on a file train.txt in the directory that the program runs in."""
