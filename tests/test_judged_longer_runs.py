"""The judge of answers for longer runs (benchmarks/horizons.py) is right itself."""

from __future__ import annotations

import math

import pytest
from horizons import Study, best_at, judged, waste_at
from made_worlds import Made, drifting, made_world

NUMBERS = range(3)


def world(number: int) -> Made:
    return drifting(made_world("plain", number))


@pytest.mark.parametrize("number", NUMBERS)
def test_at_the_studys_own_length_a_drifting_world_is_the_one_that_it_was(number: int) -> None:
    still = made_world("plain", number)
    for batch in still.budgets:
        for u in (-1.0, 0.0, 1.5):
            rate = still.rule(batch) * 2**u
            assert world(number).mean_loss(batch, rate) == pytest.approx(still.mean_loss(batch, rate))


@pytest.mark.parametrize("number", NUMBERS)
def test_the_best_rate_of_a_length_is_that_world_s_lowest(number: int) -> None:
    drifts = world(number)
    batch, rate = best_at(drifts, 8.0)
    lowest = drifts.mean_loss(batch, rate, 8.0)
    assert rate == pytest.approx(drifts.best_rate(batch) * 8.0**drifts.rate_drift)
    assert all(drifts.mean_loss(batch, rate * 2**u, 8.0) > lowest for u in (-0.5, 0.5))
    assert all(drifts.mean_loss(b, drifts.best_rate_at(b, 8.0), 8.0) >= lowest for b in drifts.budgets)


@pytest.mark.parametrize("share", [0.5, 0.8])
def test_a_waste_is_the_share_of_the_time_that_the_best_setting_does_not_need(share: float) -> None:
    drifts = world(0)
    batch, rate = best_at(drifts, 8.0)
    assert waste_at(drifts, (batch, rate), 8.0) == pytest.approx(0.0, abs=1e-4)
    aim = drifts.mean_loss(*best_at(drifts, 8.0 * share), 8.0 * share)
    off = math.sqrt(
        (aim - drifts.mean_loss(batch, rate, 8.0))
        / (drifts.late_gain * drifts.curvature * 8.0 ** -drifts.exponent[batch])
    )
    assert waste_at(drifts, (batch, rate * 2**-off), 8.0) == pytest.approx(1 - share, abs=1e-3)


def test_a_study_is_held_against_the_longer_run_beside_who_keeps_its_answer() -> None:
    found = judged(Study("plain", ("plain", 0), 0, 8.0))
    assert found.wastes.keys() == {"ours", "kept", "by the power"}
    assert all(0 <= waste < 1 for waste in found.wastes.values())
    assert found.loss_holds is not None
    assert found.rate_holds is not None
