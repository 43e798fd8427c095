"""The memory that is predicted is the memory that is measured, and the prediction never takes its caller with it."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.tiny import config, data, in_fresh_process
from trainers.config import TrialConfig
from trainers.data import fetch
from trainers.prediction import PROCESS_BYTES, NotPredictable, _live_bytes, predict, predict_in_own_process

CPU = torch.device("cpu")
MODES = ["none", "selective", "full"]
SIZES = [2, 16]


# Traced


def sized(**changes: Any) -> TrialConfig:
    """A model whose step takes some tens of MiB."""
    return config(**{
        "model": {"target": "gpt", "kwargs": {"num_layers": 4, "num_heads": 4, "hidden_dim": 192}},
        "data": {"target": "tests.tiny:data", "kwargs": {"seq_len": 128, "vocab_size": 2048}},
        "evaluation_samples": 0, "gradient_accumulation_steps": 2, "sample_budget": 10_000,
    } | changes)  # fmt: skip


@pytest.mark.parametrize("mode", MODES)
def test_two_traces_tell_what_a_trace_at_any_other_size_would(mode):
    trial = sized(activation_checkpointing=mode)
    train_set, _ = data(seq_len=128, vocab_size=2048)
    predicted = predict(trial)
    for size in (3, 21, 100):
        traced = max(_live_bytes(trial.model_copy(update={"micro_batch_size": size}), train_set, fetch(train_set, [0])))
        assert predicted.bytes_at(size) == pytest.approx(traced + PROCESS_BYTES, rel=1e-9)


def measured(changes: dict[str, Any], rehearsed: bool) -> list[float]:
    """The peaks of short runs at SIZES; rehearsed: of the second such run."""
    from trainers.compilation import warm_up
    from trainers.memory import give_back
    from trainers.run import Run

    peaks = []
    for size in SIZES:
        trial = sized(**changes, micro_batch_size=size)
        warm_up(trial, CPU)
        for _ in range(1 + rehearsed):
            run = Run(trial, CPU)
            for _ in range(2):
                run.step()
            run.read()
            peak = run.metrics()["peak_memory_bytes"]
            del run
            give_back()
        peaks.append(peak)
    return peaks


@pytest.mark.parametrize("mode", MODES)
def test_an_eager_run_takes_what_was_predicted(mode):
    predicted = predict(sized(activation_checkpointing=mode))
    peaks = in_fresh_process(measured, {"activation_checkpointing": mode}, False)
    assert [predicted.bytes_at(size) for size in SIZES] == pytest.approx(peaks, rel=0.05)


@pytest.mark.parametrize(
    "changes",
    [
        {"precision": "bfloat16"},
        {"optimizer": {"type": "sgd"}, "ema_half_life_samples": 100, "gradient_accumulation_steps": 1},
    ],
    ids=["bfloat16", "sgd-average-no-accumulation"],
)
def test_precision_optimizer_average_and_accumulation_count_as_they_are_measured(changes):
    """Rehearsed: oneDNN keeps the kernels that it writes for a new shape, in low precision some MiB of them."""
    predicted = predict(sized(**changes))
    peaks = in_fresh_process(measured, changes, True)
    assert [predicted.bytes_at(size) for size in SIZES] == pytest.approx(peaks, rel=0.05)


# In a process of its own


class ReadsAValue(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2))

    def forward(self, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
        print("a user's model may print")
        loss = self.weight.sum() * batch["targets"].shape[0]
        return (loss if loss.item() > 0 else -loss), torch.tensor(1)


class EndsTheProcess(ReadsAValue):
    def forward(self, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
        os._exit(3)


def users_model(name: str) -> dict[str, Any]:
    return {"model": {"target": f"tests.test_prediction:{name}"}}


def test_what_fake_tensors_cannot_follow_is_said_and_takes_neither_the_others_nor_the_caller_with_it():
    fine = sized()
    reads, ends = config(**users_model("ReadsAValue")), config(**users_model("EndsTheProcess"))
    first, read, ended, last = predict_in_own_process([fine, reads, ends, fine])
    assert first == last == predict(fine)
    assert isinstance(read, NotPredictable)
    assert "DataDependentOutputException" in str(read)
    assert isinstance(ended, NotPredictable)
    assert "exit code 3" in str(ended)


def test_bad_input_stays_bad_input_in_the_users_words():
    with pytest.raises(ValueError, match=r"hidden_dim \(10\) is not a multiple of num_heads \(3\)"):
        predict_in_own_process([sized(model={"target": "gpt", "kwargs": {"hidden_dim": 10, "num_heads": 3}})])


def test_shards_are_not_predicted():
    with pytest.raises(NotPredictable, match="parallel: fsdp"):
        predict(sized(parallel="fsdp", world_size=2))
