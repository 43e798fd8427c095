"""Cross-entropy in chunks is the same loss with the same gradient, and holds less."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch

import trainers.gpt
from tests.support.ranks import on_two_ranks
from tests.support.tiny import config, cpu_run, gradient_of_step, in_fresh_process, relative_error
from trainers.gpt import GPT, HAS_CHUNKS
from trainers.memory import PeakMeter, give_back

SPLIT = {"padded": True, "micro_batch_size": 4, "gradient_accumulation_steps": 2}
LARGE_VOCABULARY = {"target": "tests.support.tiny:data", "kwargs": {"seq_len": 128, "vocab_size": 4096}}

needs_torch_2_13 = pytest.mark.skipif(not HAS_CHUNKS, reason="torch has no linear_cross_entropy before 2.13")


def gpt(cross_entropy: str) -> dict:
    return {
        "target": "gpt",
        "kwargs": {"num_layers": 2, "num_heads": 2, "hidden_dim": 16, "cross_entropy": cross_entropy},
    }


def step_with(cross_entropy: str, **changes: Any) -> tuple[torch.Tensor, float]:
    """(the gradient of the first step, its loss)"""
    run = cpu_run(config(model=gpt(cross_entropy), **(SPLIT | changes)))
    return gradient_of_step(run), run.read()[0].loss


@needs_torch_2_13
@pytest.mark.parametrize(
    ("precision", "tolerance"),
    [("float32", 1e-5), ("bfloat16", 0.02), ("float16", 0.005)],
    ids=lambda value: str(value),
)
def test_chunks_give_the_same_gradient_and_loss_in_every_precision(precision: str, tolerance: float) -> None:
    (whole, loss), (chunked, same) = (step_with(kind, precision=precision) for kind in ("whole", "chunked"))
    assert relative_error(chunked, whole) < tolerance
    assert same == pytest.approx(loss, rel=min(tolerance, 1e-3))


def of_two_ranks(parallel: str) -> tuple[torch.Tensor, float]:
    return step_with("chunked", micro_batch_size=2, world_size=2, parallel=parallel)


@pytest.mark.slow
@needs_torch_2_13
@pytest.mark.parametrize("parallel", ["ddp", "fsdp"])
def test_chunks_give_the_same_gradient_on_two_ranks(tmp_path: Path, parallel: str) -> None:
    whole, loss = step_with("whole")
    for chunked, same in on_two_ranks(of_two_ranks, tmp_path, parallel):
        assert relative_error(chunked, whole) < 1e-5
        assert same == pytest.approx(loss, rel=1e-6)


def peaks_of_a_step() -> dict[str, float]:
    peaks = {}
    for kind in ("whole", "chunked"):
        run = cpu_run(config(model=gpt(kind), data=LARGE_VOCABULARY, micro_batch_size=16))
        run.step()
        give_back()
        meter = PeakMeter(torch.device("cpu"))
        run.step()
        peaks[kind] = meter.peak_bytes()
        del run
    return peaks


@pytest.mark.slow
@needs_torch_2_13
def test_chunks_never_hold_the_logits() -> None:
    """16 x 128 x 4,096 logits in float32 are 32 MiB, their softmax and its gradient as much again."""
    peaks = in_fresh_process(peaks_of_a_step)
    assert peaks["chunked"] < peaks["whole"] - 60 * 2**20, peaks


def test_another_name_is_refused_with_those_there_are() -> None:
    with pytest.raises(ValueError, match="cross_entropy is 'some'; choose whole or chunked"):
        GPT(vocab_size=24, seq_len=12, cross_entropy="some")  # pyright: ignore[reportArgumentType]


def test_a_torch_without_it_is_named_with_the_one_that_has_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trainers.gpt, "HAS_CHUNKS", False)
    with pytest.raises(ValueError, match=re.escape("install torch 2.13 or later, or use 'whole'")):
        GPT(vocab_size=24, seq_len=12, cross_entropy="chunked")
