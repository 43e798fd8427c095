"""What is said of timings in turns holds: of thousands that were drawn, as often as it claims to."""

from __future__ import annotations

import math
import random

import pytest

from batchscout.orchestrator.stages.estimates.timing import MARGIN, Timings
from tests.support.every import for_every

NUM_STUDIES = 200
MIN_ROUNDS, MAX_ROUNDS = 3, 8
Rates = dict[int, float]


def timed(true: list[float], noise: float, seed: int, disturbance: float = 0.0) -> Timings[int]:
    """Rounds until the order is clear, on a machine whose speed drifts; a timing may lose most of it to others."""
    draw = random.Random(seed)
    rates: dict[int, Rates] = {name: {} for name in range(len(true))}
    while True:
        number, drift = len(rates[0]) + 1, draw.gauss(0, 0.1)
        for name, rate in enumerate(true):
            share = draw.uniform(0.2, 0.6) if draw.random() < disturbance else 1.0
            rates[name][number] = share * rate * math.exp(drift + draw.gauss(0, noise))
        found = Timings({name: dict(rounds) for name, rounds in rates.items()})
        if number == MAX_ROUNDS or (len(found.rounds) >= MIN_ROUNDS and found.is_clear()):
            return found


def share(held: list[bool]) -> float:
    return sum(held) / len(held)


WORLDS = [
    [1.0, 1.0],
    [1.0, 0.97, 0.94],
    [1.0, 0.94],
    [1.0, 0.94, 0.94, 0.94],
    [1.0, 0.9, 0.8, 0.7],
    [0.92, 0.94, 0.96, 0.98, 1.0],
]


@for_every(disturbance=[0.0, 0.05], true=WORLDS)
def test_with_5_percent_of_noise_the_fastest_is_within_5_percent_and_the_intervals_hold(
    true: list[float], disturbance: float
) -> None:
    chosen_well, covered = list[bool](), list[bool]()
    for seed in range(NUM_STUDIES):
        found = timed(true, 0.05, seed, disturbance)
        best = found.fastest_first()[0]
        chosen_well += [min(true[name] for name in found.tied()) >= 0.95 * max(true)]
        ratios = {name: found.ratio(name, best) for name in range(len(true)) if name != best}
        covered += [all(r.high and r.low <= true[name] / true[best] <= r.high for name, r in ratios.items())]
    assert share(chosen_well) >= (0.9 if disturbance else 0.94)  # 0.95, and what 200 draws leave
    assert share(covered) >= 0.9


@for_every(noise=[0.01, 0.05, 0.1], num_equal=[2, 3, 5])
def test_equals_are_hardly_ever_put_in_an_order(num_equal: int, noise: float) -> None:
    ordered = []
    for seed in range(NUM_STUDIES):
        found = timed([1.0] * num_equal, noise, seed)
        best, *others = found.fastest_first()
        ordered.append(not all(found.ratio(name, best).exceeds(1.0) for name in others))
    assert share(ordered) <= 0.1


@pytest.mark.parametrize("true", [[1.0, 0.9], [1.0, 0.9, 0.8, 0.7], [1.0, 1.0, 1.0]])
def test_a_quiet_machine_needs_no_more_rounds_than_were_asked_for(true: list[float]) -> None:
    assert share([len(timed(true, 0.01, seed).rounds) == MIN_ROUNDS for seed in range(100)]) > 0.9


def test_an_interval_of_a_rate_covers_it_and_two_of_them_their_ratio() -> None:
    true = [1.0, 0.9, 0.5]
    held = []
    for seed in range(NUM_STUDIES):
        found = timed(true, 0.05, seed)
        spans = [found.interval(name) for name in range(3)]
        (low, high), (other_low, other_high) = (span for span in spans[:2] if span)
        half = math.hypot(math.log(high / low), math.log(other_high / other_low)) / 2
        held.append(abs(math.log(found.rate(0) / found.rate(1)) - math.log(1 / 0.9)) <= half)
    assert share(held) >= 0.9


def test_means_have_the_ratio_that_the_rounds_have() -> None:
    found = Timings({"a": {1: 10.0, 2: 40.0}, "b": {1: 11.0, 2: 44.0}})
    assert found.rate("b") / found.rate("a") == pytest.approx(found.ratio("b", "a").point) == pytest.approx(1.1)


def test_a_disturbed_round_does_not_count_and_is_named() -> None:
    quiet = {"a": {n: 100.0 + n for n in range(1, 5)}, "b": {n: 90.0 + n for n in range(1, 5)}}
    found = Timings(quiet | {"a": quiet["a"] | {2: 20.0}})
    assert (found.disturbed, found.rounds, found.busy) == ((2,), (1, 3, 4), True)
    assert found.rate("a") == pytest.approx(102.7, abs=0.1)
    slow_for_all = {name: rounds | {2: rounds[2] / 5} for name, rounds in quiet.items()}
    assert not Timings(slow_for_all).busy


def test_a_round_in_which_a_gpu_slowed_itself_down_does_not_count_unless_all_are() -> None:
    """It may slow all of them down alike, and then the clock of the next round is another."""
    rates = {"a": {n: 100.0 + n for n in range(1, 5)}, "b": {n: 90.0 + n for n in range(1, 5)}}
    assert Timings(rates, seen_disturbed={1, 3}).rounds == (2, 4)
    assert Timings(rates, seen_disturbed={1, 3}).unrest().endswith("rounds 1, 3 were disturbed and do not count")
    assert Timings(rates, seen_disturbed={1, 2, 3, 4}).rounds == (1, 2, 3, 4)


def test_a_machine_that_is_noisy_all_the_time_is_busy_and_most_rounds_count() -> None:
    found = [timed([1.0, 1.0, 1.0], 0.2, seed) for seed in range(100)]
    assert share([one.busy for one in found]) > 0.9
    assert share([len(one.rounds) > MAX_ROUNDS / 2 for one in found]) > 0.75
    assert share([one.busy for one in (timed([1.0, 1.0, 1.0], 0.03, seed) for seed in range(100))]) < 0.05


def test_a_single_round_says_nothing_about_how_sure_it_is() -> None:
    found = Timings({"a": {1: 1.0}, "b": {1: 0.5}})
    assert str(found.ratio("b", "a")) == "0.50 x in a single round"
    assert not found.is_clear()
    assert found.interval("a") is None
    assert Timings({"a": {1: 1.0, 2: 2.0}}).is_clear()


def test_an_interval_that_nobody_could_use_is_not_written() -> None:
    found = Timings({"a": {1: 1.0, 2: 1.0}, "b": {1: 0.1, 2: 1.2}})
    assert str(found.ratio("b", "a")) == "0.35 x in 2 rounds, which differ so much that they do not say more"


def test_a_ratio_is_written_with_its_interval_and_rounds() -> None:
    found = Timings({"a": {1: 1.0, 2: 1.0, 3: 1.0}, "b": {1: 0.9, 2: 0.91, 3: 0.89}})
    assert str(found.ratio("b", "a")) == "0.90 x [0.88, 0.93] in 3 rounds"
    assert not found.ratio("b", "a").exceeds(1 + MARGIN)
