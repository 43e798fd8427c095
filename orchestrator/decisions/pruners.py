"""Who goes on at a rung. Pure: values in, decisions with reasons out."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from orchestrator.decisions.decision import Action, Decision
from orchestrator.study.causes import Cause


@dataclass(frozen=True)
class Entrant:
    """One configuration as a rung sees it; its seeds are judged together, by their mean."""

    name: str
    value: float | None
    """Its objective at the rung, smaller is better; None: not there yet."""
    out: bool = False
    """Ended before the rung: nobody waits for it."""
    protected: bool = False
    promoted: bool = False


@dataclass(frozen=True)
class Demand:
    """Who else wants the lanes, while a rung is judged before all have come to it."""

    newcomers_per_lane: float = 0.0
    """Trials that have yet to reach their first rung and are not running."""
    idle: bool = False
    """A lane has nothing else to run."""


def judge_rung(
    rung: int,
    entrants: Sequence[Entrant],
    reduction_factor: int,
    *,
    synchronous: bool,
    first: bool = False,
    demand: Demand = Demand(),
) -> dict[str, Decision]:
    """What becomes of everyone who stands at this rung and was not let past it (Li et al. 2018, arXiv 1810.05934).

    When all who can come have come, the best 1/reduction_factor (rounded up) go on and the rest are stopped. Whose fate
    is sealed, whatever those who are missing bring and whether they come, hears of it before. The others wait;
    asynchronous, the best of those here go on at once, as many as `early_places` says. Who ties with the last to go on
    goes on too. When nobody runs any more, all who are left have come to the lowest rung that anyone waits at, so there
    is always one that decides.
    """
    here = [entrant for entrant in entrants if entrant.value is not None]
    if not here:
        return {}
    missing = sum(entrant.value is None and not entrant.out for entrant in entrants)
    places = math.ceil((len(here) + missing) / reduction_factor)
    places_now = places - missing  # even if all who are missing were better
    if not synchronous:
        places_now = max(places_now, early_places(len(here), reduction_factor, first=first, demand=demand))
    ranked = sorted(here, key=_value)
    last_on = _value(ranked[places_now - 1]) if places_now > 0 else -math.inf
    last_hope = _value(ranked[places - 1]) if places <= len(ranked) else math.inf
    verdicts: dict[str, Decision] = {}
    for place, entrant in enumerate(ranked, start=1):
        if entrant.promoted or entrant.out:
            continue
        where = f"place {place} of {len(here)} at {rung} samples"
        if entrant.protected:
            verdicts[entrant.name] = _at_rung(Action.GO_ON, f"{where}; never cut before the end")
        elif _value(entrant) <= last_on:
            verdicts[entrant.name] = _at_rung(Action.GO_ON, f"{where}; the best {places_now} go on")
        elif _value(entrant) > last_hope:
            verdicts[entrant.name] = _at_rung(Action.STOP, f"{where}; the best {places} go on")
        else:
            verdicts[entrant.name] = _at_rung(Action.PAUSE, f"{where}; waiting for the others")
    return verdicts


def _at_rung(action: Action, reason: str) -> Decision:
    return Decision(action, Cause.RUNG, reason)


def early_places(num_here: int, reduction_factor: int, *, first: bool, demand: Demand) -> int:
    """How many go on from a rung to which not all have come yet.

    The best 1/reduction_factor, rounded down: nobody passes unseen. Where its lane would idle, rounded up: waiting gains
    nothing. From the first rung only 1/reduction_factor^2 while newcomers would keep the lanes busy for that many
    trials each: looking at another one is cheap, and going on with one that is merely in the better half is not.
    """
    if demand.idle:
        return math.ceil(num_here / reduction_factor)
    crowded = first and demand.newcomers_per_lane >= reduction_factor**2
    return num_here // (reduction_factor**2 if crowded else reduction_factor)


def _value(entrant: Entrant) -> float:
    """A value that is not a number is the worst there is."""
    return math.inf if entrant.value is None or math.isnan(entrant.value) else entrant.value


def mean_of_seeds(values: Mapping[str, float | None]) -> float | None:
    """The mean over a configuration's seeds, once all of them are there."""
    found = [value for value in values.values() if value is not None]
    return statistics.fmean(found) if found and len(found) == len(values) else None
