"""The noise scale of several trials is one estimate whose interval covers."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import pytest

from batchscout.orchestrator.config.trial import base_trial
from batchscout.orchestrator.stages.estimates.noise_scale import NoiseScale, pooled_noise_scale
from batchscout.orchestrator.study.trial import Proposal, Trial, TrialState
from batchscout.trainers.noise.noise_estimate import estimate_noise
from tests.support.gradients import known_windows
from tests.support.lane_player import study_of

CONFIG = base_trial(study_of(), None)


def trial(metrics: dict[str, Any], accumulation: int = 2, micro_batch_size: int = 4) -> Trial:
    changes = {"micro_batch_size": micro_batch_size, "gradient_accumulation_steps": accumulation}
    config = CONFIG.model_copy(update=changes | {"sample_budget": 20 * micro_batch_size * accumulation})
    proposal = Proposal(f"k{accumulation}", "throughput", config, candidate=f"k{accumulation}")
    told = {key: value for key, value in metrics.items() if value is not None}
    return Trial(proposal, state=TrialState.COMPLETE, metrics=told)


def studies(noise_scale: float, accumulations: list[int], num_steps: int) -> list[list[Trial]]:
    """300 studies with a trial of each accumulation."""
    by_trial = []
    for number, accumulation in enumerate(accumulations):
        windows = known_windows(
            number, noise_scale=noise_scale, micro_batch_size=4, num_micro_batches=accumulation, num_steps=num_steps,
            num_windows=300,
        )  # fmt: skip
        found = [dataclasses.asdict(estimate_noise(steps, 4, accumulation)) for steps in windows]
        by_trial.append([trial(metrics, accumulation) for metrics in found])
    return [list(trials) for trials in zip(*by_trial, strict=True)]


def coverage(scales: list[NoiseScale | None], truth: float) -> float:
    known = [(scale.low, scale.high or math.inf) if scale else (0.0, math.inf) for scale in scales]
    return sum(low <= truth <= high for low, high in known) / len(known)


@pytest.mark.slow
@pytest.mark.parametrize("num_steps", [5, 20])
@pytest.mark.parametrize("accumulations", [[2, 4, 8, 16], [8] * 6], ids=str)
@pytest.mark.parametrize("noise_scale", [10.0, 200.0, 5000.0])
def test_the_pooled_interval_covers(noise_scale: float, accumulations: list[int], num_steps: int) -> None:
    found = [pooled_noise_scale(trials) for trials in studies(noise_scale, accumulations, num_steps)]
    assert 0.90 <= coverage(found, noise_scale) <= 0.995


@pytest.mark.slow
def test_it_is_narrower_than_the_trials_that_it_comes_from() -> None:
    for trials in studies(20.0, [8] * 6, 20)[:20]:
        pooled, own = pooled_noise_scale(trials), [pooled_noise_scale([one]) for one in trials]
        assert pooled is not None
        assert pooled.high is not None
        widths = [1 / one.low - 1 / (one.high or math.inf) for one in own if one]
        assert 1 / pooled.low - 1 / pooled.high < sum(widths) / len(widths)


def noisy(point: float | None, low: float, high: float | None) -> Trial:
    """A trial that has measured this in 20 steps."""
    inverse = 1 / point if point else 0.0
    scale = {"noise_scale": point, "noise_scale_low": low, "noise_scale_high": high}
    parts = {"": inverse, "_error": (1 / low - inverse) / 2, "_steps": 20}
    return trial(scale | {f"inverse_noise_scale{part}": value for part, value in parts.items()})


def test_a_single_trial_says_its_own() -> None:
    scale = pooled_noise_scale([noisy(100.0, 90.0, 110.0), trial({})])
    assert scale == NoiseScale(100.0, 90.0, 110.0)
    assert str(scale) == "100 [90, 110]"


def test_an_unbounded_noise_scale_is_said_as_a_lower_bound() -> None:
    scale = pooled_noise_scale([noisy(None, 900.0, None)])
    assert scale is not None
    assert str(scale) == "> 900"
    both = pooled_noise_scale([noisy(None, 900.0, None)] * 2)
    assert both is not None
    assert both.low > 900.0
    assert (both.point, both.high) == (None, None)


def test_without_an_estimate_there_is_none() -> None:
    assert pooled_noise_scale([trial({})]) is None
    assert pooled_noise_scale([]) is None
    assert pooled_noise_scale([trial({"noise_scale": 0.0})] * 3) is None
