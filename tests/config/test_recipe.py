"""Whatever decides how a run trains is the user's, or is told to be batchscout's own."""

from __future__ import annotations

from typing import Any

import pytest
import yaml

from batchscout.orchestrator.config.keys import StudyConfig
from batchscout.orchestrator.config.load import parse_study
from batchscout.orchestrator.config.recipe import given_of, left_open, left_open_text
from tests.support.studies import ON_TEXT

ALL: dict[str, Any] = {
    "optimizer": {
        "type": "adamw", "lr": 1e-3, "reference_batch_size": 32, "lr_scaling": "auto", "warmup": 0, "betas": [0.9, 0.95], "eps": 1e-8,
        "beta2_scaling": "none", "weight_decay": 0.0, "max_gradient_norm": None,
    },
    "schedule": {"type": "warmup_stable_decay", "decay": 0.2},
    "precision": "float32",
}  # fmt: skip
NOTHING: dict[str, Any] = {"optimizer": {}, "schedule": {}}


def study(**changes: Any) -> StudyConfig:
    rest = {key: value for key, value in ON_TEXT.items() if key not in ALL}
    return parse_study({**rest, **changes}, "the test's study")


def opened(**changes: Any) -> dict[str, Any]:
    config = study(**changes)
    return left_open(config, given_of(config))


def test_all_that_is_left_open_is_told_with_the_value_that_it_has() -> None:
    for told in (opened(), opened(**NOTHING)):
        assert told["optimizer"].keys() == ALL["optimizer"].keys()
        assert told["optimizer"]["weight_decay"] == 0.1
        assert told["schedule"] == ALL["schedule"]
        assert told["precision"] == "float32"


def test_what_is_given_is_not_told_though_it_is_the_default() -> None:
    assert opened(**ALL) == {}
    config = study(**ALL)
    assert left_open_text(config, given_of(config)) is None
    for key, value in ALL["optimizer"].items():
        one = opened(optimizer={key: value})["optimizer"]
        assert one.keys() == ALL["optimizer"].keys() - {key}


@pytest.mark.parametrize(
    ("optimizer", "has_no_effect"),
    [
        ({"type": "sgd"}, {"eps", "beta2_scaling"}),
        ({"type": "adafactor"}, {"betas", "eps", "beta2_scaling"}),
        ({"target": "torch.optim:RAdam"}, {"type", "betas", "eps", "beta2_scaling", "weight_decay"}),
    ],
    ids=["sgd", "adafactor", "own"],
)
def test_what_has_no_effect_is_not_told(optimizer: dict[str, Any], has_no_effect: set[str]) -> None:
    told = opened(optimizer=optimizer)["optimizer"].keys()
    assert told == ALL["optimizer"].keys() - has_no_effect - optimizer.keys()


def test_defaults_of_finetuning_are_nobodys_either() -> None:
    model = {"target": "hf", "kwargs": {"name": "x", "pretrained": True}}
    keys = {"regime": "finetune", "initial_weights": "own", "sample_budget": 64, "model": model}
    told = opened(**keys)
    assert (told["optimizer"]["lr"], told["optimizer"]["weight_decay"]) == (2e-5, 0.01)
    told = opened(**keys, optimizer={"lr": 1e-5})
    assert "lr" not in told["optimizer"]
    assert told["optimizer"]["warmup"] == "short"


@pytest.mark.parametrize("changes", [{}, {"optimizer": {"type": "sgd", "lr": 0.1}}, {"precision": "bfloat16"}], ids=str)
def test_pasted_into_the_study_file_it_changes_nothing_and_nothing_is_left_open(changes: dict[str, Any]) -> None:
    config = study(**changes)
    said = left_open_text(config, given_of(config))
    assert said is not None
    keys = yaml.safe_load("{" + said.partition("defaults: ")[2].partition("; the first")[0] + "}")
    merged = {
        key: {**changes[key], **value} if isinstance(changes.get(key), dict) else value for key, value in keys.items()
    }
    pasted = study(**{**changes, **merged})
    assert pasted == config
    assert left_open_text(pasted, given_of(pasted)) is None
    assert said.endswith("; the first of betas is SGD's momentum") == ("sgd" in str(changes))
