"""A run that is to be deterministic computes the same bits each time, or says what cannot."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch._inductor import config as inductor

from batchscout.trainers.device.determinism import deterministic
from batchscout.trainers.loop import train
from batchscout.trainers.report import Report
from tests.support.tiny import config


def put_without_an_order() -> torch.Tensor:
    return torch.zeros(2).put_(torch.tensor([0, 0]), torch.tensor([1.0, 2.0]))


def test_within_it_an_operation_without_an_order_is_refused_by_its_name_and_afterwards_nothing_is() -> None:
    with deterministic(True), pytest.raises(RuntimeError, match="put_ does not have a deterministic implementation"):
        put_without_an_order()
    put_without_an_order()
    with deterministic(False):
        put_without_an_order()


@pytest.mark.parametrize("on", [True, False])
def test_a_run_is_as_deterministic_as_its_configuration_asks_for_and_leaves_the_process_as_it_was(
    tmp_path: Path, on: bool
) -> None:
    found = set()

    def look(_: Report) -> None:
        found.add((torch.are_deterministic_algorithms_enabled(), inductor.deterministic))

    train(config(rungs=(16,), deterministic=on), look, tmp_path)
    assert found == {(on, on)}
    assert not torch.are_deterministic_algorithms_enabled()
    assert not inductor.deterministic
