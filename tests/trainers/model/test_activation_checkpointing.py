"""What is recomputed changes memory, not the gradient, and no parameter's name."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import CheckpointPolicy

from batchscout.trainers.device.memory import MALLOC_ENVIRONMENT
from batchscout.trainers.model.activation_checkpointing import apply_to_blocks, selective_policy
from batchscout.trainers.model.models import initial_module
from tests.support.every import for_every
from tests.support.ranks import on_two_ranks
from tests.support.tiny import config, cpu_run, gradient_of_step, in_fresh_process, peak_of_second_step, relative_error

pytestmark = [
    # torch's own: its compiler imports torch.utils.mkldnn, which still uses torch.jit.
    pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated:DeprecationWarning"),
    # torch's own: dynamo looks at .grad of every input of a graph when it makes a fake one of it.
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning"),
]

EAGER = ["none", "selective", "full"]
MIB = 1 << 20


class WithoutBlocks(nn.Module):
    """A user's model that repeats nothing."""

    def __init__(self, vocab_size: int) -> None:
        super().__init__()
        self.table = nn.Embedding(vocab_size, vocab_size)

    def forward(self, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
        losses = nn.functional.cross_entropy(self.table(batch["input_ids"]).flatten(0, 1), batch["targets"].flatten())
        return losses.sum(), torch.tensor(batch["targets"].numel())


class NormedBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm = nn.Linear(8, 8), nn.BatchNorm1d(8)

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(self.norm(self.linear(x)))


class Normed(nn.Module):
    """With BatchNorm in its repeated blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(NormedBlock() for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


def gradient(mode: str | float, *, compile: bool = False, dropout: float = 0.1) -> Tensor:
    trial = config(
        padded=True, dropout=dropout, activation_checkpointing=mode, compile=compile, gradient_accumulation_steps=2
    )
    return gradient_of_step(cpu_run(trial))


def test_full_checkpointing_gives_the_same_gradient_bit_by_bit_with_dropout() -> None:
    assert torch.equal(gradient("full"), gradient("none"))


def test_selective_checkpointing_gives_the_same_gradient_with_dropout() -> None:
    assert relative_error(gradient("selective"), gradient("none")) <= 1e-6


def statistics_after_a_step(mode: str, *, compile: bool = False) -> Tensor:
    torch.manual_seed(0)
    model = apply_to_blocks(Normed(), config(activation_checkpointing=mode, compile=compile))
    model(torch.rand(4, 8)).sum().backward()
    return torch.cat([buffer.flatten() for buffer in model.buffers()])


@pytest.mark.parametrize("mode", ["selective", "full"])
@pytest.mark.parametrize("compile", [False, pytest.param(True, marks=pytest.mark.compiled)])
def test_batch_norm_takes_each_batch_in_once_though_its_forward_runs_twice(mode: str, compile: bool) -> None:
    once = statistics_after_a_step("none")
    assert torch.allclose(statistics_after_a_step(mode, compile=compile), once, rtol=1e-5)


def test_dropout_was_on() -> None:
    assert relative_error(gradient("none"), gradient("none", dropout=0.0)) > 0.01


@pytest.mark.parametrize(("dropout", "saved"), [(0.0, True), (0.1, False)])
def test_attention_that_draws_dropout_is_computed_again(dropout: float, saved: bool) -> None:
    """Left out of the recomputation it would leave its random numbers to the layer after it."""
    q = torch.zeros(1, 1, 2, 2)
    flash = torch.ops.aten._scaled_dot_product_flash_attention.default
    efficient = torch.ops.aten._scaled_dot_product_efficient_attention.default
    expected = CheckpointPolicy.MUST_SAVE if saved else CheckpointPolicy.PREFER_RECOMPUTE
    assert selective_policy(None, flash, q, q, q, dropout, True) is expected
    assert selective_policy(None, efficient, q, q, q, None, True, dropout_p=dropout) is expected


def peaks_of_a_step() -> dict[str, float]:
    """In each mode."""
    large = {
        "model": {"target": "gpt", "kwargs": {"num_layers": 6, "num_heads": 4, "hidden_dim": 64}},
        "data": {"target": "tests.support.tiny:data", "kwargs": {"seq_len": 64}},
        "micro_batch_size": 32,
    }
    return {mode: peak_of_second_step(config(activation_checkpointing=mode, **large)) for mode in EAGER}


@pytest.mark.slow
def test_peak_memory_falls_from_none_over_selective_to_full() -> None:
    peaks = in_fresh_process(peaks_of_a_step)
    assert peaks["none"] > 1.2 * peaks["selective"] > 1.2 * 1.2 * peaks["full"], (peaks, MALLOC_ENVIRONMENT)


def bytes_kept_for_backward(mode: str | float) -> int:
    """By a step of a run that compiles, in this process and whatever ran in it before."""
    kept = 0

    def count(tensor: Tensor) -> Tensor:
        nonlocal kept
        kept += tensor.numel() * tensor.element_size()
        return tensor

    run = cpu_run(config(activation_checkpointing=mode, compile=True))
    with torch.autograd.graph.saved_tensors_hooks(count, lambda tensor: tensor):
        run.step()
    return kept


@pytest.mark.compiled
def test_compiled_modes_give_the_same_gradient_and_keep_less_even_after_one_another() -> None:
    expected = gradient("none", dropout=0.0)
    for mode in ("none", "full", 0.5):
        assert relative_error(gradient(mode, compile=True, dropout=0.0), expected) <= 1e-5
    kept = {mode: bytes_kept_for_backward(mode) for mode in ("none", 0.5, "full")}
    assert all(more > less for more, less in pairwise(kept.values())), kept


ONE_BLOCK = {"target": "gpt", "kwargs": {"num_layers": 1, "num_heads": 2, "hidden_dim": 16}}


def gradient_in_one_graph(**changes: Any) -> Tensor:
    trial = {"padded": True, "model": ONE_BLOCK, "compile": "whole", "micro_batch_size": 2}
    return gradient_of_step(cpu_run(config(**(trial | changes))))


@pytest.mark.compiled
def test_the_model_as_one_graph_gives_the_same_gradient_at_every_size() -> None:
    for size in (4, 8):
        expected = gradient_in_one_graph(compile=False, micro_batch_size=size)
        found = gradient_in_one_graph(micro_batch_size=size, activation_checkpointing="full", dynamic_micro_batch=True)
        assert relative_error(found, expected) <= 1e-5


def one_graph_on_two_ranks() -> Tensor:
    return gradient_in_one_graph(world_size=2)


@pytest.mark.compiled
def test_the_model_as_one_graph_gives_the_same_gradient_on_two_ranks(tmp_path: Path) -> None:
    expected = gradient_in_one_graph(compile=False, micro_batch_size=4)
    for found in on_two_ranks(one_graph_on_two_ranks, tmp_path):
        assert relative_error(found, expected) <= 1e-5


def peaks_of_what_is_compiled() -> dict[str, float]:
    """With a large head."""
    data = {"target": "tests.support.tiny:data", "kwargs": {"seq_len": 128, "vocab_size": 4096}}
    large: dict[str, Any] = {"model": ONE_BLOCK, "data": data, "micro_batch_size": 16}
    return {str(compiled): peak_of_second_step(config(compile=compiled, **large)) for compiled in (False, "whole")}


@pytest.mark.compiled
def test_head_and_loss_take_less_memory_in_one_graph_with_the_model() -> None:
    """16 x 128 x 4,096 logits in float32 are 32 MiB: eager code holds them, their logarithms and two gradients."""
    peaks = in_fresh_process(peaks_of_what_is_compiled)
    assert peaks["whole"] < peaks["False"] - 30 * MIB, peaks


def names(mode: str | float, **changes: Any) -> list[str]:
    return list(cpu_run(config(activation_checkpointing=mode, **changes)).state(None)["model"])


def test_parameters_have_the_same_names_in_every_mode() -> None:
    plain = config()
    expected = list(initial_module(plain, cpu_run(plain).train_set).state_dict())
    for mode in EAGER:
        assert names(mode) == names(mode, compile=True) == names(mode, compile="whole") == expected
    assert names(0.5, compile=True) == expected


@for_every(written_by=EAGER, read_by=EAGER)
def test_a_state_written_in_one_mode_loads_in_another(written_by: str, read_by: str) -> None:
    first = cpu_run(config(activation_checkpointing=written_by), steps=1)
    for compiled in (False, "whole"):  # as long as no step is made, nothing is compiled
        second = cpu_run(config(activation_checkpointing=read_by, compile=compiled))
        second.module.load_state_dict(first.state(None)["model"])
        assert all(torch.equal(a, b) for a, b in zip(first.parameters, second.parameters, strict=True))


def test_a_memory_budget_without_the_compiler_is_refused() -> None:
    with pytest.raises(
        ValueError, match=r"0\.5 is a memory budget, which only the compiler can keep; set compile: true"
    ):
        cpu_run(config(activation_checkpointing=0.5))


@pytest.mark.parametrize("mode", ["selective", "full"])
def test_a_model_without_repeated_blocks_is_refused(mode: str) -> None:
    model = {"target": "tests.trainers.model.test_activation_checkpointing:WithoutBlocks"}
    with pytest.raises(ValueError, match=rf"'{mode}' needs repeated blocks.* or use 'none'"):
        cpu_run(config(model=model, activation_checkpointing=mode))
    cpu_run(config(model=model)).step()
