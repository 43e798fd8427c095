"""What may probing cost? It serves the study's full training runs: it takes a small share of their samples, and tries
no batch that they could not use."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping

from orchestrator.config.keys import StudyConfig
from orchestrator.config.stages import FEWEST_STEPS, PROBED_SHARES, Equivalence, Frontier, StageKeys, Throughput
from orchestrator.stages import stage_of
from orchestrator.stages.context import StageContext
from orchestrator.study.state import Study


def num_full_runs(config: StudyConfig, study: Study) -> int:
    """Return how many full training runs the study takes at most, over all seeds."""
    contexts = [StageContext(keys, config, study) for keys in config.stages]
    return len(config.seeds) * sum(stage_of(context.stage).num_full_runs(context) for context in contexts)


def max_samples(context: StageContext[Frontier | Throughput | Equivalence]) -> int | None:
    """Return how many samples the stage's trials may take; None for any number."""
    if context.stage.max_samples is not None:
        return context.stage.max_samples
    training = num_full_runs(context.config, context.study) * context.config.sample_budget
    return max(1, int(PROBED_SHARES[context.stage.type] * training)) if training else None


def disturbed_rounds(context: StageContext[Frontier] | StageContext[Throughput]) -> frozenset[int]:
    """Return the rounds of timings in which something else was at work, or a GPU slowed itself down for its heat or power
    supply."""
    disturbed = [trial.proposal.round for trial in context.trials() if context.disturbance(trial)]
    return frozenset(number for number in disturbed if number is not None)


def largest_usable(context: StageContext[StageKeys], speedup: float) -> int | None:
    """Return the largest effective batch of which a full run has at least FEWEST_STEPS steps; None without such runs.

    speedup: how many times as fast as the baseline it trains.
    """
    if not num_full_runs(context.config, context.study):
        return None
    return max(1, int(affordable_samples(context.config, speedup) / FEWEST_STEPS))


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
