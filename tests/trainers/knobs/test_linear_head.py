"""Any model with a linear head computes the same loss and gradient in chunks, and the head is found or its absence explained."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch

from batchscout.trainers.before.first_pass import FirstPass, parts
from batchscout.trainers.before.prediction import predict
from batchscout.trainers.checkpoints.made_with import differences, made_with
from batchscout.trainers.config import TrialConfig
from batchscout.trainers.loop import train
from batchscout.trainers.model.linear_head import head_of
from batchscout.trainers.report import Answer, Report
from tests.support.labelled import data as labelled_data
from tests.support.ranks import on_two_ranks
from tests.support.tiny import config, cpu_run, data, gradient_of_step, in_fresh_process, relative_error

CHUNKED = ["chunked_cross_entropy"]
SPLIT = {"padded": True, "gradient_accumulation_steps": 2}
HEADED: dict[str, Any] = {
    "model": {"target": "tests.support.heads:Headed"},
    "loss": {"type": "cross_entropy", "targets": "targets"},
}
# Every way to a model with a linear head: torch's criterion with and without a bias, and two built-in models.
MODELS: dict[str, dict[str, Any]] = {
    "criterion": HEADED,
    "criterion, no bias": {**HEADED, "model": {"target": "tests.support.heads:Headed", "kwargs": {"bias": False}}},
    "gpt": {},
    "hf": {
        "model": {
            "target": "hf",
            "kwargs": {
                "model_type": "gpt2", "label_smoothing": 0.1,
                "config": {"n_layer": 2, "n_head": 2, "n_embd": 16, "n_positions": 16, "bos_token_id": 0, "eos_token_id": 0},
            },
        }
    },
    "transformers": {
        "model": {"target": "tests.support.labelled:tiny_llama"},
        "data": {"target": "tests.support.labelled:data"},
        "loss": "transformers",
    },
}  # fmt: skip


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize(("precision", "tolerance"), [("float32", 1e-6), ("bfloat16", 0.02)])
def test_chunks_give_the_same_loss_and_gradient(model: str, precision: str, tolerance: float) -> None:
    fields = SPLIT | MODELS[model] | {"precision": precision}
    (expected, loss), (found, same) = (first_step(**fields, memory_knobs=knobs) for knobs in ((), CHUNKED))
    assert relative_error(found, expected) < tolerance
    assert same == pytest.approx(loss, rel=min(tolerance, 1e-3))


def first_step(**fields: Any) -> tuple[torch.Tensor, float]:
    """(the gradient of the first step, its loss)"""
    run = cpu_run(config(**fields))
    return gradient_of_step(run), run.read()[0].loss


@pytest.mark.slow
def test_two_ranks_have_the_gradient_of_the_whole_batch(tmp_path: Path) -> None:
    """The loss takes the head's weights after DDP's forward, and their gradient meets all the same."""
    expected, loss = first_step(**SPLIT, **HEADED, micro_batch_size=4)
    for found, same in on_two_ranks(first_step_of_two_ranks, tmp_path):
        assert relative_error(found, expected) < 1e-5
        assert same == pytest.approx(loss, rel=1e-6)


def first_step_of_two_ranks() -> tuple[torch.Tensor, float]:
    return first_step(**SPLIT, **HEADED, micro_batch_size=2, world_size=2, memory_knobs=CHUNKED)


def test_a_target_that_does_not_count_may_be_any_number() -> None:
    fields = {**HEADED, "loss": {"type": "cross_entropy", "targets": "targets", "ignore_index": 3}}
    (expected, loss), (found, same) = (first_step(**fields, memory_knobs=knobs) for knobs in ((), CHUNKED))
    assert relative_error(found, expected) < 1e-6
    assert same == pytest.approx(loss)


def test_evaluations_and_names_of_weights_are_the_same() -> None:
    whole, chunked = cpu_run(config(**HEADED)), cpu_run(config(**HEADED, memory_knobs=CHUNKED))
    assert whole.module.state_dict().keys() == chunked.module.state_dict().keys()


@pytest.mark.parametrize(
    ("name", "why"),
    {
        "Capped": r"they are no linear layer's own output: it scales, caps, .*",
        "Sharpened": r"they are no linear layer's own output: .*",
        "Scaled": "the model writes into them after that layer: .*",
        "Masked": "the model writes into them after that layer: .*",
        "Twice": r"it \(head\) is called 2 times in a forward pass",
    }.items(),
)
def test_logits_that_are_not_the_heads_own_are_refused_with_the_way_out(name: str, why: str) -> None:
    trial = config(**headed(name), memory_knobs=CHUNKED)
    with pytest.raises(ValueError, match=f"{why}; return what an nn.Linear returns, or leave it out"):
        head_of(trial, data()[0])


def test_torch_says_nothing_of_a_model_that_cannot_be_followed(caplog: pytest.LogCaptureFixture) -> None:
    with pytest.raises(ValueError, match="fake tensors cannot follow it"):
        head_of(config(**labelled("mixture"), memory_knobs=CHUNKED), labelled_data()[0])
    assert caplog.records == []


def headed(name: str) -> dict[str, Any]:
    return {**HEADED, "model": {"target": f"tests.support.heads:{name}"}}


def labelled(name: str) -> dict[str, Any]:
    return {**MODELS["transformers"], "model": {"target": f"tests.support.labelled:{name}"}}


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        *((fields, "^$") for name, fields in MODELS.items() if name != "gpt"),
        ({**HEADED, "precision": "bfloat16"}, "^$"),
        ({**MODELS["transformers"], "precision": "bfloat16"}, "^$"),
        (labelled("with_z_loss"), r"the loss of its first samples is [\d.]+ in chunks, and [\d.]+ as it computes it"),
        (labelled("mixture"), r"the loss of its first samples is [\d.]+ in chunks, and [\d.]+ as it computes it"),
        (headed("Slowed"), r"the gradient of its first samples is \d+.\d\d% of its length away"),
        ({}, None),
        (headed("Capped"), None),
    ],
)  # fmt: skip
def test_a_first_pass_tells_whether_the_loss_in_chunks_is_the_models_own(
    fields: dict[str, Any], said: str | None
) -> None:
    """By numbers: what a model adds to its cross-entropy stands nowhere else."""
    *_, found = parts(config(**fields))
    assert isinstance(found, FirstPass)
    assert found.outcome == "passed"
    assert found.in_chunks is None if said is None else re.match(said, found.in_chunks or "")


def test_a_run_in_chunks_goes_on_from_its_checkpoint_alone() -> None:
    train_set, val_set = data()
    plain, chunked = config(**HEADED), config(**HEADED, memory_knobs=CHUNKED)
    found = differences(made_with(plain, train_set, val_set), made_with(chunked, train_set, val_set))
    assert list(found) == ["memory_knobs"]


@pytest.mark.slow
def test_the_prediction_sees_the_logits_go_and_so_does_the_process(tmp_path: Path) -> None:
    whole, chunked = (predict(with_many_logits(knobs)).bytes_at(8) for knobs in ([], CHUNKED))
    assert whole - chunked > 8 * 128 * 4096 * 4  # the logits of all targets
    assert in_fresh_process(peak_in_chunks, str(tmp_path)) == pytest.approx(chunked, abs=2 << 20)


def with_many_logits(knobs: list[str]) -> TrialConfig:
    data = {"target": "tests.support.tiny:data", "kwargs": {"seq_len": 128, "vocab_size": 4096}}
    short: dict[str, Any] = {"micro_batch_size": 8, "sample_budget": 16, "evaluation_samples": 0, "statistics": False}
    return config(**HEADED | {"data": data}, **short, memory_knobs=knobs)


def peak_in_chunks(folder: str) -> float:
    """Peak bytes of the second of two runs: a process's first run keeps what libraries need."""
    peaks = list[float]()

    def listen(said: Report) -> Answer:
        peaks.append(said.metrics["peak_memory_bytes"])
        return Answer.GO_ON

    for number in range(2):
        train(with_many_logits(CHUNKED), listen, Path(folder) / str(number))
    return peaks[-1]
