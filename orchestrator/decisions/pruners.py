"""Which trials go on from a rung. Pure: values in, decisions with reasons out."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from batchscout.orchestrator.decisions.decision import Action, Decision
from batchscout.orchestrator.study.causes import Cause


@dataclass(frozen=True)
class Entrant:
    """One configuration as a rung sees it; its seeds are judged together, by their mean."""

    name: str
    value: float | None
    """Its objective at the rung, the smaller the better; None while it has not come there."""
    out: bool = False
    """True if it has ended: nobody waits for it."""
    stays: str = ""
    """Why it is never cut, however bad its value; empty where it may be."""
    promoted: bool = False


@dataclass(frozen=True)
class Demand:
    """What else the lanes could run, for an asynchronous rung that is judged before everyone has come to it."""

    newcomers_per_lane: float = 0.0
    """How many trials per lane are not running and have yet to reach their first rung."""
    idle: bool = False
    """True if a lane has nothing else to run."""


def judge_rung(
    where: str,
    entrants: Sequence[Entrant],
    reduction_factor: int,
    *,
    synchronous: bool,
    first: bool = False,
    demand: Demand = Demand(),
    tie: float = 0.0,
) -> dict[str, Decision]:
    """Return the verdict on everyone who stands at this rung and was not let past it (Li et al. 2018, arXiv
    1810.05934).

    Once everyone who can come has come, the best 1/reduction_factor (rounded up) go on and the rest are stopped. An
    entrant hears its verdict earlier if those still missing cannot change it. The others wait; if the pruner is
    asynchronous, the best of those here go on at once, as many as `early_places` allows. Whoever is as good as the last
    to go on, or trails the best by no more than `tie`, goes on, too; the latter waits if the pruner is synchronous and
    someone better may still come. The study cannot get stuck: when nothing runs any more, everyone who is left has come
    to the lowest rung at which anyone waits, so that rung decides.
    """
    ranked = sorted((entrant for entrant in entrants if entrant.value is not None), key=_value)
    if not ranked:
        return {}
    missing = sum(entrant.value is None and not entrant.out for entrant in entrants)
    places = math.ceil((len(ranked) + missing) / reduction_factor)
    places_now = places - missing  # these are certain, even if everyone who is missing were better
    if not synchronous:
        places_now = max(places_now, early_places(len(ranked), reduction_factor, first=first, demand=demand))
    tied = _value(ranked[0]) + tie
    tied_now = -math.inf if synchronous and missing else tied
    # The worst value that goes on now, and the worst that may go on yet.
    last_on = max(_value(ranked[places_now - 1]), tied_now) if places_now > 0 else -math.inf
    last_hope = max(_value(ranked[places - 1]), tied) if places <= len(ranked) else math.inf

    def verdict(entrant: Entrant, place: int) -> Decision:
        at = f"ranked {place} of {len(ranked)} after {where}"
        if entrant.stays:
            return _at_rung(Action.GO_ON, f"{at}; {entrant.stays}")
        if _value(entrant) <= last_on:
            as_good = f", and those within {tie:.3g} of the best" if place > places_now else ""
            return _at_rung(Action.GO_ON, f"{at}; {_best(places_now)}{as_good}")
        if _value(entrant) > last_hope:
            return _at_rung(Action.STOP, f"{at}; {_best(places)}")
        return _at_rung(Action.PAUSE, f"{at}; waiting for the others")

    return {
        entrant.name: verdict(entrant, place)
        for place, entrant in enumerate(ranked, start=1)
        if not (entrant.promoted or entrant.out)
    }


def _best(places: int) -> str:
    return "the best continues" if places == 1 else f"the best {places} continue"


def _at_rung(action: Action, reason: str) -> Decision:
    return Decision(action, Cause.RUNG, reason)


def early_places(num_here: int, reduction_factor: int, *, first: bool, demand: Demand) -> int:
    """Return how many go on from a rung to which not everyone has come yet.

    These are the best 1/reduction_factor, rounded down, so that none goes on without another to beat. Rounded up where
    a lane would idle: waiting gains nothing there. From the first rung only 1/reduction_factor^2, as long as every lane
    has that many newcomers to try: trying another is cheap, and training on one that is merely in the better half is
    not.
    """
    if demand.idle:
        return math.ceil(num_here / reduction_factor)
    crowded = first and demand.newcomers_per_lane >= reduction_factor**2
    return num_here // (reduction_factor**2 if crowded else reduction_factor)


def _value(entrant: Entrant) -> float:
    """Return the entrant's objective; one that is not a number counts as the worst."""
    return math.inf if entrant.value is None or math.isnan(entrant.value) else entrant.value


def mean_of_seeds(values: Mapping[str, float | None]) -> float | None:
    """Return the mean over a configuration's seeds; None until all of them have a value."""
    found = [value for value in values.values() if value is not None]
    return statistics.fmean(found) if found and len(found) == len(values) else None
