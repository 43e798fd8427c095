"""The learning rate of a script over its whole run: of its scheduler, or of the statements that set it."""

from __future__ import annotations

import ast
import math
from typing import Any

from batchscout.trainers.sources.schedules import rates_of, spread
from batchscout.trainers.sources.watch.by_hand import is_set_around, rates_by_hand
from batchscout.trainers.sources.watch.observer import Seen
from batchscout.trainers.sources.watch.statements import is_over_batches


def rates_of_run(seen: Seen, num_steps: int, steps_per_pass: float | None) -> list[float] | None:
    """Return the rate of the first group in steps that are evenly spread over the run, all of them where there are few; None where
    that cannot be foretold.

    steps_per_pass: optimizer steps of a pass over the data, of a loader.
    """
    optimizer, first = seen.steps[0].optimizer, seen.steps[0].rates[0]
    ours = [one for one in seen.schedulers if one.optimizer is optimizer]
    inner = {id(part) for one in ours for part in getattr(one, "_schedulers", ())}
    apart = [one for one in ours if id(one) not in inner]
    if len(apart) > 1:  # one steps by steps and the other by passes, or warms up and leaves: what is seen does not tell
        return None
    schedule = next(iter(apart), None)
    if schedule is None:
        if not may_change(seen):
            return [first, first]
        return rates_by_hand(seen, num_steps, steps_per_pass)
    if _is_set_by_hand(seen):
        return None
    # Not its calls until now: some scripts call it before the first step, too, or go on from a checkpoint.
    calls_between = seen.steps[-1].calls.get(id(schedule), 0) - seen.steps[0].calls.get(id(schedule), 0)
    if calls_between != int(calls_between) or calls_between < 0:  # `schedule.step(epoch + i / len(loader))`
        return None
    if calls_between := int(calls_between):
        calls = calls_between * (num_steps - 2)
        later = rates_of(schedule, max(0, calls), or_fewer=True)
        batches_left_out = calls_between * math.ceil(num_steps / steps_per_pass) if steps_per_pass else 0
        if later is not None and len(later) + batches_left_out <= calls:  # by drop_last, one of each pass
            return None
        return later and [first, *later[::calls_between]]
    if not _is_constant(seen) or _is_stepped_between_batches(schedule, seen):
        return None  # the script sets the rate beside a schedule of passes, or steps that after so many batches
    passes = math.ceil(num_steps / steps_per_pass) if steps_per_pass else 0
    later = rates_of(schedule, passes - 1) if passes else None
    return later and [later[min(len(later) - 1, int(step / (steps_per_pass or 1)))] for step in spread(num_steps)]


def may_change(seen: Seen) -> bool:
    """True if the rate is another later in the run, or the script has what might make it another."""
    return _is_set_by_hand(seen) or bool(seen.schedulers) or not _is_constant(seen)


def _is_set_by_hand(seen: Seen) -> bool:
    return any(is_set_around(place, seen) for place in seen.backward.places)


def _is_constant(seen: Seen) -> bool:
    return len({step.rates for step in seen.steps}) == 1


def _is_stepped_between_batches(schedule: Any, seen: Seen) -> bool:
    """True if the loop over the batches steps a schedule, though not after each of the first steps."""
    for place in seen.backward.places:
        batches = next((one for one in place.loops if isinstance(one, ast.For) and is_over_batches(one)), None)
        called = [one.func for one in ast.walk(batches) if isinstance(one, ast.Call)] if batches else []
        owners = [one.value for one in called if isinstance(one, ast.Attribute) and one.attr == "step"]
        if any(place.get(ast.unparse(owner)) is schedule for owner in owners):
            return True
    return False
