"""Cross-entropy in chunks is the same loss with the same gradient, and holds less."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from batchscout.trainers.model.chunked_loss import NUM_CHUNKS
from batchscout.trainers.model.cross_entropy import chunked_cross_entropy, summed_cross_entropy
from batchscout.trainers.model.gpt import GPT
from tests.support.ranks import on_two_ranks
from tests.support.tiny import config, cpu_run, gradient_of_step, in_fresh_process, peak_of_second_step, relative_error

SPLIT = {"padded": True, "micro_batch_size": 4, "gradient_accumulation_steps": 2}
LARGE_VOCABULARY = {"target": "tests.support.tiny:data", "kwargs": {"seq_len": 128, "vocab_size": 4096}}


def gpt(cross_entropy: str) -> dict:
    return {
        "target": "gpt",
        "kwargs": {"num_layers": 2, "num_heads": 2, "hidden_dim": 16, "cross_entropy": cross_entropy},
    }


def step_with(cross_entropy: str, **changes: Any) -> tuple[torch.Tensor, float]:
    """(the gradient of the first step, its loss)"""
    run = cpu_run(config(model=gpt(cross_entropy), **(SPLIT | changes)))
    return gradient_of_step(run), run.read()[0].loss


@pytest.mark.parametrize(
    ("precision", "tolerance"),
    [("float32", 1e-5), ("bfloat16", 0.02), ("float16", 0.005)],
    ids=lambda value: str(value),
)
def test_chunks_give_the_same_gradient_and_loss_in_every_precision(precision: str, tolerance: float) -> None:
    (whole, loss), (chunked, same) = (step_with(kind, precision=precision) for kind in ("whole", "chunked"))
    assert relative_error(chunked, whole) < tolerance
    assert same == pytest.approx(loss, rel=min(tolerance, 1e-3))


@pytest.mark.parametrize("num_targets", [1, NUM_CHUNKS, 5 * NUM_CHUNKS + 3])
@pytest.mark.parametrize("label_smoothing", [0.0, 0.1])
def test_chunks_agree_with_the_whole_at_every_size_and_where_whole_chunks_do_not_count(
    num_targets: int, label_smoothing: float
) -> None:
    torch.manual_seed(0)
    hidden, weight = torch.randn(1, num_targets, 8).double(), torch.randn(50, 8).double()
    targets = torch.randint(0, 50, (1, num_targets))
    targets[:, num_targets // 2 + 1 :: 2] = -100
    targets[:, -(num_targets // 4) :] = -100 if num_targets > 3 else 7
    found = []
    for how in ("whole", "chunked"):
        x, w = hidden.clone().requires_grad_(), weight.clone().requires_grad_()
        whole, chunked = summed_cross_entropy, chunked_cross_entropy
        loss, count = (
            whole(x @ w.t(), targets, label_smoothing) if how == "whole" else chunked(x, w, targets, label_smoothing)
        )
        (loss / 7).backward()
        assert x.grad is not None
        assert w.grad is not None
        found.append((loss.double().reshape(1), count.reshape(1), x.grad, w.grad))
    for whole, chunked in zip(*found, strict=True):
        torch.testing.assert_close(chunked, whole, rtol=1e-6, atol=1e-7)


def test_chunks_give_the_loss_where_no_gradient_is_wanted_and_a_gradient_once() -> None:
    hidden, weight, targets = torch.randn(2, 20, 8), torch.randn(50, 8), torch.randint(0, 50, (2, 20))
    with torch.no_grad():
        loss, count = chunked_cross_entropy(hidden, weight, targets)
    assert count == 40
    assert loss.item() == pytest.approx(summed_cross_entropy(hidden @ weight.t(), targets)[0].item(), rel=1e-6)
    loss, _ = chunked_cross_entropy(hidden.requires_grad_(), weight, targets)
    loss.backward()
    with pytest.raises(RuntimeError, match="second time"):
        loss.backward()


def of_two_ranks(parallel: str) -> tuple[torch.Tensor, float]:
    return step_with("chunked", micro_batch_size=2, world_size=2, parallel=parallel)


@pytest.mark.slow
@pytest.mark.parametrize("parallel", ["ddp", "fsdp"])
def test_chunks_give_the_same_gradient_on_two_ranks(tmp_path: Path, parallel: str) -> None:
    whole, loss = step_with("whole")
    for chunked, same in on_two_ranks(of_two_ranks, tmp_path, parallel):
        assert relative_error(chunked, whole) < 1e-5
        assert same == pytest.approx(loss, rel=1e-6)


def peaks_of_a_step() -> dict[str, float]:
    large: dict[str, Any] = {"data": LARGE_VOCABULARY, "micro_batch_size": 16}
    return {kind: peak_of_second_step(config(model=gpt(kind), **large)) for kind in ("whole", "chunked")}


@pytest.mark.slow
def test_chunks_never_hold_the_logits() -> None:
    """16 x 128 x 4,096 logits in float32 are 32 MiB, their softmax and its gradient as much again."""
    peaks = in_fresh_process(peaks_of_a_step)
    assert peaks["chunked"] < peaks["whole"] - 60 * 2**20, peaks


def test_another_name_is_refused_with_those_there_are() -> None:
    with pytest.raises(ValueError, match="cross_entropy is 'some'; choose whole or chunked"):
        GPT(vocab_size=24, seq_len=12, cross_entropy="some")  # pyright: ignore[reportArgumentType]


@pytest.mark.compiled
@pytest.mark.filterwarnings(
    "ignore:The .grad attribute of a Tensor that is not a leaf"
)  # the compiler's own look at it
def test_a_compiled_model_calls_the_chunks_and_does_not_unroll_them() -> None:
    """Unrolled, they would stand in its graphs as one product of hidden and head for each chunk."""
    torch.manual_seed(0)
    hidden, targets = torch.randn(2, 16, 8), torch.randint(0, 50, (2, 16))
    graphs: list[torch.fx.GraphModule] = []

    def keep(graph: torch.fx.GraphModule, _: object) -> Any:
        graphs.append(graph)
        return graph.forward

    def loss_of(how: Any) -> tuple[torch.Tensor, torch.Tensor]:
        weight = torch.linspace(-1, 1, 400).view(50, 8).requires_grad_()
        loss, _ = how(hidden * 2, weight, targets)
        (loss * 3).backward()
        assert weight.grad is not None
        return loss.detach(), weight.grad

    torch.testing.assert_close(
        loss_of(torch.compile(chunked_cross_entropy, backend=keep)), loss_of(chunked_cross_entropy)
    )
    assert graphs
    assert not any("log_softmax" in str(node.target) for graph in graphs for node in graph.graph.nodes)
