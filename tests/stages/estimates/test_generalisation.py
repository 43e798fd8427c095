"""Whether a larger batch widens the generalisation gap, and where a run began to overfit."""

from __future__ import annotations

import random
import statistics
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from batchscout.orchestrator.config.trial import base_trial
from batchscout.orchestrator.output.report.page import render_report
from batchscout.orchestrator.output.status import print_status
from batchscout.orchestrator.stages.estimates.generalisation import (
    Gap,
    Generalisation,
    generalisation_of,
    long_overfitting_of,
    overfitting_of,
)
from batchscout.orchestrator.stages.estimates.ranking import PRIOR_DEGREES, USUAL_GAIN, standings
from batchscout.orchestrator.stages.estimates.surface import PRIOR
from batchscout.orchestrator.stages.train import TrainFindings
from batchscout.orchestrator.stages.train.conclude import on_widening
from batchscout.orchestrator.study.state import Study
from batchscout.orchestrator.study.trial import Metrics, Proposal, Trial, TrialState
from batchscout.trainers.config import TrialConfig
from tests.support.lane_player import World, play_stage, study_of
from tests.support.loss_worlds import FLAT
from tests.support.outcome import found_by, recommendation_of

CONFIG = base_trial(study_of(), None)
NOISE = PRIOR.seed_deviation * USUAL_GAIN
"""The share of the loss that seeds make where no run was evaluated before its end."""


def trial(batch: int, gap: float | None, val_loss: float = 3.0, seed: int = 0, **changes: Any) -> Trial:
    config = CONFIG.model_copy(update={"micro_batch_size": batch, "seed": seed})
    metrics: Metrics = {"val_loss": val_loss, "generalisation_gap": gap}
    candidate = changes.pop("candidate", f"m{batch}")
    proposal = Proposal(f"{candidate}-s{seed}", "train", config, candidate=candidate)
    return Trial(proposal, state=TrialState.COMPLETE, metrics=metrics | changes.pop("metrics", {}), **changes)


def test_a_batch_has_the_gap_of_its_best_run() -> None:
    runs = [trial(8, 0.1, 2.0), trial(8, 0.5, 2.5, candidate="m8-lr2"), trial(32, 0.3, 2.1)]
    measured = generalisation_of(standings(runs))
    assert measured is not None
    assert [(gap.effective_batch_size, gap.gap) for gap in measured.gaps] == [(8, 0.1), (32, 0.3)]


@pytest.mark.parametrize(("gap", "wider"), [(0.140, False), (0.150, True), (0.0, False)])
def test_with_one_seed_it_is_wider_by_more_than_the_deviation_of_the_difference_of_two_losses(
    gap: float, wider: bool
) -> None:
    measured = generalisation_of(standings([trial(8, 0.1), trial(32, gap)]))
    assert measured is not None
    assert measured.deviation == pytest.approx(2**0.5 * NOISE * 3.0)  # 0.045
    assert measured.is_wider(measured.gaps[1]) is wider


def test_with_several_seeds_the_deviation_is_that_of_differences_within_seeds() -> None:
    """Seeds are measured on samples of their own, which are harder or easier for all batches: here by 0.2. What runs of one
    seed differ by is 0.01, beside which the prior of 1 % counts with two degrees of freedom."""
    deviations = []
    for world in range(200):
        draw = random.Random(world)
        easier = [draw.gauss(0, 0.2) for _ in range(3)]
        runs = [
            trial(batch, 0.1 + easier[seed] + draw.gauss(0, 0.01), 3.0 + batch / 1000, seed)
            for batch in (8, 16, 32)
            for seed in range(3)
        ]
        measured = generalisation_of(standings(runs))
        assert measured is not None
        deviations.append(measured.deviation**2)
    expected = (4 * 0.01**2 + PRIOR_DEGREES * (NOISE * 3.016) ** 2) / (4 + PRIOR_DEGREES)
    assert statistics.fmean(deviations) == pytest.approx(2 / 3 * expected, rel=0.1)


def test_runs_that_measured_none_have_no_gap() -> None:
    assert generalisation_of(standings([trial(8, None), trial(32, None)])) is None
    measured = generalisation_of(standings([trial(8, None), trial(32, 0.1)]))
    assert measured is not None
    assert [gap.effective_batch_size for gap in measured.gaps] == [32]


def curve(*points: tuple[int, float, float]) -> tuple[Metrics, ...]:
    """(samples, validation loss, training loss) of each evaluation."""
    return tuple({"samples_seen": x, "val_loss": val, "loss": loss} for x, val, loss in points)


@pytest.mark.parametrize(
    ("end", "overfits"),
    [((600, 2.4, 1.0), True), ((600, 2.005, 1.0), False), ((600, 2.4, 1.9), False), ((600, 1.9, 1.0), False)],
    ids=["rises", "once", "training loss rises too", "falls"],
)
def test_a_run_overfits_where_its_validation_loss_rises_while_training_loss_falls(
    end: tuple[int, float, float], overfits: bool
) -> None:
    rising = (300, 2.1, 1.6), (400, 2.2, 1.4), (500, 2.3, 1.2)
    *before, last = curve((100, 3.0, 3.0), (200, 2.0, 1.8), *rising, end)
    measured = overfitting_of(trial(8, 0.1, history=tuple(before), metrics=last))
    assert (measured is not None) is overfits
    if measured is not None:
        assert str(measured) == (
            "validation loss was lowest after 200 samples (2.000) and rose to 2.400 while training loss fell from 1.800 to 1.000"
        )
        assert asdict(measured)["samples_seen"] == 200


def long_run(*val_losses: float, seed: int = 0) -> Trial:
    """With these validation losses at equal distances, and a training loss that falls."""
    config = CONFIG.model_copy(update={"sample_budget": 100 * len(val_losses), "seed": seed})
    points = curve(*((100 * (place + 1), loss, 3.0 - 0.1 * place) for place, loss in enumerate(val_losses)))
    proposal = Proposal(f"m8-s{seed}", "train", config, candidate="m8")
    return Trial(proposal, state=TrialState.COMPLETE, metrics=points[-1], history=points)


@pytest.mark.parametrize(
    ("val_losses", "lowest_after"),
    [
        ((0.31, 0.42, 0.43, 0.46, 0.49, 0.52, 0.54, 0.57), 100),
        ((0.52, 0.32, 0.26, 0.28, 0.36, 0.35, 0.35, 0.36), 300),
        ((0.52, 0.40, 0.35, 0.31, 0.29, 0.28, 0.30, 0.33), None),
        ((0.52, 0.40, 0.35, 0.36, 0.34, 0.35, 0.35, 0.36), None),
        ((0.30, 0.40, 0.50), None),
    ],
    ids=["from the first on", "from a third on", "late", "a plateau", "three evaluations"],
)
def test_a_run_is_long_past_its_lowest_loss_where_that_is_early_and_stands_out(
    val_losses: tuple[float, ...], lowest_after: int | None
) -> None:
    (standing,) = standings([long_run(*val_losses)])
    found = long_overfitting_of(standing)
    assert (found and found.samples_seen) == lowest_after


def test_that_holds_of_a_setting_where_each_of_its_seeds_is() -> None:
    past, not_past = (0.31, 0.42, 0.43, 0.46, 0.49, 0.52, 0.54, 0.57), (0.6, 0.5, 0.4, 0.3, 0.2, 0.1, 0.1, 0.1)
    (both,) = standings([long_run(*past), long_run(*past, seed=1)])
    (one,) = standings([long_run(*past), long_run(*not_past, seed=1)])
    assert long_overfitting_of(both)
    assert long_overfitting_of(one) is None


@pytest.mark.parametrize("evaluations", [2, 4, 5, 6, 8, 12, 16])
def test_noise_on_a_plateau_is_overfitting_in_4_of_100_runs_at_most_however_often_they_are_evaluated(
    evaluations: int,
) -> None:
    noise = random.Random(0)
    runs = [long_run(*(noise.gauss(1.0, 0.02) for _ in range(evaluations))) for _ in range(600)]
    assert sum(overfitting_of(run) is not None for run in runs) / len(runs) <= 0.04


def test_a_rise_that_no_evaluation_stands_out_of_is_overfitting_where_it_is_more_than_a_trifle() -> None:
    for rise, overfits in ((0.02, True), (0.0005, False)):
        losses = (3.0, 2.5, 2.2, *(2.0 + rise * number for number in range(5)))
        assert (overfitting_of(long_run(*losses)) is not None) is overfits


def widening(per_doubling: float) -> World:
    """A flat world whose gap widens by so much with every doubling of the batch."""

    def world(config: TrialConfig, samples: int) -> dict[str, Any]:
        point = FLAT(config, samples)
        gap = 0.1 + per_doubling * (config.effective_batch_size.bit_length() - 4)
        return point | {"generalisation_gap": gap, "train_loss": point["val_loss"] - gap}

    return world


def played(path: Path, per_doubling: float) -> Study:
    config = study_of(stages=[{"type": "train"}], sample_budget=4096)
    rates = FLAT.rates((8, 16, 32, 64))
    return play_stage(path / "journal.jsonl", config, "train", widening(per_doubling), found=[rates])


def test_the_train_stage_says_where_a_larger_batch_widens_it_and_by_how_much_seeds_do(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config, known = study_of(stages=[{"type": "train"}], sample_budget=4096), played(tmp_path, 0.1)
    findings, recommendation = found_by(known, TrainFindings), recommendation_of(config, known)
    assert findings.generalisation is not None
    note = next(note for note in recommendation.evidence.notes if "widens with the batch" in note)
    for gap in findings.generalisation.gaps:
        assert f"{gap.gap:+.2g} at effective batch {gap.effective_batch_size} (4,096 samples)" in note
    assert note.endswith(f"seeds alone vary by {findings.generalisation.deviation:.2g}")
    mine = findings.generalisation.of_batch(recommendation.effective_batch_size)
    assert mine is not None
    assert recommendation.evidence.generalisation_gap == pytest.approx(mine.gap)
    assert all(one.generalisation_gap for one in recommendation.alternatives)
    page = render_report(config, known, recommendation)
    assert "generalisation gap</th>" in page
    assert "less the loss over samples that it was trained on" in page
    print_status(config, known, is_driven=False)
    assert f", gap {mine.gap:+.2g}" in capsys.readouterr().out


def test_a_gap_that_falls_at_the_largest_batch_is_not_said_to_widen() -> None:
    def said(*gaps: float) -> list[str]:
        return on_widening(Generalisation(tuple(Gap(2**i, 100, gap) for i, gap in enumerate(gaps)), 0.03))

    assert said(0.07, 0.14, 0.45, 0.18) == []
    assert said(0.07, 0.14, 0.19, 0.18), "within what seeds vary"
    assert said(0.18, 0.14, 0.19) == []


def test_it_says_nothing_where_no_batch_widens_it(tmp_path: Path) -> None:
    assert not any("widens" in note for note in played(tmp_path, 0.001).conclusions["train"].notes)
