"""A schedule of the learning rate as it goes over a whole run, and the key `schedule` that is like it."""

from __future__ import annotations

import copy
import inspect
import math
import warnings
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch.optim import Optimizer

NUM_FACTORS = 65
"""Of a table: what changes within less than 1 % of a run is drawn out over that much."""
MOST_CALLS = 1_000_000
"""A schedule that is called more often is not followed."""
NOT_FORETOLD = (
    "follows the training, differs between parameter groups, ends before the run, or has too many steps, and cannot be known in advance; a study takes its own warm-up and warmup_stable_decay: set "
    "schedule to choose another"
)
"""Of a schedule, to people."""
STAIRS_ALIKE = 30
"""With so many calls in a run the stairs between them are close to a smooth curve; with fewer the last stair, where rates matter most, is far
above its end."""
ALIKE = 0.01
"""So far, as a share of the highest rate, a schedule may be from one of those that have a name."""


def rates_of(schedule: Any, num_calls: int, *, or_fewer: bool = False) -> list[float] | None:
    """Return the rate of the first group after 0, 1, ... of its calls from now on; None where that depends on what is trained, where other
    groups do not keep their ratio to it, or where it ends before, as OneCycleLR does. or_fewer: return the rates until then."""
    if "metrics" in inspect.signature(schedule.step).parameters or num_calls > MOST_CALLS:
        return None
    optimizer = schedule.optimizer
    stand_in = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=1.0)
    stand_in.param_groups = [
        {**group, "params": stand_in.param_groups[0]["params"]} for group in optimizer.param_groups
    ]
    stand_in.defaults |= optimizer.defaults
    again = copy.deepcopy(schedule, {id(optimizer): stand_in})
    rates = [[float(group["lr"])] for group in stand_in.param_groups]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of an optimizer that was not stepped
        for _ in range(num_calls):
            try:
                again.step()
            except Exception:  # of OneCycleLR, and of a script's own function that reads a list
                if or_fewer:
                    break
                return None
            for known, group in zip(rates, stand_in.param_groups, strict=True):
                known.append(float(group["lr"]))
    first, *others = rates
    return first if all(is_alike(first, other) for other in others) else None


def is_alike(one: Sequence[float], other: Sequence[float]) -> bool:
    """True if two groups' rates go up and down together; what is never trained does."""
    return not max(other) or all(abs(a - b) <= ALIKE for a, b in zip(_shares(one), _shares(other), strict=True))


def spread(num_steps: int) -> list[int]:
    """Return steps that are evenly spread over a run, its first and its last among them; all of them where there are few."""
    count = min(num_steps, 10 * NUM_FACTORS)
    return [round(place * (num_steps - 1) / max(1, count - 1)) for place in range(count)]


def take_schedule(keys: dict[str, Any], schedule: Any, num_steps: int, steps_between_calls: float = 1.0) -> bool:
    """Set the key `schedule` to what goes as an optimizer's schedule does over a run, as `take_rates`; return False, and set nothing, where
    that depends on what is trained.

    steps_between_calls: optimizer steps, those of a pass over the data where it is called after each.
    """
    rates = rates_of(schedule, int((num_steps - 1) / steps_between_calls))
    if rates is None:
        return False
    if len(rates) < STAIRS_ALIKE or _name_of(rates) is None:  # else many stairs have the name of what they follow
        rates = [rates[int(step / steps_between_calls)] for step in spread(num_steps)]
    take_rates(keys, rates)
    return True


def told_of_momentum(optimizer: Optimizer) -> Iterator[str]:
    """Yield, where a schedule moves the momentum beside the rate, that a study does not."""
    group = optimizer.param_groups[0]
    if "max_momentum" in group:
        kept = optimizer.defaults.get("momentum", optimizer.defaults.get("betas", (None,))[0])
        yield (
            f"its schedule moves the momentum between {group['base_momentum']:g} and {group['max_momentum']:g}, and a study keeps it at {kept:g}; "
            "with cycle_momentum=False both would train the same"
        )


def take_rates(keys: dict[str, Any], rates: Sequence[float]) -> None:
    """Set the key `schedule` to what goes as these rates of a run's steps do, with its own warm-up, and the learning rate to the highest of
    them. keys: those of a study, `optimizer` among them."""
    keys["schedule"] = schedule_like(rates)
    keys["optimizer"]["warmup"] = 0
    # The highest may lie between two steps that were looked at.
    if not math.isclose(max(rates), keys["optimizer"]["lr"], rel_tol=ALIKE):
        keys["optimizer"]["lr"] = max(rates)


def schedule_like(rates: Sequence[float]) -> dict[str, Any]:
    """Return the key `schedule` that goes as these rates of a run's steps do."""
    if (name := _name_of(rates)) is not None:
        return {"type": name}
    steps, last = _shares(rates), len(rates) - 1
    count = min(len(rates), NUM_FACTORS)
    factors = [steps[round(place / max(1, count - 1) * last)] for place in range(count)]
    return {"type": "table", "factors": [float(f"{one:.4g}") for one in factors]}


def _shares(rates: Sequence[float]) -> list[float]:
    highest = max(rates)
    return [rate / highest if highest else 1.0 for rate in rates]


def _name_of(rates: Sequence[float]) -> str | None:
    """Return the type of schedule that goes like this; None where none does."""
    steps, last = _shares(rates), len(rates) - 1
    named = {
        "constant": [[1.0 for _ in steps]],
        # Down to zero with the last step, or after it, as torch has it.
        "cosine": [
            [0.5 * (1 + math.cos(math.pi * n / end)) for n in range(len(steps))] for end in (max(1, last), last + 1)
        ],
    }
    for name, curves in named.items():
        if any(all(abs(one - other) <= ALIKE for one, other in zip(steps, curve, strict=True)) for curve in curves):
            return name
    return None
