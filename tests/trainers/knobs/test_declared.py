"""What knobs need and exclude is said before anything runs, in the user's words and with the way out."""

from __future__ import annotations

import itertools
import re
from typing import Any

import pytest

from batchscout.trainers.config import TrialConfig
from batchscout.trainers.knobs import KNOBS, excluding, knob, with_settings
from tests.support.tiny import config, cpu_run


def said(**changes: Any) -> str:
    with pytest.raises(ValueError, match="memory_knobs") as error:
        config(**changes)
    return str(error.value)


def test_knobs_are_sorted_each_once_and_read_back_as_they_were_written() -> None:
    names = ["optimizer_offload", "chunked_cross_entropy", "optimizer_offload"]
    assert config(memory_knobs=names).memory_knobs == ("chunked_cross_entropy", "optimizer_offload")
    told = config(memory_knobs=["chunked_cross_entropy"])
    assert TrialConfig.model_validate_json(told.model_dump_json()) == told


def test_an_unknown_knob_is_refused_with_those_that_there_are() -> None:
    with pytest.raises(
        ValueError, match=r"'offload' is no memory knob; choose among activation_offload, bfloat16_weights, "
    ):
        config(memory_knobs=["offload"])


@pytest.mark.parametrize("pair", [("optimizer_8bit", "bfloat16_weights"), ("fsdp", "activation_offload")])
def test_knobs_that_exclude_each_other_are_both_named_with_the_way_out(pair: tuple[str, str]) -> None:
    first, second = sorted(pair)
    with pytest.raises(
        ValueError, match=f"{first} and {second} exclude each other; leave one of them out of memory_knobs"
    ):
        config(memory_knobs=pair)


def test_exclusion_holds_both_ways_and_names_knobs_that_exist() -> None:
    for one in KNOBS:
        assert all(knob(other).name == other for other in one.excludes)
    for a, b in itertools.permutations([one.name for one in KNOBS], 2):
        assert (excluding([a, b]) is None) == (excluding([b, a]) is None)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"memory_knobs": ["bfloat16_weights"]},
            r"bfloat16_weights: .* precision is float32; set precision: bfloat16, or leave it out",
        ),
        (
            {"memory_knobs": ["bfloat16_weights"], "precision": "bfloat16", "optimizer": {"type": "sgd"}},
            r"bfloat16_weights: .* optimizer.type is sgd; set optimizer.type: adamw",
        ),
        ({"memory_knobs": ["optimizer_8bit"], "optimizer": {"type": "sgd"}}, r"optimizer_8bit: .* optimizer.type is sgd"),
        ({"memory_knobs": ["fsdp"]}, r"fsdp: .* world_size is 1; raise it, or leave the knob out"),
        (
            {"memory_knobs": ["chunked_cross_entropy"], "loss": "mse"},
            r"chunked_cross_entropy: .* loss is mse; return logits and set loss: cross_entropy",
        ),
        (
            {"memory_knobs": ["chunked_cross_entropy"], "model": {"target": "tests.support.heads:Headed"}},
            r"chunked_cross_entropy: .* 'tests.support.heads:Headed' returns its own loss",
        ),
        (
            {"memory_knobs": ["chunked_cross_entropy", "fsdp"], "world_size": 2, "loss": "cross_entropy"},
            r"chunked_cross_entropy: .* parallel: fsdp has sharded them again; use parallel: ddp",
        ),
    ],
)  # fmt: skip
def test_what_is_in_a_knobs_way_is_named_with_both_numbers_and_the_way_out(
    changes: dict[str, Any], message: str
) -> None:
    assert re.search(message, said(**changes))


@pytest.mark.parametrize("name", ["activation_offload", "optimizer_offload"])
def test_what_needs_a_gpu_is_refused_on_a_cpu_before_anything_is_built(name: str) -> None:
    with pytest.raises(ValueError, match=f"memory_knobs has {name}: .*; leave it out, or train on a GPU"):
        cpu_run(config(memory_knobs=[name]))
    assert knob(name).missing("cuda") == ""


def test_without_torchao_8_bit_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert knob("optimizer_8bit").missing("cuda").endswith("pip install torchao, or leave it out")


def test_knobs_that_stand_for_settings_set_them() -> None:
    assert with_settings(config(memory_knobs=["optimizer_8bit"])).optimizer.type == "adamw_8bit"
    assert with_settings(config(memory_knobs=["fsdp"], world_size=2)).parallel == "fsdp"
    plain = config()
    assert with_settings(plain) is plain
