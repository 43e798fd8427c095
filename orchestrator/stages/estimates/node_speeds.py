"""Which nodes take longer than the others for the same steps. Pure: trials in, ratios with intervals out.

The log of a step's seconds is taken to be that of what is run, plus that of the node it runs on, plus noise. For each node the
second is estimated from trials of the same steps on that node and on others (least squares within groups), so that a node which happened to get
the larger batches is not called slow for it.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias, TypeVar

from batchscout.orchestrator.stages.estimates.timing import CONFIDENCE
from batchscout.orchestrator.study.trial import Trial
from batchscout.orchestrator.units import counted
from batchscout.trainers.noise.student_t import t_quantile

# The fields of a configuration that decide the seconds of its steps, and in which trials of a stage may differ.
_DECIDE_SECONDS = (
    "micro_batch_size",
    "gradient_accumulation_steps",
    "world_size",
    "activation_checkpointing",
    "memory_knobs",
    "compile",
    "precision",
    "statistics",
    "longest_samples",
    "dropout",
)
# A node is a straggler that certainly takes longer than the others by more than this share.
STRAGGLES = 0.1

Place: TypeAlias = tuple[str, ...]
"""The hosts that the ranks of a lane are on."""


Name = TypeVar("Name")


@dataclass(frozen=True)
class Timed:
    """What a trial says of the node that it ran on."""

    steps: Hashable
    """What its steps are: those of trials that share this differ by their nodes and by noise alone."""
    place: Place
    log_seconds: float


@dataclass(frozen=True)
class Straggler:
    """A place that takes longer than the others for the same steps."""

    place: Place
    point: float
    """How many times as long, with the interval."""
    low: float
    high: float
    num_timings: int
    num_others: int
    """How many places it is compared with."""

    def __str__(self) -> str:
        others = "the other" if self.num_others == 1 else f"the {self.num_others} others"
        return (
            f"{' with '.join(self.place)} takes {self.point:.2f} x [{self.low:.2f}, {self.high:.2f}] as long as {others} for the same "
            f"steps (in {counted(self.num_timings, 'trial')} there): its speeds are compared as if it had been as fast, so that no "
            "candidate loses for where it ran. See what else runs there, and its clocks and cooling, or leave the node out"
        )


def stragglers(trials: Iterable[Trial]) -> dict[Place, Straggler]:
    """Return the places that are certainly slower than the others; none where all trials ran on one."""
    timed = [(trial, place) for trial in trials if (place := place_of(trial)) and trial.metric("step_seconds")]
    if len({place for _, place in timed}) < 2:
        return {}
    at_one_batch = [(trial, place) for trial, place in timed if not trial.config.ramp]
    return slower_places(
        [Timed(_steps_of(one), place, math.log(one.measured("step_seconds"))) for one, place in at_one_batch]
    )


def slower_places(timed: Sequence[Timed]) -> dict[Place, Straggler]:
    """Return the places that are certainly slower than the others together, by what is known of the same steps there and
    elsewhere."""
    groups = dict[Hashable, list[Timed]]()
    for one in timed:
        groups.setdefault(one.steps, []).append(one)
    shared = [group for group in groups.values() if len({one.place for one in group}) > 1]
    places = sorted({one.place for group in shared for one in group})
    found = [_compared(place, shared, len(places)) for place in places]
    return {one.place: one for one in found if one is not None and one.low > 1 + STRAGGLES}


def _compared(place: Place, groups: Sequence[Sequence[Timed]], num_places: int) -> Straggler | None:
    """Return how long a place takes beside the others; None where too few trials tell. The intervals of all places hold together."""
    pairs = [pair for group in groups if any(one.place == place for one in group) for pair in _centred(place, group)]
    num_groups = sum(any(one.place == place for one in group) for group in groups)
    degrees, spread = len(pairs) - num_groups - 1, sum(here * here for here, _ in pairs)
    if degrees < 1 or spread == 0:
        return None
    slope = sum(here * seconds for here, seconds in pairs) / spread
    variance = sum((seconds - slope * here) ** 2 for here, seconds in pairs) / degrees
    error = t_quantile(degrees, 1 - (1 - CONFIDENCE) / 2 / num_places) * math.sqrt(variance / spread)
    return Straggler(
        place,
        math.exp(slope),
        math.exp(slope - error),
        math.exp(slope + error),
        sum(one.place == place for group in groups for one in group),
        num_places - 1,
    )


def _centred(place: Place, group: Sequence[Timed]) -> list[tuple[float, float]]:
    """Return of each trial of the same steps whether it ran there, and its log seconds, both less their means."""
    share = statistics.fmean(one.place == place for one in group)
    usual = statistics.fmean(one.log_seconds for one in group)
    return [((one.place == place) - share, one.log_seconds - usual) for one in group]


def slowness(trial: Trial, found: Mapping[Place, Straggler]) -> float:
    """Return how many times as long the trial's steps took for where it ran; 1 where no straggler ran it."""
    place = place_of(trial)
    return found[place].point if place is not None and place in found else 1.0


def rates_by_round(
    names: Iterable[Name],
    num_rounds: int,
    trial_of: Callable[[Name, int], Trial | None],
    rate_of: Callable[[Trial], float | None],
    slow: Mapping[Place, Straggler],
) -> dict[Name, dict[int, float]]:
    """Return the rates of what has one in each of so many rounds, as if no straggler had run any. rate_of: None or 0 of
    a trial without a rate."""
    found = dict[Name, dict[int, float]]()
    for name in names:
        trials = {number: trial_of(name, number) for number in range(1, num_rounds + 1)}
        rated = {number: (trial, rate) for number, trial in trials.items() if trial and (rate := rate_of(trial))}
        if len(rated) == num_rounds:
            found[name] = {number: rate * slowness(trial, slow) for number, (trial, rate) in rated.items()}
    return found


def place_of(trial: Trial) -> Place | None:
    """Return where the trial ran; None where nobody has said it, or it ran in several places."""
    places = {hold.lane.place for hold in trial.holds if hold.lane}
    return places.pop() if len(places) == 1 else None


def _steps_of(trial: Trial) -> Hashable:
    """Return what decides the seconds of a trial's steps beside the node. Short timings of other lengths measure other things."""
    config = trial.config
    length = None if trial.is_full_run else config.sample_budget
    return trial.stage, length, config.data.model_dump_json(), *(getattr(config, name) for name in _DECIDE_SECONDS)
