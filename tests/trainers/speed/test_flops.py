"""The FLOPs of a step are those that a formula gives where there is one, whatever computes them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from batchscout.trainers.config import TrialConfig
from batchscout.trainers.model.models import build_model
from batchscout.trainers.speed.flops import Work, flops_per_sample, work_of
from tests.support.map_style import map_style_sets
from tests.support.tiny import config

VOCAB, LAYERS, DIM = 64, 2, 16


def trial(target: str = "gpt", seq_len: int = 12, **changes: Any) -> TrialConfig:
    gpt = {"num_layers": LAYERS, "num_heads": 2, "hidden_dim": DIM}
    model: dict[str, Any] = {"target": target, "kwargs": gpt if target == "gpt" else {}}
    if kwargs := changes.pop("kwargs", None):
        model["kwargs"] |= kwargs
    data = {"target": "tests.support.tiny:data", "kwargs": {"num_train": 4, "seq_len": seq_len, "vocab_size": VOCAB}}
    fields: dict[str, Any] = {"model": model, "data": data}
    return config(**(fields | changes))


def counted(asked: TrialConfig) -> Work | None:
    train_set, _ = map_style_sets(asked.data)
    return work_of(asked, build_model(asked.model, train_set).train(), train_set)


def model_flops(asked: TrialConfig) -> float:
    found = counted(asked)
    assert found is not None
    return found.model_flops


def gpt_formula(seq_len: int) -> int:
    """(6 N + 12 L H Q T) T, with N the parameters that multiply; the tied head is one of them."""
    weights = VOCAB * DIM + LAYERS * 12 * DIM**2
    return (6 * weights + 12 * LAYERS * DIM * seq_len) * seq_len


@pytest.mark.parametrize("seq_len", [256, 1024])
def test_a_gpt_has_the_flops_of_the_formula_and_attention_counts_in_full(seq_len: int) -> None:
    assert model_flops(trial(seq_len=seq_len)) == gpt_formula(seq_len)
    assert flops_per_sample(trial(seq_len=seq_len)) == gpt_formula(seq_len)


@pytest.mark.parametrize("kwargs", [{"cross_entropy": "chunked"}, {"dropout": 0.1}], ids=str)
def test_neither_chunks_nor_dropout_which_takes_attention_apart_change_the_work(kwargs: dict[str, Any]) -> None:
    assert model_flops(trial(kwargs=kwargs)) == gpt_formula(12)


def test_full_checkpointing_runs_the_blocks_forward_once_more_but_for_their_last_product() -> None:
    found = counted(trial(activation_checkpointing="full"))
    blocks = LAYERS * (2 * 12 * DIM**2 + 4 * DIM * 12) * 12
    last_products = LAYERS * 2 * 4 * DIM**2 * 12
    assert found == Work(gpt_formula(12), gpt_formula(12) + blocks - last_products)


def test_selective_checkpointing_keeps_all_products_and_of_a_budget_only_the_compiler_knows() -> None:
    assert counted(trial(activation_checkpointing="selective")) == Work(gpt_formula(12), gpt_formula(12))
    assert counted(trial(activation_checkpointing=0.5, compile=True)) == Work(gpt_formula(12), None)


class Images(nn.Module):
    """Reads the tokens as if they were the pixels of 3 x 8 x 8 images."""

    def forward(self, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
        pixels = batch["input_ids"].float().view(-1, 3, 8, 8)
        return self.scores(pixels).sum(), torch.tensor(len(pixels))

    def scores(self, pixels: Tensor) -> Tensor:
        raise NotImplementedError


class Convolutions(Images):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm = nn.Conv2d(3, 4, 3, padding=1), nn.BatchNorm2d(4)
        self.second, self.head = nn.Conv2d(4, 6, 3, stride=2, padding=1, groups=2), nn.Linear(6, 5)

    def scores(self, pixels: Tensor) -> Tensor:
        return self.head(self.second(F.relu(self.norm(self.first(pixels)))).mean((2, 3)))


def test_convolutions_are_counted_and_the_pixels_need_no_gradient() -> None:
    first, second, head = 2 * 4 * 27 * 64, 2 * 6 * 18 * 16, 2 * 6 * 5
    asked = trial(f"{__name__}:Convolutions", seq_len=192)
    assert model_flops(asked) == 2 * first + 3 * second + 3 * head


class Transformer(Images):
    """A ViT of 16 patches."""

    def __init__(self) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, DIM, 2, stride=2)
        self.layer = nn.TransformerEncoderLayer(DIM, 2, 4 * DIM, dropout=0.0, batch_first=True)
        self.head = nn.Linear(DIM, 5)

    def scores(self, pixels: Tensor) -> Tensor:
        return self.head(self.layer(self.patches(pixels).flatten(2).transpose(1, 2)).mean(1))


def test_an_image_of_a_vit_is_many_tokens() -> None:
    tokens, patches = 16, 2 * 12 * DIM * 16
    layer = 6 * 12 * DIM**2 * tokens + 12 * DIM * tokens**2
    assert model_flops(trial(f"{__name__}:Transformer", seq_len=192)) == 2 * patches + layer + 3 * 2 * DIM * 5


class Tables(nn.Module):
    """Looks up in a large table, and multiplies by a small matrix."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.head = nn.Embedding(VOCAB, DIM), nn.Linear(DIM, 3, bias=False)

    def forward(self, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
        scores = self.head(self.table(batch["input_ids"]))
        return scores.sum(), torch.tensor(scores[..., 0].numel())


def test_looking_up_costs_no_flops() -> None:
    assert model_flops(trial(f"{__name__}:Tables")) == 6 * 3 * DIM * 12


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table, self.cell = nn.Embedding(VOCAB, DIM), nn.LSTM(DIM, DIM, batch_first=True)

    def forward(self, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
        states, _ = self.cell(self.table(batch["input_ids"]))
        return states.sum(), torch.tensor(states[..., 0].numel())


def test_an_lstm_is_taken_apart_into_products() -> None:
    product = 2 * 4 * DIM * DIM  # of one step, with its input or its state; the first state needs no gradient
    assert model_flops(trial(f"{__name__}:Recurrent")) == 12 * 6 * product - product


class Rows(list[dict[str, Tensor]]):
    """Samples of 2, 4, 6, ... tokens, padded to the longest of a batch."""

    vocab_size, seq_len = VOCAB, 20

    def __init__(self, num: int) -> None:
        self.lengths = [2 * (i + 1) for i in range(num)]
        super().__init__({"input_ids": torch.ones(n).long(), "targets": torch.ones(n).long()} for n in self.lengths)

    def __getitems__(self, indices: list[int]) -> list[dict[str, Tensor]]:
        longest = max(self.lengths[i] for i in indices)
        return [{key: F.pad(row, (0, longest - len(row))) for key, row in self[i].items()} for i in indices]


def rows() -> tuple[Rows, Rows]:
    return Rows(10), Rows(2)


def test_the_work_of_samples_that_differ_in_length_is_their_mean_without_padding() -> None:
    asked = trial(data={"target": f"{__name__}:rows"})
    lengths = Rows(10).lengths
    assert model_flops(asked) == pytest.approx(sum(map(gpt_formula, lengths)) / len(lengths), rel=1e-9)
    assert flops_per_sample(asked) == pytest.approx(model_flops(asked), rel=1e-9)


class Remembering(nn.Module):
    """Keeps what it computes from shapes, as rotary embeddings do."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(1, 1)
        self.positions: Tensor | None = None

    def forward(self, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
        if self.positions is None:
            self.positions = torch.arange(batch["input_ids"].shape[1])
        x = (batch["input_ids"] + self.positions).float()[..., None]
        return self.head(x).sum(), torch.tensor(x.numel())


def test_counting_leaves_the_module_as_it_is() -> None:
    asked = trial(f"{__name__}:Remembering")
    train_set, _ = map_style_sets(asked.data)
    module = build_model(asked.model, train_set)
    assert work_of(asked, module, train_set) == Work(4 * 12, 4 * 12)
    assert isinstance(module, Remembering)
    assert module.positions is None
    assert all(parameter.grad is None for parameter in module.parameters())


class LooksAtValues(Tables):
    def forward(self, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
        return super().forward({key: rows[: int(rows.max())] for key, rows in batch.items()})


@torch.library.custom_op("batchscout_tests::squared", mutates_args=())
def squared(matrix: Tensor) -> Tensor:
    return matrix @ matrix


squared.register_fake(lambda matrix: torch.empty_like(matrix))
squared.register_autograd(lambda context, gradient: gradient)


class CallsAnExtension(Tables):
    def forward(self, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
        loss_sum, num_targets = super().forward(batch)
        return loss_sum + squared(self.table.weight[:DIM]).sum(), num_targets


@pytest.mark.parametrize(
    ("model", "why"),
    [
        ("LooksAtValues", r"reads a tensor's values \(item\(\), .*, in .*test_flops.py, line"),
        ("CallsAnExtension", "it calls batchscout_tests.squared"),
    ],
)
def test_a_model_that_cannot_be_counted_has_no_utilisation_and_the_reason_is_said_once(model: str, why: str) -> None:
    asked = trial(f"{__name__}:{model}")
    with pytest.warns(UserWarning, match=f"MFU is not reported.*{why}"):
        assert counted(asked) is None
    assert counted(asked) is None  # a second warning would be an error here
