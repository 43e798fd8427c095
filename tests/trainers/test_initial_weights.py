"""A run begins with exactly the weights in a file, and a file of other weights is refused by name."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from batchscout.trainers.loop import train
from batchscout.trainers.model.gpt import GPT
from batchscout.trainers.model.models import load_weights
from batchscout.trainers.report import Answer
from tests.support.tiny import config, cpu_run

Weights = dict[str, Tensor]


def gpt() -> GPT:
    torch.manual_seed(7)
    return GPT(vocab_size=24, seq_len=12, num_layers=2, num_heads=2, hidden_dim=16)


def as_torch(module: nn.Module, path: Path) -> Path:
    torch.save(module.state_dict(), path.with_suffix(".pt"))
    return path.with_suffix(".pt")


def as_safetensors(module: nn.Module, path: Path) -> Path:
    """It leaves out the tied head."""
    from safetensors.torch import save_model

    save_model(module, str(path.with_suffix(".safetensors")))
    return path.with_suffix(".safetensors")


@pytest.mark.parametrize("write", [as_torch, as_safetensors])
def test_a_run_begins_with_the_weights_in_the_file(tmp_path: Path, write: Callable[[nn.Module, Path], Path]) -> None:
    module = gpt()
    run = cpu_run(config(initial_weights=str(write(module, tmp_path / "weights"))))
    state, named = run.module.state_dict(), dict(module.named_parameters())
    assert all(torch.equal(state[name], tensor) for name, tensor in module.state_dict().items())
    assert all(
        torch.equal(run.initial_weights(Path("/nowhere"))[name], tensor.double()) for name, tensor in named.items()
    )
    assert isinstance(run.module, GPT)
    assert run.module.head.weight is run.module.token_embedding.weight


def without(name: str) -> Callable[[Weights], Any]:
    return lambda weights: {key: tensor for key, tensor in weights.items() if key != name}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (without("blocks.1.up.weight"), "it lacks blocks.1.up.weight; save model.state_dict"),
        (lambda weights: weights | {"extra": torch.ones(1)}, "it has, unknown to the model, extra;"),
        (lambda weights: weights | {"norm.bias": torch.ones(3)}, r"it has in another shape norm.bias \(3, not 16\)"),
        (lambda weights: {f"module.{name}": one for name, one in weights.items()}, r"lacks .*, .*, .* and \d+ more; it has, unknown to the model, module\."),
        (lambda weights: {"model": weights, "step": 3}, "holds model, step, not tensors by their names; save model.state_dict"),
        (lambda weights: [1], "holds a list, not tensors"),
    ],
    ids=["missing", "unknown", "shape", "prefix", "a checkpoint", "no dict"],
)  # fmt: skip
def test_weights_of_another_model_are_refused_by_name(
    tmp_path: Path, change: Callable[[Weights], Any], message: str
) -> None:
    torch.save(change(gpt().state_dict()), tmp_path / "weights.pt")
    with pytest.raises(ValueError, match=message):
        load_weights(gpt(), tmp_path / "weights.pt")


@pytest.mark.parametrize("suffix", [".pt", ".safetensors"])
def test_a_file_that_is_none_is_refused_with_what_would_be(tmp_path: Path, suffix: str) -> None:
    path = (tmp_path / "weights").with_suffix(suffix)
    with pytest.raises(ValueError, match=r"there is no file .*weights.*; check the path"):
        load_weights(gpt(), path)
    path.write_text("no weights")
    with pytest.raises(ValueError, match=r"cannot be read \(.*\); write it with torch.save"):
        load_weights(gpt(), path)


class ToldItsSize(GPT):
    """Its state has what it was made with, too."""

    def state_dict(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        return super().state_dict(*args, **kwargs) | {"_size": {"dim": 8}}


def test_what_is_no_tensor_in_the_state_of_a_model_may_stand_in_its_file(tmp_path: Path) -> None:
    saved, loaded = (ToldItsSize(vocab_size=24, seq_len=12, num_layers=2, num_heads=2, hidden_dim=16) for _ in range(2))
    torch.save(saved.state_dict(), tmp_path / "weights.pt")
    load_weights(loaded, tmp_path / "weights.pt")
    torch.testing.assert_close(dict(loaded.named_parameters()), dict(saved.named_parameters()), rtol=0, atol=0)


@pytest.mark.slow
def test_a_run_that_begins_where_another_ended_begins_with_its_loss(tmp_path: Path) -> None:
    """Finetuning, for real: trained on the same task before, it begins where a run from random weights ends."""
    firsts: list[float] = []

    def report(said: Any) -> Answer:
        firsts.extend(step.loss for step in said.steps[:1])
        return Answer.GO_ON

    first = {
        "sample_budget": 512,
        "save_weights": True,
        "data": {"target": "tests.support.tiny:data", "kwargs": {"num_train": 512}},
    }
    train(config(**first), report, tmp_path / "first")
    saved: Weights = torch.load(tmp_path / "first" / "weights.pt")["final"]
    torch.save({name: tensor.float() for name, tensor in saved.items()}, tmp_path / "weights.pt")
    train(config(learning_rate=1e-4, initial_weights=str(tmp_path / "weights.pt")), report, tmp_path / "second")
    assert firsts[0] > 3.0  # log 24 is 3.2
    assert firsts[1] < 1.5
