"""Small studies that run in seconds, and what a user's own module may do wrong."""

from __future__ import annotations

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

from orchestrator.config.keys import StudyConfig
from orchestrator.config.load import parse_study
from trainers.gpt import GPT

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


class RaisesAfter(GPT):
    """A user's model that fails in its own code after some forward passes."""

    def __init__(self, *, vocab_size: int, seq_len: int, passes: int, message: str) -> None:
        super().__init__(vocab_size=vocab_size, seq_len=seq_len, num_layers=1, hidden_dim=32)
        self.passes_left, self.message = passes, message

    def forward(self, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
        self.passes_left -= 1
        if self.passes_left < 0 and self.training:
            raise ArithmeticError(self.message)
        return super().forward(batch)


class SaysWhereItIs(GPT):
    """A model that leaves its process's number in a file whenever it is built."""

    def __init__(self, *, vocab_size: int, seq_len: int, log: str) -> None:
        super().__init__(vocab_size=vocab_size, seq_len=seq_len, num_layers=1, hidden_dim=32)
        with Path(log).open("a") as file:
            file.write(f"{os.getpid()}\n")


class LogsItsBatches(GPT):
    """A model that leaves in a file when and where it is built, and the checksum of every batch that it trains on."""

    def __init__(self, *, vocab_size: int, seq_len: int, log: str) -> None:
        super().__init__(vocab_size=vocab_size, seq_len=seq_len, num_layers=1, hidden_dim=32)
        self.log = Path(log)
        self._append(time=time.time())

    def forward(self, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
        if self.training:
            time.sleep(0.02)  # slow enough to be caught in the act
            self._append(batch=zlib.crc32(batch["input_ids"].numpy().tobytes()))
        return super().forward(batch)

    def _append(self, **fields: float) -> None:
        with self.log.open("a") as file:
            file.write(json.dumps({"pid": os.getpid(), **fields}) + "\n")


class KillsItsProcess(GPT):
    """A user's model that takes its process down, as a bad kernel does; as often as `marker` does not say enough."""

    def __init__(self, *, vocab_size: int, seq_len: int, marker: str, times: int) -> None:
        super().__init__(vocab_size=vocab_size, seq_len=seq_len, num_layers=1, hidden_dim=32)
        self.marker, self.times, self.passes = Path(marker), times, 0

    def forward(self, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
        self.passes += 1
        died = len(self.marker.read_text()) if self.marker.exists() else 0
        if self.passes == 12 and died < self.times:
            self.marker.write_text("x" * (died + 1))
            os.kill(os.getpid(), signal.SIGKILL)
        return super().forward(batch)


class HangsOnce(GPT):
    """A user's model that waits for ever for what never comes, unless `marker` says that it has done so."""

    def __init__(self, *, vocab_size: int, seq_len: int, marker: str) -> None:
        super().__init__(vocab_size=vocab_size, seq_len=seq_len, num_layers=1, hidden_dim=32)
        self.marker, self.passes = Path(marker), 0

    def forward(self, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
        self.passes += 1
        if self.passes == 12 and not self.marker.exists():
            self.marker.touch()
            threading.Event().wait()
        return super().forward(batch)


class BatchNormModel(nn.Module):
    """Its statistics are those of a micro-batch, so a split of the batch is another experiment."""

    def __init__(self, *, vocab_size: int, seq_len: int) -> None:


def reading_a_value(module: nn.Module, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    """A user's loss that asks a tensor for its value, which a fake tensor does not have."""
    loss_sum, num_targets = module(batch)
    return loss_sum * (1 if loss_sum.item() > 0 else -1), num_targets
        super().__init__()
        self.embedding = nn.Embedding(vocab_size, 16)
        self.norm = nn.BatchNorm1d(16)
        self.head = nn.Linear(16, vocab_size)

    def forward(self, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
        hidden = self.norm(self.embedding(batch["input_ids"]).flatten(0, 1))
        loss_sum = nn.functional.cross_entropy(self.head(hidden), batch["targets"].flatten(), reduction="sum")
        return loss_sum, torch.tensor(batch["targets"].numel())
