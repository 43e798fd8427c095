"""What is evaluated stands for the whole validation set, whatever that is sorted by."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from batchscout.trainers.data.order import of_every_part
from batchscout.trainers.reporting.evaluation import evaluate
from tests.support.tiny import config, cpu_run

HERE = __name__
CLASSES, OF_EACH = 16, 50


def rows(count: int) -> list[tuple[Tensor, Tensor]]:
    """Sorted by their classes, as a folder of pictures is."""
    return [(torch.ones(2), torch.tensor(number * CLASSES // count)) for number in range(count)]


def sets() -> tuple[list[tuple[Tensor, Tensor]], list[tuple[Tensor, Tensor]]]:
    return rows(64), rows(CLASSES * OF_EACH)


class Prefers(torch.nn.Module):
    """Knows the first class alone."""

    def __init__(self) -> None:
        super().__init__()
        self.logits = torch.nn.Parameter(torch.tensor([4.0] + [0.0] * (CLASSES - 1)))

    def forward(self, x: Tensor) -> Tensor:
        return self.logits.expand(len(x), -1)


def loss_over(samples: int) -> float:
    place = {"target": f"{HERE}:Prefers", "kwargs": {}}
    run = cpu_run(
        config(
            model=place,
            data={"target": f"{HERE}:sets"},
            loss="cross_entropy",
            evaluation_samples=samples,
            compile=False,
        )
    )
    return evaluate(run)["val_loss"]


def test_the_loss_of_some_samples_of_a_sorted_set_is_that_of_all() -> None:
    assert loss_over(CLASSES * 4) == pytest.approx(loss_over(CLASSES * OF_EACH), rel=1e-5)


@pytest.mark.parametrize(("number", "count"), [(10, 3), (1000, 256), (7, 7), (5, 9), (1, 1), (4, 0)])
def test_one_is_drawn_of_each_part_always_the_same_and_all_of_a_small_set(number: int, count: int) -> None:
    drawn = of_every_part(number, count)
    assert drawn == of_every_part(number, count)
    assert drawn == sorted({*drawn})
    assert len(drawn) == min(number, count)
    assert all(part * number // len(drawn) <= one < (part + 1) * number // len(drawn) for part, one in enumerate(drawn))
