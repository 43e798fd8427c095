"""The noise scale of known gradients is found, its interval covers, and noise is not taken for signal."""

from __future__ import annotations

import math
import statistics
from typing import Any

import pytest

from batchscout.trainers.noise.noise_estimate import NoiseEstimate, SquaredNorms, estimate_noise, interval_of_ratio
from tests.support.every import for_every
from tests.support.gradients import known_windows

NOT_AVAILABLE = NoiseEstimate()
SPLITS = [(4, 2), (2, 8)]  # (micro-batch size, micro-batches per step)


def covers(found: NoiseEstimate, noise_scale: float) -> bool:
    return (found.noise_scale_low or 0) <= noise_scale <= (found.noise_scale_high or math.inf)


def coverage(noise_scale: float, split: tuple[int, int], num_steps: int, truth: float = 0.0, **changes: Any) -> float:
    """The share of 300 intervals that hold the truth, which is the noise scale where it is not given."""
    size, count = split
    windows = known_windows(
        0, noise_scale=noise_scale, micro_batch_size=size, num_micro_batches=count, num_steps=num_steps,
        num_windows=300, **changes,
    )  # fmt: skip
    return sum(covers(estimate_noise(steps, size, count), truth or noise_scale) for steps in windows) / 300


@for_every(num_steps=[5, 10, 40], split=SPLITS, noise_scale=[10.0, 200.0, 5000.0, 50_000.0])
def test_the_interval_covers_the_true_noise_scale(noise_scale: float, split: tuple[int, int], num_steps: int) -> None:
    assert 0.90 <= coverage(noise_scale, split, num_steps) <= 0.99


@pytest.mark.parametrize(
    ("truth", "changes"),
    [
        (1.0, {"uneven": True}),
        (1.0, {"spectrum": 1.0}),
        (2.0, {"design_effect": 2.0}),
    ],
    ids=["uneven targets", "few directions with most of the noise", "every sample twice"],
)
@for_every(num_steps=[5, 40], split=SPLITS, noise_scale=[10.0, 50_000.0])
def test_it_covers_what_the_noise_of_batches_so_drawn_is(
    truth: float, changes: dict[str, Any], noise_scale: float, split: tuple[int, int], num_steps: int
) -> None:
    """Where every sample comes twice a batch is worth half as many."""
    assert coverage(noise_scale, split, num_steps, truth * noise_scale, **changes) >= 0.90


def test_what_all_micro_batches_of_a_step_share_is_taken_for_signal() -> None:
    """Norms cannot tell it, so samples have to be shuffled: of 200 samples hardly 21 are left."""
    (steps,) = known_windows(0, noise_scale=200.0, micro_batch_size=8, num_micro_batches=8, num_steps=2000, shared=0.25)
    expected = 0.75 * 200 / (1 + 0.25 * 200 / 8)
    assert estimate_noise(steps, 8, 8).noise_scale == pytest.approx(expected, rel=0.05)
    assert coverage(200.0, (8, 8), 40, shared=0.25) < 0.05


@pytest.mark.parametrize("uneven", [False, True])
@pytest.mark.parametrize(("size", "count"), [(1, 2), (4, 2), (2, 8), (8, 16)])
def test_noise_scale_and_coherence_go_to_the_truth_whatever_the_split(size: int, count: int, uneven: bool) -> None:
    (steps,) = known_windows(
        0, noise_scale=20.0, micro_batch_size=size, num_micro_batches=count, num_steps=40_000 // count, uneven=uneven
    )
    found = estimate_noise(steps, size, count)
    assert found.noise_scale == pytest.approx(20.0, rel=0.05)
    if not uneven:
        assert found.coherence == pytest.approx(1 / (1 + 20.0 / size), rel=0.05)


def pure_noise(num_micro_batches: int, num_steps: int) -> list[list[SquaredNorms]]:
    return known_windows(
        0, noise_scale=math.inf, micro_batch_size=1, num_micro_batches=num_micro_batches, num_steps=num_steps,
        num_windows=300,
    )  # fmt: skip


@pytest.mark.parametrize("num_steps", [5, 30])
@pytest.mark.parametrize("num_micro_batches", [2, 8, 16])
def test_the_coherence_of_pure_noise_is_within_its_floor(num_micro_batches: int, num_steps: int) -> None:
    estimates = [estimate_noise(steps, 1, num_micro_batches) for steps in pure_noise(num_micro_batches, num_steps)]
    pairs = [(e.coherence, e.coherence_floor) for e in estimates]
    coherences = [(coherence, floor) for coherence, floor in pairs if coherence is not None and floor is not None]
    assert len(coherences) == 300
    within = sum(abs(coherence) <= floor for coherence, floor in coherences)
    assert 0.91 <= within / 300 <= 0.99  # two-sided 95 %, three standard errors
    assert abs(statistics.fmean(coherence for coherence, _ in coherences)) < 0.01


def test_the_floor_falls_with_the_pairs_of_a_step_and_with_the_steps() -> None:
    def floor(num_micro_batches: int, num_steps: int) -> float:
        estimates = [estimate_noise(steps, 1, num_micro_batches) for steps in pure_noise(num_micro_batches, num_steps)]
        return statistics.fmean(estimate.coherence_floor or math.inf for estimate in estimates)

    few = floor(2, 30)
    assert floor(8, 30) / few == pytest.approx(math.sqrt(2 * 1 / (8 * 7)), rel=0.1)
    assert floor(2, 120) / few == pytest.approx(1 / 2, rel=0.1)


def test_pure_noise_has_no_upper_bound() -> None:
    bounded = [estimate_noise(steps, 1, 4).noise_scale_high for steps in pure_noise(4, 30)]
    assert sum(high is None for high in bounded) >= 270


def test_a_signal_is_above_the_floor() -> None:
    (steps,) = known_windows(0, noise_scale=8.0, micro_batch_size=2, num_micro_batches=4, num_steps=30)
    found = estimate_noise(steps, 2, 4)
    assert found.coherence is not None
    assert found.coherence_floor is not None
    assert found.coherence > found.coherence_floor > 0


def test_equal_micro_batches_are_all_signal() -> None:
    found = estimate_noise([SquaredNorms(2.0, 2.0), SquaredNorms(3.0, 3.0)], 4, 2)
    assert (found.coherence, found.noise_scale) == (1.0, 0.0)


def test_a_step_that_overflowed_does_not_count() -> None:
    (steps,) = known_windows(0, noise_scale=8.0, micro_batch_size=2, num_micro_batches=4, num_steps=30)
    broken = [SquaredNorms(math.inf, math.nan), *steps, SquaredNorms(math.nan, 1.0)]
    assert estimate_noise(broken, 2, 4) == estimate_noise(steps, 2, 4)


def test_one_micro_batch_says_nothing_and_one_step_has_no_interval() -> None:
    assert estimate_noise([SquaredNorms(1.0, 1.0)] * 10, 8, 1) == NOT_AVAILABLE
    assert estimate_noise([], 8, 2) == NOT_AVAILABLE
    found = estimate_noise([SquaredNorms(2.0, 1.5)], 8, 2)
    assert found.noise_scale is not None
    assert (found.noise_scale_low, found.noise_scale_high, found.coherence_floor) == (None, None, None)


def test_a_ratio_whose_denominator_may_be_zero_may_be_anything() -> None:
    assert interval_of_ratio([1.0, 2.0, 3.0], [-1.0, 0.0, 1.5]) == (-math.inf, math.inf)
    low, high = interval_of_ratio([4.0, 4.2, 4.4], [2.0, 2.1, 2.2])
    assert (low, high) == pytest.approx((2.0, 2.0))
