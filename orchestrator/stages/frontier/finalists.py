"""The frontier's finalists: the fastest probes that fit, timed again in turns, round by round."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

from batchscout.orchestrator.config.stages import Train
from batchscout.orchestrator.stages.estimates.node_speeds import rates_by_round, stragglers
from batchscout.orchestrator.stages.estimates.timing import DISAGREEMENT, Timings, in_turn, rounds_wanted
from batchscout.orchestrator.stages.frontier.findings import OperatingPoint
from batchscout.orchestrator.stages.frontier.knobs import KnobSearch
from batchscout.orchestrator.stages.frontier.measured import peak_of, rate_of
from batchscout.orchestrator.stages.frontier.probes import Probes
from batchscout.orchestrator.stages.frontier.trials import TIMED_STEPS, FrontierTrials
from batchscout.orchestrator.stages.frontier.variants import variants
from batchscout.orchestrator.stages.probing import (
    cost_of,
    disturbed_rounds,
    num_full_runs,
    rate_at,
    rate_of_batch,
    total,
)
from batchscout.orchestrator.stages.too_short import too_short
from batchscout.orchestrator.study.trial import Proposal, Trial, TrialState

# After a point has fallen in its verification the finalists are timed so many times more.
MORE_ROUNDS = 2


@dataclass(frozen=True)
class Finalists:
    """The points that are compared, as far as the journal knows them."""

    trials: FrontierTrials
    probes: Probes
    knobs: KnobSearch

    def fitting(self, seq_len: int | None = None) -> dict[OperatingPoint, Trial]:
        """Return the probes that fit, with samples of this length; last those with knobs that the study may go on with."""
        return self.probes.fitting_without_knobs(seq_len) | ({} if seq_len else self.knobs.eligible())

    def usable(self, fitting: Mapping[OperatingPoint, Trial]) -> dict[OperatingPoint, Trial]:
        """Return those of which a full run has enough steps, and the smallest."""
        smallest = min((point.micro_batch_size for point in fitting), default=0)
        return {
            point: trial
            for point, trial in fitting.items()
            if point.micro_batch_size == smallest or self._is_usable(point.micro_batch_size)
        }

    def _is_usable(self, size: int) -> bool:
        if not num_full_runs(self.trials.context.config, self.trials.study) or not self.trials.rates:
            return True
        speedup = rate_at(self.trials.rates, size) / rate_of_batch(self.trials.rates, self.trials.baseline_size)
        return too_short(self.trials.context.config, size * self.trials.context.config.world_size, speedup) is None

    def largest_to_train(self, probes: dict[OperatingPoint, Trial]) -> list[OperatingPoint]:
        """Return each mode's largest size of those at which it is the fastest and that a run can use: that is how they are
        trained.

        Where the largest size fits the mode's smaller ones do, too, so they are not run in a process of their own.
        """
        usable = self.usable(probes)
        by_rate = sorted(usable, key=lambda point: rate_of(usable[point]))
        fastest = {point.micro_batch_size: point for point in by_rate}
        return list({fastest[size].mode: fastest[size] for size in sorted(fastest)}.values())

    def trains_other_sizes(self) -> bool:
        """True if a later stage trains other sizes than the chosen one."""
        return self.trials.context.config.keys_of(Train) is not None

    def proposals(self) -> list[Proposal]:
        """Return a trial of every finalist in every round, round by round; none if there is only one finalist."""
        lanes = self.trials.context.num_lanes
        rounds = range(1, self.num_rounds + 1)
        return [self.trials.timing(point, n) for n in rounds for point in in_turn(self._in_round(n), n, lanes)]

    def _in_round(self, number: int) -> list[OperatingPoint]:
        """Return the finalists of a round, without those that did not run in one before: they would compile in vain again."""
        earlier = {
            point: [self.trials.timing_of(point, before) for before in range(1, number)] for point in self.points
        }
        return [point for point, trials in earlier.items() if not any(one and one.state.ruled_out for one in trials)]

    @cached_property
    def points(self) -> list[OperatingPoint]:
        """The fastest probes that fit and are of use, and the variants of the fastest of all: as many of them as may be timed."""
        usable = self.usable(self.fitting())
        points = sorted(usable, key=lambda point: -rate_of(usable[point]))[: self.trials.stage.finalists]
        points[2:2] = [variant.of(points[0]) for variant in variants(self.trials.context) if points]
        while len(points) > 1 and not self._affordable(points, self.trials.stage.rounds):
            points.pop()
        return points

    @cached_property
    def num_rounds(self) -> int:
        """How many rounds to time by now: one more until they tell who is the fastest, or there may be no more."""
        if len(self.points) < 2:
            return 0
        return rounds_wanted(self.trials.stage.rounds, self.trials.stage.max_rounds, self._suffice, self._has_begun)

    def _has_begun(self, number: int) -> bool:
        return any(self.trials.timing_of(point, number) is not None for point in self.points)

    def _suffice(self, num_rounds: int) -> bool:
        """True if so many rounds tell who is the fastest, have not ended yet, or may not be followed by another. Only those that
        nothing disturbed count as max_rounds."""
        last = [self.trials.timing_of(point, num_rounds) for point in self._in_round(num_rounds)]
        timed = self._timed_in(num_rounds)
        if timed is None or not all(trial is not None and trial.state.ended for trial in last):
            return True
        wanted = self.trials.stage.rounds + (MORE_ROUNDS if self.slower_when_verified else 0)
        clear = timed.is_clear() and timed.num_quiet_rounds >= wanted
        return (
            clear
            or timed.num_quiet_rounds >= self.trials.stage.max_rounds
            or not self._affordable(self.points, num_rounds + 1)
        )

    def _affordable(self, finalists: list[OperatingPoint], num_rounds: int) -> bool:
        """True if the stage may take so many rounds beside the probes and the verifications."""
        costs = [self.trials.cost_of(point, TIMED_STEPS) for point in finalists]
        edges = set(self.largest_to_train(self.fitting())) - set(finalists) if self.trains_other_sizes() else set()
        longest = max(costs, key=lambda cost: cost.samples)
        verifications = longest + total(self.trials.cost_of(point, TIMED_STEPS) for point in edges)
        checks = total(cost_of(trial) for trial in self.trials.all() if trial.proposal.control)
        return self.probes.allowed.holds(self.probes.probed + checks + verifications + num_rounds * total(costs))

    @cached_property
    def timed(self) -> Timings[OperatingPoint] | None:
        """The rates of the finalists that ran in every round so far; None where fewer than two did."""
        return self._timed_in(self.num_rounds)

    def _timed_in(self, num_rounds: int) -> Timings[OperatingPoint] | None:
        def rate(trial: Trial) -> float:
            return rate_of(trial) if trial.state is TrialState.COMPLETE else 0.0

        slow = stragglers(self.trials.all())
        rates = rates_by_round(self.points, num_rounds, self.trials.timing_of, rate, slow)
        return Timings(rates, disturbed_rounds(self.trials.context)) if num_rounds and len(rates) > 1 else None

    @cached_property
    def slower_when_verified(self) -> list[Trial]:
        """The verifications that were much slower than the same point's probe: something else had the machine."""
        pairs = [(probe, self.trials.verification_of(point)) for point, probe in self.fitting().items()]
        return [one for probe, one in pairs if one and 0 < rate_of(one) * DISAGREEMENT < rate_of(probe)]

    def trials_of(self, point: OperatingPoint) -> list[Trial]:
        """Return the point's probe, timings and verification, as far as there are any."""
        timings = [self.trials.timing_of(point, number) for number in range(1, self.num_rounds + 1)]
        trials = [self.trials.probe_of(point), *timings, self.trials.verification_of(point)]
        return [trial for trial in trials if trial is not None]

    def most_memory(self, point: OperatingPoint) -> float:
        """Return the most memory that the point's probe and timings took.

        The verification does not count: this decides which point to verify.
        """
        trials = [
            trial
            for trial in self.trials_of(point)
            if not trial.proposal.fresh_process and "peak_memory_bytes" in trial.metrics
        ]
        return max(map(peak_of, trials))
