"""A schedule of the learning rate as it goes over a whole run, and the key `schedule` that is like it."""

from __future__ import annotations

import copy
import math
import warnings
from collections.abc import Sequence
from typing import Any

import torch

NUM_FACTORS = 65
"""Of a table: what changes within less than 1 % of a run is drawn out over that much."""
MOST_CALLS = 200_000
"""A schedule that is called more often is not followed."""
ALIKE = 0.01
"""So far, as a share of the highest rate, a schedule may be from one of those that have a name."""


def rates_of(schedule: Any, num_calls: int) -> list[float] | None:
    """Return the rate of the first group after 0, 1, ... of its calls from now on; None where that depends on what is trained."""
    if type(schedule).__name__ == "ReduceLROnPlateau" or num_calls > MOST_CALLS:
        return None
    optimizer = schedule.optimizer
    stand_in = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=1.0)
    stand_in.param_groups = [
        {**group, "params": stand_in.param_groups[0]["params"]} for group in optimizer.param_groups
    ]
    stand_in.defaults |= optimizer.defaults
    again = copy.deepcopy(schedule, {id(optimizer): stand_in})
    rates = [float(stand_in.param_groups[0]["lr"])]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of an optimizer that was not stepped
        for _ in range(num_calls):
            again.step()
            rates.append(float(stand_in.param_groups[0]["lr"]))
    return rates


def schedule_like(rates: Sequence[float]) -> tuple[dict[str, Any], float]:
    """Return the key `schedule` that goes as these rates of a run's steps do, and the highest of them."""
    highest, last = max(rates), len(rates) - 1
    steps = [rate / highest if highest else 1.0 for rate in rates]
    named = {
        "constant": [[1.0 for _ in steps]],
        # Down to zero with the last step, or after it, as torch has it.
        "cosine": [
            [0.5 * (1 + math.cos(math.pi * n / end)) for n in range(len(steps))] for end in (max(1, last), last + 1)
        ],
    }
    for name, curves in named.items():
        if any(all(abs(one - other) <= ALIKE for one, other in zip(steps, curve, strict=True)) for curve in curves):
            return {"type": name}, highest
    factors = [steps[round(place / (NUM_FACTORS - 1) * last)] for place in range(NUM_FACTORS)]
    return {"type": "table", "factors": [float(f"{one:.4g}") for one in factors]}, highest
