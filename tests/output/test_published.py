"""What a published formula would have picked stands beside the recommendation, where it applies."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from batchscout.orchestrator.config.keys import StudyConfig
from batchscout.orchestrator.output.published import StepLaw, published_pick
from batchscout.orchestrator.study.facts import Facts
from batchscout.orchestrator.study.state import Study
from batchscout.orchestrator.study.trial import Trial
from batchscout.trainers.config import Phase
from tests.support.example_study import add_trial, end_trial, example_config

FACTS = Facts(num_parameters=10**9)


def trained(config: StudyConfig, tokens_per_second: float = 128_000.0) -> Trial:
    """A run with steps of 32 samples that took a second each: by default 4,000 tokens a sample."""
    study = Study(config.name)
    add_trial(study, config, "train-m32k1", "", micro_batch_size=32, learning_rate=6e-4)
    end_trial(study, "train-m32k1", 60.0, {"tokens_per_second": tokens_per_second, "step_seconds": 1.0})
    return study.trials["train-m32k1"]


def picked(tokens_per_second: float = 128_000.0, **changes: Any) -> str | None:
    config = example_config(**changes)
    return published_pick(config, FACTS, trained(config, tokens_per_second))


def test_the_law_says_what_the_paper_says_of_its_largest_model() -> None:
    """1 B parameters on 100 B tokens: figure 1 of the paper has its optimum near 1.2e-3 and 1.1 M tokens."""
    law = StepLaw(10**9, 1e11)
    assert law.learning_rate == pytest.approx(1.79 * 10 ** (-0.713 * 9 + 0.307 * 11), rel=1e-9)
    assert 1e-3 < law.learning_rate < 2e-3
    assert 0.9e6 < law.batch_tokens < 1.3e6
    assert StepLaw(10**9, 2e11).batch_tokens / law.batch_tokens == pytest.approx(2**0.571)
    assert StepLaw(2 * 10**9, 1e11).batch_tokens == law.batch_tokens, "the batch follows the tokens alone"


def test_it_is_told_in_samples_of_the_studys_own_length() -> None:
    law = StepLaw(10**9, example_config().sample_budget * 4000.0)
    batch = max(1, round(law.batch_tokens / 4000))
    assert picked() == (
        f"the Step Law (arXiv 2503.04715) would pick effective batch {batch} at learning rate {law.learning_rate:.2g}"
    )


def test_for_a_longer_real_run_it_is_told_for_that() -> None:
    law = StepLaw(10**9, 10**8 * 4000.0)
    batch = round(law.batch_tokens / 4000)
    said = picked(real_run={"samples": 10**8})
    assert said is not None
    assert said.endswith(f"effective batch {batch} at learning rate {law.learning_rate:.2g} for 100,000,000 samples")


def test_of_a_ramp_the_last_steps_are_as_large_as_its_last_batch() -> None:
    ramp = (Phase(from_samples=64, gradient_accumulation_steps=4, learning_rate=6e-4),)
    constant = trained(example_config())
    growing = constant.config.model_copy(update={"ramp": ramp})
    grown = replace(constant, proposal=replace(constant.proposal, config=growing))
    metrics = {"tokens_per_second": 512_000.0, "step_seconds": 1.0}
    assert published_pick(example_config(), FACTS, replace(grown, metrics=metrics)) == picked()


def test_nothing_is_told_of_what_it_was_not_fitted_on() -> None:
    assert published_pick(example_config(), Facts(), trained(example_config())) is None
    assert picked(tokens_per_second=32.0) is None, "a classifier: one target a sample"
    assert picked(optimizer={"type": "sgd"}) is None


@pytest.mark.parametrize(("changes", "is_told"), [
    ({"regime": "finetune", "initial_weights": "own"}, False),
    ({"initial_weights": "weights.safetensors"}, False),
    ({"model": {"target": "hf", "kwargs": {"name": "gpt2", "pretrained": True}}}, False),
    ({"model": {"target": "hf", "kwargs": {"name": "gpt2", "pretrained": False}}}, True),
    ({"model": {"target": "gpt", "peft": {"r": 8}}}, False),
])  # fmt: skip
def test_it_is_told_of_training_from_random_weights_alone(changes: dict[str, Any], is_told: bool) -> None:
    assert (picked(**changes) is not None) is is_told
