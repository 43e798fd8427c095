"""Which layers of a model are its repeated blocks."""

from __future__ import annotations

import re

import pytest
import torch
from torch import nn

from batchscout.trainers.model.activation_checkpointing import apply_to_blocks
from batchscout.trainers.model.blocks import find_blocks
from tests.support.tiny import config


class Residual(nn.Module):
    """With a Sequential of its own, whose members are no blocks of the model."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(*(nn.Sequential(nn.Conv2d(4, 4, 1), nn.BatchNorm2d(4)) for _ in range(3)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.relu(x + self.inner(x))


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(2, 2)


def layers(count: int) -> nn.ModuleList:
    return nn.ModuleList(nn.Linear(2, 2) for _ in range(count))


def names(model: nn.Module, given: str | list[str] | None = None) -> list[str]:
    """The names of the model's blocks."""
    named = {id(module): name for name, module in model.named_modules()}
    return [named[id(block.module)] for block in find_blocks(model, given)]


def test_blocks_are_the_longest_uniform_list_or_the_one_named() -> None:
    model = nn.Module()
    model.short, model.inside = layers(2), nn.Module()
    model.inside.long = layers(3)
    model.mixed = nn.ModuleList([nn.Linear(2, 2), nn.ReLU(), nn.Linear(2, 2), nn.ReLU()])
    model.empty = nn.ModuleList()
    assert names(model) == ["inside.long.0", "inside.long.1", "inside.long.2"]
    assert names(model, "short") == ["short.0", "short.1"]
    assert names(model, ["mixed", "short"]) == [*(f"mixed.{index}" for index in range(4)), "short.0", "short.1"]
    assert not find_blocks(nn.Linear(2, 2))
    expected = "which is no ModuleList or Sequential of this model; it has: short, inside.long, mixed, empty"
    with pytest.raises(ValueError, match=re.escape(f"model.blocks names 'inside', {expected}")):
        find_blocks(model, "inside")


def test_an_encoder_and_a_decoder_of_one_kind_of_layer_are_both_found() -> None:
    model = nn.Module()
    model.encoder, model.decoder = (nn.ModuleList(Layer() for _ in range(count)) for count in (2, 3))
    model.heads = layers(3)
    assert names(model) == ["encoder.0", "encoder.1", "decoder.0", "decoder.1", "decoder.2"]


def stages() -> nn.Sequential:
    parts = [nn.Sequential(*(Residual() for _ in range(count))) for count in (1, 2)]
    return nn.Sequential(nn.Conv2d(3, 4, 1), *parts, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 2))


def test_the_stages_of_a_convolutional_network_are_found_and_what_repeats_in_a_block_is_none() -> None:
    assert names(stages()) == ["1.0", "2.0", "2.1"]
    assert names(nn.Sequential(*list(stages())[1:3])) == ["0.0", "1.0", "1.1"]
    assert names(stages(), "2") == ["2.0", "2.1"]


def test_layers_without_layers_and_a_single_block_are_no_repeated_blocks() -> None:
    assert not find_blocks(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)))
    assert not find_blocks(nn.Sequential(nn.Linear(2, 2), nn.Sequential(Residual())))
    assert not find_blocks(nn.Sequential(nn.Conv2d(3, 4, 1), nn.ReLU(), nn.Conv2d(4, 4, 1)))


def test_a_layer_is_in_one_block() -> None:
    with pytest.raises(
        ValueError, match=r"names '2' and '2\.1\.inner', which is a part of it; .*leave one of them out"
    ):
        find_blocks(stages(), ["2.1.inner", "2"])
    with pytest.raises(ValueError, match="names '2' and '2', which"):
        find_blocks(stages(), ["2", "2"])


def test_a_layer_that_stands_in_a_list_several_times_is_a_block_at_each_place() -> None:
    model, layer = nn.Module(), Layer()
    model.layers = nn.ModuleList([layer, layer])
    assert [block.name for block in find_blocks(model)] == ["0", "1"]


def test_blocks_in_sequentials_are_checkpointed_with_the_same_gradient_and_names() -> None:
    torch.manual_seed(0)
    plain, checkpointed = stages(), stages()
    checkpointed.load_state_dict(plain.state_dict())
    apply_to_blocks(checkpointed, config(activation_checkpointing="full"))
    assert checkpointed.state_dict().keys() == plain.state_dict().keys()
    assert not any(isinstance(block.module, Residual) for block in find_blocks(checkpointed, ["1", "2"]))
    x = torch.randn(4, 3, 2, 2)
    for model in (plain, checkpointed):
        model(x).square().sum().backward()
    for mine, other in zip(plain.parameters(), checkpointed.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, other.grad)
    for name, mine in plain.state_dict().items():
        torch.testing.assert_close(mine, checkpointed.state_dict()[name])
