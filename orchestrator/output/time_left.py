"""How long is left? What is open is taken to last as long as what has ended, give or take what these differ by."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean

from batchscout.orchestrator.stages.cost import SECONDS_OF_A_TRIAL, Cost
from batchscout.orchestrator.study.state import Study
from batchscout.orchestrator.study.trial import Metrics, Trial, TrialState

MARGIN = 1.28
"""Deviations to either side that hold four sums in five, if trials' seconds are normal."""
PRIOR_SPREAD = 0.5
"""The deviation of trials' seconds, as a share of their mean, where only one has ended; it weighs as much as one of them."""


@dataclass(frozen=True)
class SecondsLeft:
    """A range that holds what is left four times in five."""

    low: float
    high: float

    def __str__(self) -> str:
        """Return `40 to 70 s`, `3 to 5 min`, `less than 2 h` and the like."""
        size, unit = next(
            (size, unit) for size, unit in ((3600, "h"), (60, "min"), (1, "s")) if self.high > 2 * size or size == 1
        )
        low, high = math.floor(self.low / size), max(1, math.ceil(self.high / size))
        if low == 0:
            return f"less than {high} {unit}"
        return f"{low} to {high} {unit}" if low < high else f"{high} {unit}"


def seconds_left(trials: Sequence[Trial], latest: dict[str, Metrics]) -> SecondsLeft | None:
    """Return what the stage's open trials still take; None until one has ended, and where none is open.

    latest: the last metrics heard of those that run.
    """
    ended = [trial.seconds for trial in trials if trial.state.ended and trial.seconds]
    shares = [1 - _share_done(trial, latest) for trial in trials if not trial.state.ended]
    return sum_of(sum(shares), ended, _at_once(trials)) if ended and shares else None


def most_seconds_left(study: Study, most_full_runs: int) -> float | None:
    """Return what the full runs take that the study may still want, at the upper end of their range; None until one has completed,
    and where all have ended."""
    full = [trial for trial in study.trials.values() if trial.is_full_run]
    known = [trial.seconds for trial in full if trial.state is TrialState.COMPLETE and trial.seconds]
    left = most_full_runs - sum(trial.state.ended for trial in full)
    return sum_of(left, known, _at_once(full)).high if known and left > 0 else None


def estimated_seconds_left(
    study: Study, cost: Cost, num_lanes: int, latest: dict[str, Metrics], elapsed: Mapping[str, float]
) -> float:
    """Return what is left of what the study was estimated to take before anything was measured: its full runs, as far as they have not
    run, and of each stage of probes that has not concluded what its trials have not taken yet. A full run's steps take what those of the
    runs that have begun do, if there are any.

    latest: the last metrics heard of the trials that run. elapsed: the seconds for which these have run.
    """
    full = [trial for trial in study.trials.values() if trial.is_full_run]
    taken = {
        trial.id: (trial.seconds or 0.0) if trial.state.ended else elapsed.get(trial.id, 0.0)
        for trial in study.trials.values()
    }
    steps = [seconds for trial in full if (seconds := _seconds_of_all_steps(trial, latest)) is not None]
    runs = cost.num_full_runs - sum(1.0 if trial.state.ended else _share_done(trial, latest) for trial in full)
    probes = sum(
        max(0.0, seconds - sum(taken[trial.id] for trial in study.of_stage(stage)))
        for stage, seconds in cost.probes.items()
        if stage not in study.conclusions
    )
    return (max(0.0, runs) * ((fmean(steps) if steps else cost.run) + SECONDS_OF_A_TRIAL) + probes) / num_lanes


def _seconds_of_all_steps(trial: Trial, latest: dict[str, Metrics]) -> float | None:
    """Return what the steps of a whole run take by the pace of those that it has made; None before any was timed."""
    seconds = (trial.metrics | latest.get(trial.id, {})).get("step_seconds")
    return None if seconds is None else trial.config.sample_budget / trial.config.effective_batch_size * seconds


def _share_done(trial: Trial, latest: dict[str, Metrics]) -> float:
    seen = (trial.metrics | latest.get(trial.id, {})).get("samples_seen") or 0.0
    return min(1.0, seen / trial.config.sample_budget)


def _at_once(trials: Sequence[Trial]) -> int:
    return max(1, sum(trial.state is TrialState.RUNNING for trial in trials))


def sum_of(number: float, ended: Sequence[float], at_once: int) -> SecondsLeft:
    """Return the seconds of so many trials, given those of others: the sum spreads by what each differs from the mean, and by how
    well so few tell the mean."""
    mean = fmean(ended)
    squares = sum((seconds - mean) ** 2 for seconds in ended) + (PRIOR_SPREAD * mean) ** 2
    deviation = math.sqrt(squares / len(ended) * (number + number**2 / len(ended)))
    middle = number * mean
    return SecondsLeft(max(0.0, middle - MARGIN * deviation) / at_once, (middle + MARGIN * deviation) / at_once)
