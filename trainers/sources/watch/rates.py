"""The learning rate of a script over its whole run: of its scheduler, or of the statements that set it."""

from __future__ import annotations

import math

from torch.optim.lr_scheduler import LRScheduler

from batchscout.trainers.sources.schedules import rates_of, spread
from batchscout.trainers.sources.watch.by_hand import (
    in_whole_steps,
    is_set_around,
    parts_of,
    rates_by_hand,
    steps_of_pass,
)
from batchscout.trainers.sources.watch.observer import Seen
from batchscout.trainers.sources.watch.stepped import calls_before_passes


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
        if _is_changed_beside(schedule, seen):
            return None
        calls = calls_between * (num_steps - 2)
        later = rates_of(schedule, max(0, calls), or_fewer=True)
        batches_left_out = calls_between * math.ceil(num_steps / steps_per_pass) if steps_per_pass else 0
        if later is not None and len(later) + batches_left_out <= calls:  # by drop_last, one of each pass
            return None
        return later and [first, *later[::calls_between]]
    if not _is_constant(seen):
        return None  # the script sets the rate beside a schedule of passes
    return _rates_by_pass(schedule, seen, num_steps, steps_per_pass)


def _rates_by_pass(
    schedule: LRScheduler, seen: Seen, num_steps: int, steps_per_pass: float | None
) -> list[float] | None:
    """Return the rates of a schedule that is not stepped with each optimizer step, but in rounds of the loop around that, or not at all."""
    parts = parts_of(seen)
    per_pass = steps_of_pass(parts, steps_per_pass, seen)
    num_steps = in_whole_steps(num_steps, per_pass, steps_per_pass)
    calls = calls_before_passes(schedule, parts, seen, math.ceil(num_steps / per_pass) if per_pass else None)
    if calls is None or (later := rates_of(schedule, calls[-1])) is None:
        return None
    return [later[calls[step // (per_pass or num_steps)]] for step in spread(num_steps)]


def _is_changed_beside(schedule: LRScheduler, seen: Seen) -> bool:
    """True if something else has changed the rate since a schedule of torch's own kind set it: a warm-up of a library that dampens what it has set."""
    if not type(schedule).step.__module__.startswith("torch."):
        return False  # one that does not note what it sets
    pairs = zip(schedule.get_last_lr(), seen.steps[-1].rates, strict=False)
    return not all(math.isclose(one, other, rel_tol=1e-6) for one, other in pairs)


def may_change(seen: Seen) -> bool:
    """True if the rate is another later in the run, or the script has what might make it another."""
    return _is_set_by_hand(seen) or bool(seen.schedulers) or not _is_constant(seen)


def _is_set_by_hand(seen: Seen) -> bool:
    return any(is_set_around(place, seen) for place in seen.backward.places)


def _is_constant(seen: Seen) -> bool:
    return len({step.rates for step in seen.steps}) == 1
