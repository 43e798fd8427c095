"""An optimizer that exists becomes keys of a study that build one like it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from batchscout.trainers.sources.optimizers import groups_of, optimizer_keys


def parameters() -> list[nn.Parameter]:
    return [nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(2))]


@pytest.mark.parametrize(
    ("optimizer", "keys"),
    [
        (torch.optim.AdamW(parameters(), lr=0.1, amsgrad=True, fused=True),
         {"type": "adamw", "betas": [0.9, 0.999], "eps": 1e-8, "weight_decay": 0.01, "kwargs": {"amsgrad": True}}),
        (torch.optim.Adam(parameters(), lr=0.1), {"type": "adamw", "betas": [0.9, 0.999], "eps": 1e-8, "weight_decay": 0.0}),
        (torch.optim.Adam(parameters(), lr=0.1, weight_decay=0.2), {"target": "torch.optim.adam:Adam", "kwargs": {"weight_decay": 0.2}}),
        (torch.optim.SGD(parameters(), lr=0.1, momentum=0.8, nesterov=True),
         {"type": "sgd", "betas": [0.8, 0.0], "weight_decay": 0.0, "kwargs": {"nesterov": True}}),
        (torch.optim.NAdam(parameters(), lr=0.1, betas=(0.8, 0.9)),
         {"target": "torch.optim.nadam:NAdam", "kwargs": {"betas": [0.8, 0.9], "weight_decay": 0.0}}),
    ],
    ids=["adamw", "adam", "adam that decays as L2", "sgd", "another"],
)  # fmt: skip
def test_which_it_is_and_what_it_was_told(optimizer: Any, keys: dict[str, Any]) -> None:
    assert optimizer_keys(optimizer) == {
        "lr": 0.1,
        "param_groups": "batchscout.trainers.sources.adapted:param_groups",
        **keys,
    }


def test_a_group_says_what_sets_it_apart_and_its_rate_before_any_schedule() -> None:
    first, last = parameters()
    optimizer = torch.optim.AdamW([{"params": [first], "weight_decay": 0.3}, {"params": [last], "lr": 0.02}], lr=0.1)
    torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.0)
    assert groups_of(optimizer) == [
        {"params": [first], "lr": 0.1},
        {"params": [last], "lr": 0.02, "weight_decay": 0.01},
    ]
    assert optimizer_keys(optimizer)["weight_decay"] == 0.3, "the study's own, which it may change"
    assert optimizer_keys(optimizer)["lr"] == 0.1


def test_of_a_cycle_it_says_the_highest_rate_and_the_momentum_without_it() -> None:
    first, last = parameters()
    optimizer = torch.optim.AdamW([{"params": [first]}, {"params": [last]}], lr=1.0, betas=(0.8, 0.9))
    torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=[0.1, 0.02], total_steps=10)
    assert groups_of(optimizer) == [{"params": [first], "lr": 0.1}, {"params": [last], "lr": 0.02}]
    assert optimizer_keys(optimizer)["lr"] == 0.1
    assert optimizer_keys(optimizer)["betas"] == [0.8, 0.9]


class KeepsItsArgumentsBeside(torch.optim.Optimizer):
    """As those of bitsandbytes do."""

    def __init__(self, params: Any, lr: float = 0.1, optim_bits: int = 32, is_paged: bool = False) -> None:
        super().__init__(params, {"lr": lr})
        self.args, self.is_paged = SimpleNamespace(optim_bits=optim_bits), is_paged


class Of8Bit(KeepsItsArgumentsBeside):
    def __init__(self, params: Any, lr: float = 0.1, optim_bits: int = 32, is_paged: bool = False) -> None:
        if optim_bits != 32:
            raise ValueError("it is always 8")
        super().__init__(params, lr, 8, is_paged)


class AsksForOne(torch.optim.Optimizer):
    def __init__(self, params: Any, lr: float, horizon: int) -> None:
        super().__init__(params, {"lr": lr})
        self.horizon = horizon


@pytest.mark.parametrize(
    ("kind", "kwargs"),
    [
        (KeepsItsArgumentsBeside, {"optim_bits": 8, "is_paged": True}),
        (KeepsItsArgumentsBeside, {}),
        (Of8Bit, {}),
        (Of8Bit, {"is_paged": True}),
        (AsksForOne, {"horizon": 9}),
    ],
)
def test_arguments_that_an_optimizer_keeps_beside_its_defaults_are_given_back(
    kind: Any, kwargs: dict[str, Any]
) -> None:
    optimizer = kind([{"params": [one]} for one in parameters()], lr=0.2, **kwargs)
    assert optimizer_keys(optimizer)["kwargs"] == kwargs


def test_a_group_keeps_what_its_optimizer_has_no_default_for() -> None:
    """As GaLore's has its rank, by which its step goes."""
    first, last = parameters()
    optimizer = torch.optim.AdamW([{"params": [("first", first)], "rank": 128}, {"params": [("last", last)]}], lr=0.1)
    torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.1, total_steps=10)
    assert groups_of(optimizer) == [{"params": [first], "rank": 128}, {"params": [last]}]
    optimizer.add_param_group({"params": [("another", nn.Parameter(torch.ones(2)))], "step": 2})
    assert groups_of(optimizer)[2].keys() == {"params"}, "what a step has counted is no argument"
