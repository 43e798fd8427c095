"""Which batch and rate a longer run should have: the laws that carry a surface to another length, and the stage that uses them."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

from batchscout.orchestrator.config.keys import StudyConfig
from batchscout.orchestrator.config.trial import warmup_samples
from batchscout.orchestrator.output.exports import export
from batchscout.orchestrator.output.recommendation import Recommendation
from batchscout.orchestrator.output.report.answer import paste_text
from batchscout.orchestrator.output.report.page import render_report
from batchscout.orchestrator.stages.estimates.surface import Coordinates, Observation, Setting, Surface, fit
from batchscout.orchestrator.stages.horizons import HorizonsFindings
from batchscout.orchestrator.stages.horizons.longer import BATCH_DRIFT, RATE_DRIFT, Carried, Ended, carried, room_for
from batchscout.orchestrator.stages.throughput import ThroughputFindings
from batchscout.orchestrator.stages.train import TrainFindings
from batchscout.orchestrator.study.events import FactsRead
from batchscout.orchestrator.study.facts import Facts
from batchscout.orchestrator.study.journal import Journal
from batchscout.orchestrator.study.state import Study
from tests.support.example_study import tell
from tests.support.lane_player import director_of, play_study, study_of
from tests.support.loss_worlds import IDEAL, SMALL_IS_RIGHT, LossWorld
from tests.support.outcome import found_by, recommendation_of

BUDGET = 8192
BATCHES = (8, 16, 32, 64)
LATE_GAIN = 0.1
RULE = {batch: 1e-3 * (batch / 16) ** 0.5 for batch in BATCHES}


# The laws


def true_loss(batch: int, rate: float, octaves: float, rate_drift: float = -0.4, best: int = 16) -> float:
    """A world of late gain 0.1, whose best rates are the rule's at the study's own length. best: its best batch there."""
    u, x = math.log2(rate / RULE[batch]), math.log2(batch / best)
    left = 2 ** (-0.4 * octaves)
    off = 0.25 * (u - octaves * rate_drift) ** 2 + 0.1 * (x - octaves * 0.4) ** 2
    return 3.0 + LATE_GAIN * (left * off - 0.6 * (1 - left) / (2**0.4 - 1))


def own_length(best: int = 16) -> Surface:
    """What twelve runs with little noise tell."""
    runs = [
        Observation(batch, RULE[batch] * 2.0**u, true_loss(batch, RULE[batch] * 2.0**u, 0.0, best=best))
        for batch in BATCHES
        for u in (-1, 0, 1)
    ]
    return fit(Coordinates(RULE), runs, LATE_GAIN, room=room_for(6.0, -2.0))


def shorter_runs(rate_drift: float) -> list[Ended]:
    settings = [
        (batch, RULE[batch] * 2.0**u, octaves)
        for batch, u in ((16, -1), (16, 0), (16, 1), (64, 0))
        for octaves in (-2.0, -1.0)
    ]
    return [Ended(Setting(b, r), octaves, true_loss(b, r, octaves, rate_drift)) for b, r, octaves in settings]


def best_u_at(law: Carried, octaves: float) -> float:
    return float(np.median(law.at(octaves).best_u(16)))


def test_at_the_studys_own_length_the_surface_is_what_it_was() -> None:
    surface = own_length()
    law = carried(surface, [])
    for batch in BATCHES:
        for u in (-1.0, 0.25, 2.0):
            assert np.median(law.at(0.0).loss(batch, u)) == pytest.approx(np.median(surface.loss(batch, u)), abs=0.01)


@pytest.mark.parametrize("rate_drift", [-0.6, 0.2])
def test_what_best_rates_do_from_a_quarter_of_the_length_on_goes_on(rate_drift: float) -> None:
    law = carried(own_length(), shorter_runs(rate_drift))
    drawn_to = (rate_drift + RATE_DRIFT) / 2
    low, high = sorted((rate_drift, drawn_to))
    assert low - 0.15 <= float(np.median(law.rate_drift)) <= high + 0.15
    unheard = carried(own_length(), [])
    assert np.std(law.rate_drift) < 0.8 * np.std(unheard.rate_drift)
    assert np.sign(best_u_at(law, 3.0) - best_u_at(unheard, 3.0)) == np.sign(rate_drift - RATE_DRIFT)


def test_a_longer_run_has_a_larger_best_batch_and_a_lower_best_rate_before_any_run_of_another_length() -> None:
    law = carried(own_length(), [])
    assert np.median(law.rate_drift) == pytest.approx(RATE_DRIFT, abs=0.03)
    assert np.median(law.batch_drift) == pytest.approx(BATCH_DRIFT, abs=0.03)
    now, later = law.at(0.0).p_best, law.at(4.0).p_best
    assert (
        sum(p * math.log2(batch) for batch, p in later.items())
        > sum(p * math.log2(batch) for batch, p in now.items()) + 0.5
    )
    assert best_u_at(law, 4.0) < best_u_at(law, 0.0) - 0.5


def test_the_best_batch_grows_where_the_smallest_that_was_run_is_the_best_of_the_study() -> None:
    """What a longer run at that batch comes to is what a still smaller one comes to here: worse, though none was run."""
    law = carried(own_length(best=8), [])
    p_best = [law.at(octaves).p_best[8] for octaves in (0.0, 2.0, 4.0, 6.0)]
    assert p_best[0] > 0.9
    assert p_best == sorted(p_best, reverse=True)
    assert p_best[2] < 0.6


def test_the_further_away_the_less_is_known() -> None:
    law = carried(own_length(), shorter_runs(-0.4))
    widths = [np.ptp(np.quantile(law.at(octaves).lowest, (0.05, 0.95))) for octaves in (0.0, 1.0, 3.0, 6.0)]
    assert widths == sorted(widths)
    assert widths[3] > 2 * widths[1]


def test_the_interval_of_a_longer_run_holds_what_it_ends_at() -> None:
    law = carried(own_length(), shorter_runs(-0.4))
    for octaves in (1.0, 2.0, 3.0):
        surface, truth = law.at(octaves), min(true_loss(b, RULE[b] * 2 ** (-0.4 * octaves), octaves) for b in BATCHES)
        low, high = np.quantile(surface.lowest, (0.05, 0.95))
        assert low <= truth <= high
        assert high - low < 0.25, "about twice what it falls by in three doublings"


def test_a_run_that_the_law_cannot_explain_tells_little() -> None:
    """One that was nearly all warm-up ends far above the others, and lets nobody expect the next doubling to gain as much."""
    runs = shorter_runs(-0.4)
    spoilt = [*runs[1:], Ended(runs[0].setting, -2.0, runs[0].loss + 5.0)]
    with_it, without = (carried(own_length(), some).at(2.0).lowest for some in (spoilt, runs[1:]))
    assert abs(np.median(with_it) - np.median(without)) < 0.02


def test_the_same_runs_give_the_same_draws() -> None:
    laws = [carried(own_length(), shorter_runs(-0.4)) for _ in range(2)]
    assert (laws[0].at(2.0).of_rate == laws[1].at(2.0).of_rate).all()


# The stage


def played(
    path: Path,
    truth: LossWorld,
    factor: int = 4,
    batches: Sequence[int] = (8, 64),
    rates: ThroughputFindings | None = None,
    **changes: Any,
) -> tuple[StudyConfig, Study]:
    """Train, then the horizons of a real run that is so many times as long."""
    config = study_of(
        stages=[{"type": "train"}], sample_budget=BUDGET, real_run={"samples": factor * BUDGET}, **changes
    )
    return config, play_study(path / "journal.jsonl", config, truth, [rates or truth.rates(batches)])


def answer(config: StudyConfig, study: Study) -> tuple[HorizonsFindings, Recommendation]:
    return found_by(study, HorizonsFindings), recommendation_of(config, study)


def at_length(world: LossWorld, batch: int, factor: float) -> float:
    return world.best_loss(batch, factor * BUDGET * world.samples_per_second(batch) / world.samples_per_second(8))


@pytest.mark.parametrize("factor", [2, 8])
def test_the_loss_of_the_real_run_lies_within_its_interval_and_the_better_batch_is_named(
    tmp_path: Path, factor: int
) -> None:
    findings, _ = answer(*played(tmp_path, IDEAL, factor))
    assert findings.samples == factor * BUDGET
    assert findings.effective_batch_size == 64
    for one in findings.batches:
        truth = at_length(IDEAL, one.effective_batch_size, factor)
        assert one.val_loss_low <= truth <= one.val_loss_high
    assert sum(one.p_best for one in findings.batches) == pytest.approx(1.0)
    rule = 1e-3 * 8**0.5
    assert findings.learning_rate_low <= rule <= findings.learning_rate_high, "the best rate of this world never drifts"


def test_the_real_runs_answer_is_the_answer_everywhere(tmp_path: Path) -> None:
    """Its length, learning rate and warm-up are those of recommendation.json, of every export and of the verdict; what the study
    measured is its evidence."""
    config, study = played(tmp_path, IDEAL)
    findings, recommendation = answer(config, study)
    batch, budget = findings.effective_batch_size, findings.sample_budget
    assert budget is not None
    assert budget == pytest.approx(4 * study.trials[f"train-m{batch}k1"].config.sample_budget, rel=0.02)
    assert (recommendation.effective_batch_size, recommendation.sample_budget) == (batch, budget)
    page = render_report(config, study, recommendation)
    beside, apart = (page.index(f'id="{chart}"') for chart in ("horizons-horizons", "train-differences"))
    assert beside < page.index('<section id="train"') < apart, (
        "what a choice saves in a run of the study's length is not the answer"
    )
    assert recommendation.learning_rate == findings.learning_rate
    assert recommendation.warmup_samples == warmup_samples(config, batch, budget)
    assert recommendation.real_run == findings
    assert (recommendation.time, recommendation.regret_time) == (findings.time, findings.regret_time)
    assert recommendation.p_best == next(one.p_best for one in findings.batches if one.effective_batch_size == batch)
    own = study.trials[recommendation.evidence.trial].config
    assert own.sample_budget < budget
    text = recommendation.verdict
    assert text.startswith("Train with micro-batch 64, no accumulation (effective batch 64)")
    assert f"learning rate {findings.learning_rate:.3g}: for the real run of 32.8k samples, 4 x this study's, " in text
    assert (
        f"of which effective batch {own.effective_batch_size} at learning rate {own.learning_rate:.3g} was chosen"
        in text
    )
    pasted = yaml.safe_load(paste_text(recommendation, config.optimizer).split("# or one")[0])
    assert (pasted["sample_budget"], pasted["real_run"]) == (budget, None), (
        "and a grid goes without what comes after train"
    )
    assert json.loads(export(recommendation, "nanogpt").split("max_iters = ")[1].splitlines()[0]) == budget // batch


@pytest.mark.parametrize(("num_samples", "is_told"), [(BUDGET, True), (None, False), (100 * BUDGET, False)])
def test_a_real_run_that_meets_its_samples_more_often_than_any_that_was_measured_is_told(
    tmp_path: Path, num_samples: int | None, is_told: bool
) -> None:
    config, study = played(tmp_path, IDEAL, 8)
    tell(study, FactsRead(facts=Facts(num_train_samples=num_samples)))
    caveats = answer(config, study)[1].answer.caveats
    assert any("leaves out what repetition and overfitting do there" in one for one in caveats) is is_told


@pytest.mark.parametrize(("offset", "curvature", "factor", "stays"), [(1.0, 0.012, 64, True), (0.8, 0.05, 16, False)])
def test_your_own_setting_is_left_for_one_that_is_likelier_better_than_not_at_the_real_runs_length(
    tmp_path: Path, offset: float, curvature: float, factor: int, stays: bool
) -> None:
    """A higher rate is better for a run of the study's length; how much lower the best one of a longer run is is not known."""
    config, study = played(tmp_path, replace(SMALL_IS_RIGHT, offset=offset, curvature=curvature), factor)
    assert not found_by(study, TrainFindings).keeps_own
    findings, recommendation = answer(config, study)
    assert findings.keeps_own is stays
    if stays:
        assert (recommendation.effective_batch_size, recommendation.learning_rate) == (8, 1e-3)
        assert "your own setting" in recommendation.answer.gain
    else:
        assert findings.time is not None
        assert findings.time.p_better > 0.5


def test_a_study_that_does_not_know_how_long_its_run_is_says_so(tmp_path: Path) -> None:
    config = study_of(stages=[{"type": "train"}], sample_budget=BUDGET)
    study = play_study(tmp_path / "journal.jsonl", config, IDEAL, [IDEAL.rates((8, 64))])
    assert recommendation_of(config, study).verdict.endswith(" For a longer run, give real_run.samples.")


def test_it_is_recommended_in_the_mode_that_its_batch_was_timed_in(tmp_path: Path) -> None:
    """The small batch was timed without activation checkpointing, the large one with: without it it need not fit."""
    timed = IDEAL.rates((8, 64))
    full = replace(timed.rates[1].mode, activation_checkpointing="full")
    timed = replace(timed, rates=(timed.rates[0], replace(timed.rates[1], mode=full)))
    config, study = played(tmp_path, IDEAL, rates=timed)
    recommendation = answer(config, study)[1]
    assert recommendation.effective_batch_size == 64
    assert recommendation.activation_checkpointing == "full"


def test_where_nothing_could_be_carried_the_answer_says_that_it_is_the_studys_own_length(tmp_path: Path) -> None:
    config, study = played(tmp_path, IDEAL)
    study.conclusions.pop("horizons")
    recommendation = recommendation_of(config, study)
    assert recommendation.sample_budget < 4 * BUDGET
    assert (
        "Warning: this holds for a run of 8.19k samples, the study's own, and not for the real run's 32.8k: horizons has yet to conclude."
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
        ({"real_run": {"samples": 2000}, "objective": "target", "target_loss": 3.0}, "real_run compares losses"),
        ({"real_run": {"samples": 2000}, "stages": [{"type": "frontier"}]}, "goes on from what the stage train finds"),
        ({"stages": [{"type": "train"}, {"type": "horizons"}]}, "the stage horizons needs real_run"),
        (
            {"real_run": {"samples": 2000}, "stages": [{"type": t} for t in ("train", "horizons", "learning_rate")]},
            "horizons extends what learning_rate finds, but comes before it in stages; move it after learning_rate",
        ),
    ],
)
def test_what_cannot_be_carried_that_far_is_refused_with_the_remedy(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        study_of(**{"sample_budget": 1000} | changes)
