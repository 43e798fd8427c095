"""What may probing cost? It serves the study's full training runs: it takes a small share of their time, with a floor,
and no batch is trained of which they would have too few steps."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from batchscout.orchestrator.config.keys import StudyConfig
from batchscout.orchestrator.config.stages import (
    FEWEST_STEPS,
    PROBED_SHARES,
    Equivalence,
    Frontier,
    StageKeys,
    Throughput,
)
from batchscout.orchestrator.config.trial import baseline_batch
from batchscout.orchestrator.stages import stage_of
from batchscout.orchestrator.stages.context import StageContext
from batchscout.orchestrator.study.state import Study
from batchscout.orchestrator.study.trial import Trial, TrialState
from batchscout.orchestrator.units import seconds_text

FEWEST_SECONDS = 60.0
"""The optimizer steps of the frontier and of the throughput stage may take at least this long each, however short the study."""


@dataclass(frozen=True)
class Cost:
    """What trials take: the time of their optimizer steps, without starting and compiling them, and their samples."""

    seconds: float = 0.0
    samples: int = 0

    def __add__(self, other: Cost) -> Cost:
        return Cost(self.seconds + other.seconds, self.samples + other.samples)

    def __rmul__(self, number: int) -> Cost:
        return Cost(number * self.seconds, number * self.samples)


NOTHING = Cost()


def total(costs: Iterable[Cost]) -> Cost:
    return sum(costs, NOTHING)


def cost_of(trial: Trial) -> Cost:
    """Return what a trial has taken. One that has not told the time of its steps counts with its samples alone."""
    config = trial.config
    return Cost(config.num_steps_at(config.sample_budget) * (trial.metric("step_seconds") or 0.0), config.sample_budget)


@dataclass(frozen=True)
class Allowance:
    """What the trials of a stage may take in all."""

    seconds: float
    samples: int | None = None
    """The study file's max_samples; None where it gives none."""

    def part(self, share: float) -> Allowance:
        return Allowance(share * self.seconds, None if self.samples is None else int(share * self.samples))

    def holds(self, cost: Cost) -> bool:
        return not self.exceeded_by(cost)

    def __str__(self) -> str:
        """Return it as a limit: what was left out did not fit into it."""
        of_time = [] if math.isinf(self.seconds) else [f"steps of {seconds_text(self.seconds)}"]
        of_samples = [] if self.samples is None else [f"{self.samples:,} samples (max_samples)"]
        return f"the stage may take {' and '.join(of_time + of_samples)}"

    def exceeded_by(self, cost: Cost) -> str:
        """Return what of it does not hold the cost, with both numbers; empty where it does."""
        if self.samples is not None and cost.samples > self.samples:
            return f"{cost.samples:,} samples, more than the {self.samples:,} that max_samples leaves"
        if cost.seconds > self.seconds:
            return f"steps of {seconds_text(cost.seconds)}, more than the {seconds_text(self.seconds)} that the study's length leaves"
        return ""


def allowance(context: StageContext[Frontier | Throughput], baseline_rate: float | None) -> Allowance:
    """Return what the stage's trials may take: a share of the time that the study's full runs take at most, and
    FEWEST_SECONDS at least; any time in a study without such runs.

    baseline_rate: the samples/s of the baseline; None while it is not known.
    """
    runs, stage = num_full_runs(context.config, context.study), context.stage
    if not runs or baseline_rate is None:
        return Allowance(math.inf, stage.max_samples)
    seconds = runs * context.config.sample_budget / baseline_rate
    return Allowance(max(FEWEST_SECONDS, PROBED_SHARES[stage.type] * seconds), stage.max_samples)


def allowed_in_words(context: StageContext[Frontier] | StageContext[Throughput]) -> list[str]:
    """Return the same before any rate is known; nothing where nothing limits it."""
    stage = context.stage
    share = f"{PROBED_SHARES[stage.type]:.0%}"
    of_time = f"limit of their steps: {share} of the time of all full runs, at least {FEWEST_SECONDS:.0f} s"
    limits = [of_time] if num_full_runs(context.config, context.study) else []
    limits += [f"at most {stage.max_samples:,} samples (max_samples)"] if stage.max_samples else []
    return ["; ".join(limits)] if limits else []


def num_full_runs(config: StudyConfig, study: Study, num_lanes: int | None = None) -> int:
    """Return how many full training runs the study takes at most, over all seeds. num_lanes: None for those that its file names, or one."""
    lanes = num_lanes or config.placement.lanes or 1
    contexts = [StageContext(keys, config, study, lanes) for keys in config.stages]
    return len(config.seeds) * sum(stage_of(context.stage).num_full_runs(context) for context in contexts)


def max_samples(context: StageContext[Equivalence]) -> int | None:
    """Return how many samples the runs of an equivalence stage may take; None for any number."""
    if context.stage.max_samples is not None:
        return context.stage.max_samples
    training = num_full_runs(context.config, context.study) * context.config.sample_budget
    return max(1, int(PROBED_SHARES[context.stage.type] * training)) if training else None


def disturbed_rounds(context: StageContext[Frontier] | StageContext[Throughput]) -> frozenset[int]:
    """Return the rounds of timings in which something else was at work, or a GPU slowed itself down for its heat or power
    supply."""
    disturbed = [trial.proposal.round for trial in context.trials() if context.disturbance(trial.metrics)]
    return frozenset(number for number in disturbed if number is not None)


def samples_per_second(trial: Trial) -> float | None:
    """Return how fast a complete trial trained, over all ranks; None where it did not tell."""
    seconds = trial.metric("step_seconds")
    return trial.config.effective_batch_size / seconds if trial.state is TrialState.COMPLETE and seconds else None


def fastest_by_size(timed: Iterable[tuple[int, float | None]]) -> dict[int, float]:
    """Return the highest rate of each micro-batch size. timed: (size, its rate, or None where it has none)."""
    rates = dict[int, float]()
    for size, rate in timed:
        if rate is not None:
            rates[size] = max(rate, rates.get(size, 0.0))
    return rates


def fewest_steps(config: StudyConfig) -> int:
    """Return the optimizer steps that a full run has at least: FEWEST_STEPS, or as many as the baseline where that has
    fewer."""
    return max(1, min(FEWEST_STEPS, config.sample_budget // baseline_batch(config)))


def largest_usable(context: StageContext[StageKeys], speedup: float) -> int | None:
    """Return the largest effective batch of which a full run has enough steps; None without such runs.

    speedup: how many times as fast as the baseline it trains.
    """
    if not num_full_runs(context.config, context.study):
        return None
    return max(1, int(affordable_samples(context.config, speedup) / fewest_steps(context.config)))


def affordable_samples(config: StudyConfig, speedup: float) -> float:
    """Return the samples of a full run of a candidate that trains so many times as fast as the baseline: all that it sees
    in the baseline's time, or as many as the baseline where samples are what is scarce."""
    return config.sample_budget * (1.0 if config.objective == "samples" else speedup)


def rate_at(rates: Mapping[int, float], micro_batch_size: int) -> float:
    """Return the rate to be expected at a size, from those of other sizes.

    The seconds of a micro-batch are nearly linear in its size. Below the smallest they are taken to stay the same, and
    above the largest its rate is.
    """
    sizes = sorted(rates)
    place = bisect_left(sizes, micro_batch_size)
    if place == len(sizes):
        return rates[sizes[-1]]
    above = sizes[place]
    if place == 0:
        return rates[above] * micro_batch_size / above
    below = sizes[place - 1]
    seconds_below, seconds_above = below / rates[below], above / rates[above]
    share = (micro_batch_size - below) / (above - below)
    return micro_batch_size / (seconds_below + share * (seconds_above - seconds_below))


def seconds_at(rates: Mapping[int, float], size: int) -> float:
    """Return how long a micro-batch of a size should take. Beyond the largest size it takes as much longer as the two largest
    sizes say, and no longer than at their rate.

    rates: samples/s by micro-batch size; at least one.
    """
    *_, before, last = [None, *sorted(rates)]
    assert last is not None
    at_its_rate = size / rate_at(rates, size)
    if before is None or size <= last:
        return at_its_rate
    growth = (last / rates[last] - before / rates[before]) / (last - before)
    return min(at_its_rate, last / rates[last] + max(0.0, growth) * (size - last))


def rate_of_batch(rates: Mapping[int, float], size: int) -> float:
    """Return the rate of a batch of `size` samples on each rank in its fastest split: as one micro-batch, or as several."""
    size = max(1, size)
    return max(rate_at(rates, size), *(rate for smaller, rate in rates.items() if smaller <= size), 0.0)
