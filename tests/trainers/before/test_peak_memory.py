"""The peak as a function of the micro-batch size: the highest of its lines, read backwards for a limit."""

from __future__ import annotations

import random

from batchscout.trainers.before.peak_memory import Line, PeakMemory, highest, peak_of
from tests.support.every import for_every


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
