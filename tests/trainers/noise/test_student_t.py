"""Student's t against its published tables."""

from __future__ import annotations

import pytest

from batchscout.trainers.noise.student_t import t_quantile


@pytest.mark.parametrize(
    ("degrees_of_freedom", "expected"),
    [(1, 12.706), (2, 4.303), (3, 3.182), (4, 2.776), (5, 2.571), (9, 2.262), (30, 2.042), (120, 1.980), (5000, 1.960)],
)
def test_the_quantile_is_that_of_the_tables(degrees_of_freedom: int, expected: float) -> None:
    assert t_quantile(degrees_of_freedom) == pytest.approx(expected, abs=6e-4)


def test_other_probabilities_have_their_own() -> None:
    assert t_quantile(4, 0.95) == pytest.approx(2.132, abs=6e-4)
    assert t_quantile(7, 0.995) == pytest.approx(3.499, abs=6e-4)
    assert t_quantile(7, 0.5) == pytest.approx(0.0, abs=1e-6)


def test_without_a_degree_of_freedom_there_is_none() -> None:
    with pytest.raises(ValueError, match="needs 1 degree of freedom, and has 0; measure more steps"):
        t_quantile(0)
