"""What `regime: finetune` changes: its defaults, and what is refused there. Without it nothing is changed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from batchscout.orchestrator.config.keys import StudyConfig
from batchscout.orchestrator.config.load import load_study, parse_study
from batchscout.orchestrator.config.stages import Frontier, Throughput
from batchscout.orchestrator.config.trial import base_trial, warmup_samples

KEYS: dict[str, Any] = {"name": "tuned", "model": {"target": "gpt"}, "data": {"target": "python_stdlib"}}
FINETUNE = KEYS | {"regime": "finetune", "initial_weights": "own", "sample_budget": 8000}


def study(**changes: Any) -> StudyConfig:
    return parse_study(FINETUNE | changes, "the test's study")


def stage(config: StudyConfig, kind: Any) -> Any:
    found = config.keys_of(kind)
    assert found is not None
    return found


def test_a_study_file_that_does_not_say_it_is_of_pretraining_and_as_it_was() -> None:
    config = parse_study(KEYS, "the test's study")
    assert (config.regime, config.initial_weights) == ("pretrain", None)
    assert config == parse_study(KEYS | {"regime": "pretrain"}, "the test's study")
    assert (config.optimizer.lr, config.optimizer.warmup, config.optimizer.weight_decay) == (6e-4, "auto", 0.1)


def test_finetuning_has_defaults_of_its_own() -> None:
    config = study()
    optimizer = config.optimizer
    assert (optimizer.lr, optimizer.reference_batch_size, optimizer.weight_decay) == (2e-5, 16, 0.01)
    assert stage(config, Frontier).largest == 128
    assert stage(config, Throughput).multiples == (1, 2)


def test_adapters_begin_at_a_rate_of_their_own_and_with_weights() -> None:
    adapted = {"target": "mine:make", "peft": {"r": 8}}
    assert study(model=adapted).optimizer.lr == 2e-4
    assert study(model=adapted, initial_weights=None, optimizer={"lr": 5e-3}).optimizer.lr == 5e-3
    assert study(model=adapted, optimizer={"lr": 1e-5}).optimizer.lr == 1e-5


def test_a_study_with_a_real_run_has_them_too() -> None:
    config = study(real_run={"samples": 16_000})
    assert config.stages[-1].type == "horizons"
    assert (stage(config, Frontier).largest, stage(config, Throughput).multiples) == (128, (1, 2))


def test_what_the_study_file_says_comes_first() -> None:
    config = study(
        optimizer={"lr": 1e-4, "weight_decay": 0.0},
        stages=[{"type": "frontier", "largest": 16}, {"type": "throughput"}, {"type": "train"}],
    )
    assert (config.optimizer.lr, config.optimizer.weight_decay, config.optimizer.warmup) == (1e-4, 0.0, "short")
    assert stage(config, Frontier).largest == 16
    assert stage(config, Throughput).multiples == (1, 2)


def test_a_stored_study_is_read_as_it_was() -> None:
    assert parse_study(study().model_dump(mode="json"), "study.yaml") == study()


@pytest.mark.parametrize(
    ("batch", "budget", "expected"),
    [(16, 8000, 480), (64, 8000, 640), (256, 8000, 1600)],
    ids=["6 %", "10 steps", "at most a fifth"],
)
def test_a_short_warm_up_is_a_share_of_the_run(batch: int, budget: int, expected: int) -> None:
    assert warmup_samples(study(), batch, budget) == expected


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"initial_weights": None}, "begins with weights, and the study file names none; set initial_weights to a file of them, or to own"),
        ({"initial_weights": None, "model": {"target": "hf", "kwargs": {"name": "x", "pretrained": False}}}, "names none"),
        ({"optimizer": {"lr": 6e-3}}, r"optimizer.lr \(0.006\) is more than 0.001, fifty times the usual rate of finetuning \(2e-05\); lower it"),
        ({"initial_weights": None, "model": {"target": "hf", "kwargs": {"model_type": "x"}, "peft": {"r": 8}}}, "names none"),
        ({"model": {"target": "mine:make", "peft": {}}, "optimizer": {"lr": 0.02}}, r"\(0.02\) is more than 0.01, fifty .*\(0.0002\)"),
        ({"optimizer": {"type": "sgd"}}, "default optimizer.lr for adamw alone; set optimizer.lr"),
        ({"regime": "finetuning"}, "regime"),
    ],
    ids=["no weights", "hf that is not pretrained", "a rate that forgets",
         "adapters of random weights", "a rate too high for adapters", "sgd", "a typo"],
)  # fmt: skip
def test_what_makes_no_sense_is_refused_by_name(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        study(**changes)


def test_without_a_budget_it_is_refused_with_the_usual_number_of_passes() -> None:
    with pytest.raises(ValueError, match=r"no default sample_budget.*2 to 4 times the number of training samples"):
        parse_study({key: value for key, value in FINETUNE.items() if key != "sample_budget"}, "the test's study")


@pytest.mark.parametrize(
    "changes",
    [
        {"initial_weights": None, "model": {"target": "hf", "kwargs": {"name": "x", "pretrained": True}}},
        {"optimizer": {"type": "sgd", "lr": 0.1}},
        {"regime": "pretrain", "optimizer": {"lr": 6e-3}},
    ],
    ids=["a pretrained transformers model", "a rate of sgd", "pre-training that goes on"],
)
def test_what_makes_sense_is_not(changes: dict[str, Any]) -> None:
    study(**changes)


@pytest.mark.parametrize(("given", "of_trials"), [("own", None), ("weights.pt", "weights.pt")])
def test_trials_begin_with_the_file_wherever_their_ranks_run(home: Path, given: str, of_trials: str | None) -> None:
    Path("study.yaml").write_text(yaml.safe_dump(FINETUNE | {"initial_weights": given}))
    trial = base_trial(load_study(Path("study.yaml"), []), None)
    assert trial.initial_weights == (str(home / of_trials) if of_trials else None)
