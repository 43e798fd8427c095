"""What keeps a model from being followed is told with its kind, its operation and its line, and torch says nothing beside it."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from batchscout.trainers.errors import Obstacle
from batchscout.trainers.model.shapes import NumbersAre, shapes_alone, why_not_followed

extension = torch.library.Library("batchscout_tests_of_shapes", "DEF")
extension.define("doubled(Tensor x) -> Tensor")
extension.impl("doubled", lambda x: 2 * x, "CPU")


@torch.library.custom_op("batchscout_tests::tripled", mutates_args=())
def tripled(x: Tensor) -> Tensor:
    return 3 * x


def multiplied_with_what_does_not_fit(x: Tensor) -> Tensor:
    return x @ torch.ones(5, 5)


@pytest.mark.parametrize(
    ("step", "obstacle", "what"),
    [
        (lambda x: x.sum().item(), Obstacle.READS_VALUES, "item(), or a condition on a tensor"),
        (lambda x: x if x.sum() > 0 else -x, Obstacle.READS_VALUES, "item(), or a condition on a tensor"),
        (lambda x: x[x > 0], Obstacle.READS_VALUES, "nonzero(), or a mask as an index"),
        (lambda x: torch.unique(x), Obstacle.READS_VALUES, "aten._unique2"),
        (
            lambda x: torch.ops.batchscout_tests_of_shapes.doubled(x),
            Obstacle.UNKNOWN_OPERATION,
            "batchscout_tests_of_shapes.doubled",
        ),
        (lambda x: tripled(x), Obstacle.RAISED, "RuntimeError: There was no fake impl registered for"),
        (lambda x: x.numpy(), Obstacle.RAISED, "RuntimeError: .numpy() is not supported for tensor subclasses."),
        (multiplied_with_what_does_not_fit, Obstacle.RAISED, "RuntimeError: "),
    ],
    ids=["item", "condition", "mask", "unique", "extension", "own operation", "numpy", "misfit"],
)
def test_an_obstacle_is_told(
    step: Callable[[Tensor], object], obstacle: Obstacle, what: str, caplog: pytest.LogCaptureFixture
) -> None:
    with shapes_alone(), pytest.raises(Exception) as raised:  # noqa: PT011  (of many kinds)
        step(torch.ones(3))
    assert isinstance(raised.value, Exception)
    found = why_not_followed(raised.value)
    assert found.obstacle is obstacle
    assert found.what.startswith(what)
    assert found.where.startswith(f"{__file__}, line ")
    assert not caplog.records


def test_a_number_that_no_shape_depends_on_is_answered_where_it_is_not_known() -> None:
    with shapes_alone(), NumbersAre(1):
        known = torch.tensor(3.0)
        assert known.item() == 3
        assert (known * torch.ones(2)).norm().item() == 1
        assert torch.ones(2, dtype=torch.long).sum().item() == 1


def test_weights_that_are_drawn_until_they_are_within_bounds_can_be_followed() -> None:
    with shapes_alone(), NumbersAre(0):
        assert torch.nn.init.trunc_normal_(torch.empty(3, 5)).shape == (3, 5)
