"""What a study costs, before it has cost anything, and the length of the run from which on it pays. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from batchscout.orchestrator.config.keys import StudyConfig
from batchscout.orchestrator.config.stages import Equivalence, Frontier, Throughput
from batchscout.orchestrator.config.trial import baseline_batch
from batchscout.orchestrator.stages.context import StageContext
from batchscout.orchestrator.stages.equivalence import most_samples
from batchscout.orchestrator.stages.probing import allowance, num_full_runs
from batchscout.orchestrator.study.facts import Facts
from batchscout.orchestrator.study.state import Study

SECONDS_OF_A_TRIAL = 1.3
"""What a trial takes beside its steps (docs/benchmarks.md: a trivial one, its lane's start included)."""


@dataclass(frozen=True)
class Cost:
    """In seconds of a lane, at most: nothing is stopped early, and each stage of probes takes all that it may."""

    run: float
    """The training steps of one full run of the baseline, which is what any full run takes (`objective: samples` aside)."""
    num_full_runs: int
    probes: Mapping[str, float]
    """Of each stage that times and compares before anything is trained."""

    @property
    def total(self) -> float:
        return self.num_full_runs * (self.run + SECONDS_OF_A_TRIAL) + sum(self.probes.values())


def cost_of(config: StudyConfig, facts: Facts, samples_per_second: float, num_lanes: int | None = None) -> Cost:
    """Return what the study takes. samples_per_second: of the baseline, over all ranks. num_lanes: as for num_full_runs."""
    study = Study(config.name, facts=facts)
    runs, probes = num_full_runs(config, study, num_lanes), dict[str, float]()
    for keys in config.stages:
        if runs and isinstance(keys, Frontier | Throughput):
            allowed = allowance(StageContext(keys, config, study), samples_per_second)
            of_samples = allowed.samples / samples_per_second if allowed.samples else allowed.seconds
            probes[keys.type] = min(allowed.seconds, of_samples)
        if isinstance(keys, Equivalence):
            probes[keys.type] = (most_samples(StageContext(keys, config, study)) or 0) / samples_per_second
    return Cost(config.sample_budget / samples_per_second, runs, probes)


def samples_per_second(config: StudyConfig, pass_seconds: tuple[float, float]) -> float:
    """Return how fast the baseline trains, in one micro-batch on each rank. pass_seconds: as of `Facts`."""
    size = max(1, baseline_batch(config) // config.world_size)
    fixed, of_each = pass_seconds
    return size * config.world_size / (fixed + of_each * size)


def pays_from(lane_seconds: float, share: float) -> float:
    """Return the length of the run, in seconds, from which on a study saves more than it cost. share: of its training time, what a run
    takes afterwards to come to the same loss; less than 1."""
    return lane_seconds / (1 - share)
