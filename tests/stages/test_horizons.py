"""Which batch and rate a longer run should have: the laws of the extrapolation, and the stage that uses it."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from batchscout.orchestrator.config.keys import StudyConfig
from batchscout.orchestrator.output.recommendation import Recommendation, recommend
from batchscout.orchestrator.stages.findings import found
from batchscout.orchestrator.stages.horizons import HorizonsFindings
from batchscout.orchestrator.stages.horizons.extrapolate import BestRate, Ended, best_of_three, losses_at, rate_at
from batchscout.orchestrator.study.events import RunBegan
from batchscout.orchestrator.study.journal import Journal
from batchscout.orchestrator.study.state import Study
from tests.support.lane_player import Player, director_of, know, study_of
from tests.support.loss_worlds import IDEAL, LossWorld

LENGTHS = (0.25, 0.5, 1.0)
DEVIATION = 0.006
BUDGET = 8192


# Extrapolation


def curve(floor: float, scale: float, exponent: float, noise: random.Random | None = None) -> list[Ended]:
    errors = [noise.gauss(0, DEVIATION) if noise else 0.0 for _ in LENGTHS]
    return [Ended(x, floor + scale * x**-exponent + error, DEVIATION) for x, error in zip(LENGTHS, errors, strict=True)]


@pytest.mark.slow
def test_the_interval_of_an_extrapolated_loss_holds_the_truth_as_often_as_it_says() -> None:
    held, draws = 0, 150
    for seed in range(draws):
        noise = random.Random(seed)
        floor, scale, exponent = noise.uniform(0.5, 2.5), noise.uniform(0.5, 2.0), noise.gauss(0.3, 0.08)
        length = noise.choice((2.0, 4.0, 8.0))
        predicted = losses_at(length, [curve(floor, scale, exponent, noise)])[:, 0]
        low, high = np.quantile(predicted, (0.05, 0.95))
        held += low <= floor + scale * length**-exponent <= high
    assert held / draws >= 0.86, "90 %, and what 150 draws leave"


def test_further_away_less_is_known_and_at_the_studys_own_length_what_was_measured() -> None:
    runs = curve(1.8, 1.2, 0.33)
    widths = [float(np.std(losses_at(length, [runs]))) for length in (1.0, 2.0, 4.0, 8.0)]
    assert widths == sorted(widths)
    assert widths[0] <= 1.1 * DEVIATION
    assert float(np.median(losses_at(1.0, [runs]))) == pytest.approx(runs[-1].loss, abs=DEVIATION)


def test_a_batch_that_falls_faster_is_ahead_in_the_long_run_though_it_is_behind_now() -> None:
    ahead_now, ahead_later = curve(1.5, 1.00, 0.20), curve(1.5, 1.02, 0.40)
    now, later = (losses_at(length, [ahead_now, ahead_later]) for length in (1.0, 8.0))
    assert (now[:, 0] < now[:, 1]).mean() > 0.8
    assert (later[:, 1] < later[:, 0]).mean() > 0.9


def test_the_same_runs_give_the_same_draws() -> None:
    runs = [curve(1.5, 1.0, 0.3)]
    assert (losses_at(4.0, runs) == losses_at(4.0, runs)).all()


# The learning rate


def test_the_best_of_three_rates_is_the_minimum_of_their_parabola() -> None:
    for best in (-0.7, 0.0, 0.4):
        low, middle, high = (2.0 + 0.03 * (u - best) ** 2 for u in (-1, 0, 1))
        log2_rate, deviation = best_of_three(1e-3, 2.0, (low, middle, high), 0.001)
        assert log2_rate == pytest.approx(math.log2(1e-3) + best)
        assert 0 < deviation < 0.1
    assert best_of_three(1e-3, 2.0, (2.0, 2.1, 2.15), 0.001) == (math.log2(1e-3) - 1, 1.0), "no minimum among them"


def test_a_rate_that_drifts_goes_on_and_one_that_nothing_is_known_of_stays_with_a_wider_interval() -> None:
    known, short = BestRate(1.0, -10.0, 0.05), BestRate(0.25, -9.6, 0.05)
    drifting, staying = rate_at(4.0, known, short), rate_at(4.0, known, None)
    assert -10.4 < drifting.log2_rate < -10.2, "0.2 for every doubling, drawn a little to 0 by what is known of rates"
    assert staying.log2_rate == -10.0
    assert staying.deviation > drifting.deviation > known.deviation
    assert rate_at(1.0, known, short).log2_rate == known.log2_rate


# The stage


def played(
    path: Path, truth: LossWorld, factor: int = 4, batches: Sequence[int] = (8, 64), **changes: Any
) -> tuple[StudyConfig, Study]:
    """Train, then the horizons of a real run that is so many times as long."""
    config = study_of(
        stages=[{"type": "train"}], sample_budget=BUDGET, real_run={"samples": factor * BUDGET}, **changes
    )
    with Journal(path / "journal.jsonl", config.name) as journal:
        journal.append(RunBegan(token="first"))
        know(journal, [truth.rates(batches)])
        for stage in config.stages:
            Player(director_of(config, journal, stage.type), truth).play()
        return config, journal.study


def answer(config: StudyConfig, study: Study) -> tuple[HorizonsFindings, Recommendation]:
    findings, recommendation = found(study, HorizonsFindings), recommend(config, study)
    assert findings is not None
    assert recommendation is not None
    return findings, recommendation


def at_length(world: LossWorld, batch: int, factor: float) -> float:
    return world.best_loss(batch, factor * BUDGET * world.samples_per_second(batch) / world.samples_per_second(8))


@pytest.mark.parametrize("factor", [2, 8])
def test_the_loss_of_the_real_run_lies_within_its_interval_and_the_better_batch_is_named(
    tmp_path: Path, factor: int
) -> None:
    findings, recommendation = answer(*played(tmp_path, IDEAL, factor))
    assert findings.samples == factor * BUDGET
    assert findings.effective_batch_size == 64
    for one in findings.batches:
        truth = at_length(IDEAL, one.effective_batch_size, factor)
        assert one.val_loss_low <= truth <= one.val_loss_high
    assert sum(one.p_best for one in findings.batches) == pytest.approx(1.0)
    rule = 1e-3 * 8**0.5
    assert findings.learning_rate_low <= rule <= findings.learning_rate_high, "the best rate of this world never drifts"
    assert recommendation.real_run == findings
    assert (
        f" By runs of several lengths, for {factor * BUDGET / 1000:.3g}k samples ({factor} x this study's)"
        in recommendation.verdict
    )


def test_its_runs_are_whole_ones_of_shares_of_the_length_and_cost_what_the_plan_says(tmp_path: Path) -> None:
    _, study = played(tmp_path, IDEAL)
    trials = study.of_stage("horizons")
    shares = sorted(
        (
            t.config.effective_batch_size,
            t.config.sample_budget / study.trials[f"train-m{t.config.effective_batch_size}k1"].config.sample_budget,
        )
        for t in trials
    )
    assert [batch for batch, _ in shares] == [8, 8, 64, 64, 64, 64]
    assert [share for _, share in shares] == pytest.approx([0.25, 0.5, 0.25, 0.25, 0.25, 0.5], rel=0.02)
    assert all(trial.config.evaluations[-1] == trial.config.sample_budget for trial in trials)


def test_with_a_single_batch_it_tells_the_rate_and_the_loss_alone(tmp_path: Path) -> None:
    findings, _ = answer(*played(tmp_path, IDEAL, batches=(8,)))
    assert [one.p_best for one in findings.batches] == [1.0]
    assert findings.crossing_samples is None


def test_a_study_that_goes_on_asks_for_the_same_runs(tmp_path: Path) -> None:
    config, study = played(tmp_path, IDEAL)
    with Journal(tmp_path / "journal.jsonl", config.name) as journal:
        director = director_of(config, journal, "horizons")
        director.advance()
        assert director.is_finished()
        assert journal.study.trials.keys() == study.trials.keys()


# The study file


def test_a_real_run_brings_its_stage_and_the_stored_study_is_the_same() -> None:
    config = study_of(sample_budget=1000, real_run={"samples": 4000})
    assert [stage.type for stage in config.stages][-1] == "horizons"
    assert study_of(**config.model_dump(mode="json")) == config
    assert "horizons" not in [stage.type for stage in study_of().stages]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"real_run": {"samples": 800}},
            r"real_run.samples \(800\) must be more than sample_budget \(1000\).*remove real_run",
        ),
        ({"real_run": {"samples": 9001}}, r"\(9001\) must be .* at most 8 times that.*raise sample_budget to 1126"),
        ({"real_run": {"samples": 2000}, "objective": "target", "target_loss": 3.0}, "real_run compares losses"),
        ({"real_run": {"samples": 2000}, "stages": [{"type": "frontier"}]}, "goes on from what the stage train finds"),
        ({"stages": [{"type": "train"}, {"type": "horizons"}]}, "the stage horizons needs real_run"),
    ],
)
def test_what_cannot_be_carried_that_far_is_refused_with_the_remedy(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        study_of(**{"sample_budget": 1000} | changes)
