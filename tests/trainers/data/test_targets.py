"""What the targets of samples are: it says in which unit speed is told."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils.data import TensorDataset

from batchscout.trainers.counted import rate_unit
from batchscout.trainers.data.targets import counted_in
from tests.support.tiny import data


class Rows(list[Any]):
    """Samples that tell nothing of themselves."""


TOKENS = torch.arange(6)


class OfOneLength(Rows):
    seq_len = 6


class Encoding(dict[str, torch.Tensor]):
    """A mapping that moves itself, as a tokenizer's own is."""

    def to(self, device: torch.device) -> Encoding:
        return Encoding({key: value.to(device) for key, value in self.items()})


class Encoded(Rows):
    @staticmethod
    def collate_fn(samples: list[torch.Tensor]) -> Encoding:
        return Encoding(input_ids=torch.stack(samples))


@pytest.mark.parametrize(
    ("samples", "targets_per_sample", "counted"),
    [
        (data()[0], 12.0, "tokens"),
        (data()[0], None, "tokens"),
        (Rows([{"input_ids": TOKENS, "labels": TOKENS}]), 6.0, "tokens"),
        (Encoded([TOKENS]), 6.0, "tokens"),
        (OfOneLength([{"input_ids": TOKENS, "weights": torch.rand(6)}]), 6.0, "tokens"),
        (OfOneLength([(torch.rand(6, 3), torch.rand(2, 3))]), 6.0, "targets"),
        (OfOneLength([(torch.rand(6), torch.rand(2))]), 2.0, "targets"),
        (Rows([({"source": TOKENS, "target": TOKENS}, TOKENS)]), 4.5, "tokens"),
        (Rows([{"input_ids": TOKENS, "labels": torch.tensor(1)}]), 1.0, "samples"),
        (TensorDataset(torch.rand(2, 1, 4, 4), torch.arange(2)), 1.0, "samples"),
        (TensorDataset(torch.rand(2, 1, 4, 4), torch.zeros(2, 4, 4, dtype=torch.long)), 16.0, "targets"),
        (TensorDataset(torch.zeros(2, 3, 4, 4, dtype=torch.uint8), torch.zeros(2, 4, 4, dtype=torch.long)), None, "targets"),
        (TensorDataset(torch.rand(2, 3), torch.rand(2, 2)), 2.0, "targets"),
    ],
)  # fmt: skip
def test_what_samples_hold_says_what_is_counted(samples: Any, targets_per_sample: float | None, counted: str) -> None:
    assert counted_in(samples, targets_per_sample) == counted


def test_the_unit_of_speed_is_named_after_it() -> None:
    assert rate_unit("samples") == "samples/s"
