"""Numbers as people read them."""

from __future__ import annotations

import math

import pytest

from batchscout.orchestrator.units import loss_text


@pytest.mark.parametrize(("loss", "said"), [
    (5.0944, "5.094"), (0.25, "0.250"), (0.0022, "0.0022"), (0.0, "0.000"), (-0.0312, "-0.0312"), (3520398.0, "3.52M"),
    (1e-5, "1e-05"), (math.inf, "inf"),
])  # fmt: skip
def test_a_loss_has_three_digits_at_least_and_no_decimals_that_say_nothing(loss: float, said: str) -> None:
    assert loss_text(loss) == said
