"""The peak as a function of the micro-batch size: the highest of its lines, read backwards for a limit, moved by measurements."""

from __future__ import annotations

import random

import pytest

from tests.support.every import for_every
from trainers.before.peak_memory import Line, PeakMemory, calibrated, highest, peak_of


def some_lines(seed: int) -> list[Line]:
    generator = random.Random(seed)
    return [Line(generator.uniform(0, 1e6), generator.uniform(0, 1e4)) for _ in range(40)]


@for_every(seed=range(20))
def test_the_highest_lines_are_the_peak_of_all_of_them_at_every_size(seed: int) -> None:
    lines = some_lines(seed)
    found = PeakMemory(highest(lines))
    for size in range(1, 400):
        assert found.bytes_at(size) == max(line.bytes_at(size) for line in lines)
    assert len(found.lines) < len(lines)


@for_every(seed=range(20))
def test_the_largest_that_fits_does_and_one_more_does_not(seed: int) -> None:
    predicted = PeakMemory(highest(some_lines(seed)))
    limit = random.Random(seed).uniform(1.1e6, 4e6)
    size = predicted.largest_micro_batch_size(limit, 10_000)
    assert predicted.bytes_at(size) <= limit < predicted.bytes_at(size + 1)


def test_the_largest_is_none_where_one_sample_is_too_much_and_ends_where_the_search_does() -> None:
    predicted = PeakMemory((Line(100, 0), Line(50, 10)))
    assert predicted.largest_micro_batch_size(99, 64) == 0
    assert predicted.largest_micro_batch_size(100, 64) == 5
    assert predicted.largest_micro_batch_size(10_000, 64) == 64


def test_a_step_of_other_operations_at_another_size_is_a_line_through_its_peaks() -> None:
    predicted = peak_of({2: [0, 30, 0], 8: [0, 60, 90, 0]})
    assert [predicted.bytes_at(size) for size in (1, 2, 8, 16)] == [30, 30, 90, 170]


@for_every(seed=range(10))
def test_calibration_moves_the_prediction_through_what_was_measured(seed: int) -> None:
    predicted = PeakMemory(highest(some_lines(seed)))
    one = calibrated(predicted, {7: 2.5e6})
    assert one.bytes_at(7) == pytest.approx(2.5e6)
    two = calibrated(predicted, {100: 3e6, 300: 5e6})
    assert (two.bytes_at(100), two.bytes_at(300)) == pytest.approx((3e6, 5e6))
    same = calibrated(predicted, {size: predicted.bytes_at(size) for size in (3, 50, 200)})
    assert [same.bytes_at(size) for size in (1, 1000)] == pytest.approx([predicted.bytes_at(m) for m in (1, 1000)])


def test_a_first_measurement_above_the_prediction_is_the_process_and_one_below_it_the_activations() -> None:
    predicted = PeakMemory((Line(150, 0), Line(100, 10)))
    assert [calibrated(predicted, {20: 320.0}).bytes_at(size) for size in (1, 40)] == [170, 520]
    assert [calibrated(predicted, {20: 200.0}).bytes_at(size) for size in (1, 40)] == [150, 300]


def test_measurements_that_fall_with_the_size_are_noise_and_do_not_turn_the_prediction_round() -> None:
    found = calibrated(PeakMemory((Line(100, 10),)), {10: 220.0, 11: 210.0})
    assert found.bytes_at(100) > found.bytes_at(10)
