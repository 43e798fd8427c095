"""Packing: each sample once in a row that holds it, and the loss of a row is that of its samples."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from pydantic import ValidationError
from torch import nn

from batchscout.trainers.before.first_pass import parts
from batchscout.trainers.config import DataConfig
from batchscout.trainers.data.batches import fetch
from batchscout.trainers.data.packed_rows import Packed, packed
from batchscout.trainers.data.padding import Padded
from batchscout.trainers.data.samples import load_data
from batchscout.trainers.errors import DataFault
from batchscout.trainers.model.losses import loss_function
from tests.support.labelled import tiny_llama
from tests.support.tiny import config, cpu_run

HERE = "tests.trainers.data.test_packed_rows"
PAD = {"input_ids": 0, "labels": -100}
TOKENS = 16


def samples(*, num_samples: int = 24, mask: bool = False) -> list[dict[str, Any]]:
    random = torch.Generator().manual_seed(0)
    found = []
    for length in torch.randint(2, TOKENS + 1, (num_samples,), generator=random).tolist():
        tokens = torch.randint(1, 24, (length,), generator=random)
        found.append({"input_ids": tokens, "labels": tokens.clone()} | ({"attention_mask": tokens > 0} if mask else {}))
    return found


def sets(**kwargs: Any) -> tuple[Any, Any]:
    return samples(**kwargs), samples(**kwargs)


def llama() -> nn.Module:
    return tiny_llama(max_position_embeddings=64, use_cache=False)


class SeesAll(nn.Module):
    """The mean of all tokens so far, whoever's they are, tells the next one."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.head = nn.Embedding(24, 8), nn.Linear(8, 24)

    def forward(self, input_ids: torch.Tensor, position_ids: torch.Tensor | None = None) -> torch.Tensor:
        seen = self.table(input_ids).cumsum(1) / torch.arange(1, input_ids.shape[1] + 1)[:, None]
        return self.head(seen)


def rows_of(**changes: Any) -> Packed:
    found, _ = load_data(DataConfig.model_validate({"target": f"{HERE}:sets", "pad": PAD, "pack": TOKENS, **changes}))
    assert isinstance(found, Packed)
    return found


@pytest.mark.parametrize("seed", range(4))
def test_each_sample_is_in_one_row_and_no_row_overflows(seed: int) -> None:
    random = np.random.default_rng(seed)
    lengths = random.integers(1, 65, size=300)
    rows = packed(lengths, 64)
    assert sorted(place for row in rows for place in row) == list(range(300))
    loads = [int(lengths[row].sum()) for row in rows]
    assert max(loads) <= 64
    assert len(rows) <= 11 / 9 * np.ceil(lengths.sum() / 64) + 4
    assert packed(lengths, 64) == rows


def test_a_sample_goes_where_it_leaves_the_least_room() -> None:
    assert packed(np.array([6, 5, 4, 3, 2]), 10) == [[0, 2], [1, 3, 4]]
    assert packed(np.array([7, 6, 3, 4]), 10) == [[0, 2], [1, 3]]
    assert packed(np.array([], dtype=int), 10) == []


def test_a_row_is_its_samples_one_after_the_other_with_positions_that_begin_anew() -> None:
    rows, of = rows_of(), samples()
    for number, members in enumerate(rows.rows):
        row, lengths = rows[number], [len(of[index]["input_ids"]) for index in members]
        end = sum(lengths)
        assert row.keys() == {"input_ids", "labels", "position_ids"}
        assert torch.equal(row["input_ids"][:end], torch.cat([of[index]["input_ids"] for index in members]))
        assert row["input_ids"][end:].eq(0).all()
        assert row["labels"][end:].eq(-100).all()
        expected = [place for length in [*lengths, TOKENS - end] for place in range(length)]
        assert row["position_ids"].tolist() == expected
    assert rows.seq_len == TOKENS


def test_the_loss_of_a_row_is_that_of_its_samples_one_by_one_and_no_target_crosses_a_border() -> None:
    torch.manual_seed(1)
    module, loss, rows = (
        llama().double(),
        loss_function(config(loss="transformers").loss),
        rows_of(kwargs={"mask": True}),
    )
    assert any(len(members) > 1 for members in rows.rows)
    loss_sum, num_targets = loss(module, fetch(rows, range(len(rows))))
    alone = [loss(module, {key: one[key][None] for key in PAD}) for one in samples()]
    assert num_targets == sum(targets for _, targets in alone) == sum(len(one["labels"]) - 1 for one in samples())
    assert loss_sum.item() == pytest.approx(
        sum(one.item() for one, _ in alone), rel=1e-6
    )  # the library computes losses in float32
    torch.testing.assert_close(
        torch.cat([g.flatten() for g in torch.autograd.grad(loss_sum, list(module.parameters()))]),
        torch.cat([g.flatten() for g in torch.autograd.grad(sum(o for o, _ in alone), list(module.parameters()))]),  # pyright: ignore[reportArgumentType, reportCallIssue]
        rtol=1e-4,
        atol=1e-5,
    )


def trial(target: str, loss: str) -> Any:
    return config(
        model={"target": f"{HERE}:{target}"},
        data={"target": f"{HERE}:sets", "pad": PAD, "pack": TOKENS},
        loss=loss,
        micro_batch_size=2,
        sample_budget=8,
        evaluation_samples=2,
    )


def said_of_the_first_pass(target: str, loss: str) -> str:
    found = list(parts(trial(target, loss)))[-1]
    assert not isinstance(found, str)
    assert found.outcome == "passed"
    return found.said


def test_the_first_pass_says_where_samples_of_a_row_see_each_other() -> None:
    assert said_of_the_first_pass("llama", "transformers") == ""
    said = said_of_the_first_pass("SeesAll", "cross_entropy")
    assert "samples that are packed into one row change each other's loss" in said
    assert "leave data.pack out, if that is not meant" in said


def test_a_run_trains_on_rows() -> None:
    run = cpu_run(trial("llama", "transformers"), steps=3)
    assert len(run.first_samples) == len(rows_of().rows) < 24
    assert all(step.loss > 0 for step in run.read())


@pytest.mark.parametrize(
    ("sample", "message"),
    [
        ({"input_ids": [1], "labels": [1], "number": 3}, "data.pack joins samples to rows, and data.pad does not name number; name it there"),
        ({"input_ids": [1, 2], "labels": [1]}, "in a sample input_ids has 2, labels has 1 of them; pad such samples, with data.pad alone"),
        (([1], [2]), "data.pack makes rows with position_ids, and a sample of the train set is a tuple; let it be a dictionary"),
    ],
)  # fmt: skip
def test_what_cannot_be_joined_is_refused_by_name(sample: Any, message: str) -> None:
    pad = {"0": 0, "1": 0} if isinstance(sample, tuple) else PAD
    with pytest.raises(DataFault, match=message):
        Packed(Padded([sample], pad, "the train set"), 8)[0]


def test_a_sample_that_fits_into_no_row_is_named() -> None:
    longest = max(range(24), key=lambda index: len(samples()[index]["input_ids"]))
    expected = f"data.pack is 8, and sample {longest} of the train set .* has {len(samples()[longest]['input_ids'])} tokens; raise it"
    with pytest.raises(DataFault, match=expected):
        rows_of(pack=8)


def test_rows_need_what_fills_them_up() -> None:
    with pytest.raises(
        ValidationError, match=r"pack is 16, and pad does not say what rows are made of and filled up with; add pad"
    ):
        DataConfig(target="text", pack=16)
