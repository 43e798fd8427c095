"""An optimizer that steps inside the backward pass leaves the same weights, and no gradient."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.tiny import assert_equal_bit_by_bit, config, cpu_run, newest_state, stop_at
from trainers.before.prediction import predict
from trainers.loop import train
from trainers.report import Answer

IN_BACKWARD = ["optimizer_in_backward"]
LLAMA = {
    "model": {"target": "tests.support.labelled:tiny_llama"},
    "data": {"target": "tests.support.labelled:data"},
    "loss": "transformers",
}


def unclipped(**changes: Any) -> Any:
    optimizer = {"max_gradient_norm": None} | changes.pop("optimizer", {})
    return config(**{"padded": True, **changes}, optimizer=optimizer)


def after(steps: int, **changes: Any) -> tuple[list[torch.Tensor], list[float], list[float]]:
    """(the weights, the losses and the gradient norms of so many steps)"""
    run = cpu_run(unclipped(**changes))
    for _ in range(steps):
        run.step()
    steps_read = run.read()
    return (
        [p.detach().clone() for p in run.parameters],
        [step.loss for step in steps_read],
        [step.gradient_norm for step in steps_read],
    )


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"optimizer": {"type": "sgd"}},
        {"optimizer": {"type": "adafactor"}},
        {"activation_checkpointing": "full", "dropout": 0.1},
        {"precision": "bfloat16"},
        {"memory_knobs": ["bfloat16_weights"], "precision": "bfloat16", "seed": 3},
        {"ema_half_life_samples": 8},
        {**LLAMA, "padded": False},
    ],
    ids=["adamw", "sgd", "adafactor", "checkpointed", "bfloat16", "bfloat16 weights", "average", "transformers"],
)
def test_the_weights_are_those_of_a_step_at_the_end(changes: dict[str, Any]) -> None:
    """To the bit; where updates are rounded at random, the draws come in another order, so only their size is the same."""
    knobs = changes.get("memory_knobs", [])
    plain, losses, norms = after(5, **changes)
    within, same, also = after(5, **changes | {"memory_knobs": [*knobs, *IN_BACKWARD]})
    if knobs:
        assert same == pytest.approx(losses, rel=0.02)
        return
    assert all(torch.equal(a, b) for a, b in zip(plain, within, strict=True))
    assert same == losses
    assert also == pytest.approx(norms, rel=1e-5)


def test_no_gradient_is_left_when_the_backward_pass_has_ended() -> None:
    run = cpu_run(unclipped(memory_knobs=IN_BACKWARD))
    run.step()
    assert all(p.grad is None for p in run.parameters)


def test_a_run_that_was_stopped_goes_on_to_the_same_weights(tmp_path: Path) -> None:
    trial = unclipped(memory_knobs=IN_BACKWARD, rungs=(32,), dropout=0.1, statistics=False)
    assert train(trial, lambda said: Answer.GO_ON, tmp_path / "whole") is Answer.GO_ON
    assert train(trial, stop_at(32), tmp_path / "halves") is Answer.STOP
    assert train(trial, lambda said: Answer.GO_ON, tmp_path / "halves") is Answer.GO_ON
    whole, halves = newest_state(tmp_path / "whole/checkpoints"), newest_state(tmp_path / "halves/checkpoints")
    assert_equal_bit_by_bit(whole, halves)


def test_the_noise_of_a_micro_batch_is_still_measured() -> None:
    run = cpu_run(unclipped(memory_knobs=IN_BACKWARD))
    for _ in range(10):
        run.step()
    run.read()
    assert run.metrics()["gradient_norm"] > 0


@pytest.mark.slow
def test_the_prediction_sees_the_gradients_go() -> None:
    """Where the weights are most of the memory, a gradient of all of them is what goes."""
    big = {"target": "gpt", "kwargs": {"num_layers": 4, "num_heads": 4, "hidden_dim": 128}}
    plain, within = (predict(unclipped(model=big, memory_knobs=knobs)) for knobs in ([], IN_BACKWARD))
    num_parameters = sum(p.numel() for p in cpu_run(unclipped(model=big)).parameters)
    assert plain.bytes_at(1) - within.bytes_at(1) > 0.5 * 4 * num_parameters
