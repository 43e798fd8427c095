"""The frontier's probes: every mode's search for the largest micro-batch that fits, and the ladder of sizes below it."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import cached_property

from batchscout.orchestrator.config.mode import Mode
from batchscout.orchestrator.config.stages import Frontier
from batchscout.orchestrator.stages.context import StageContext
from batchscout.orchestrator.stages.frontier.findings import OperatingPoint
from batchscout.orchestrator.stages.frontier.measured import ended_for_another_reason
from batchscout.orchestrator.stages.frontier.modes import modes
from batchscout.orchestrator.stages.frontier.search import EndedBy, Next, Probe, SearchEnd, next_probe
from batchscout.orchestrator.stages.frontier.trials import ACCUMULATED, FrontierTrials, rates_of
from batchscout.orchestrator.stages.probing import (
    NOTHING,
    Allowance,
    Cost,
    allowance,
    cost_of,
    largest_usable,
    rate_of_batch,
    seconds_at,
    total,
)
from batchscout.orchestrator.study.trial import Proposal, Trial, TrialState

# The probes may take this share of what the stage may take; the rest is for timing and verification.
PROBES_SHARE = 0.5


def smallest_size(context: StageContext[Frontier]) -> int:
    """Return the micro-batch size at which the search starts: the stage's, or more where the model takes no single sample."""
    return max(context.stage.smallest, context.study.facts.smallest_micro_batch)


def ladder(smallest: int, largest: int) -> list[int]:
    """Return sizes that double up to the largest, and the round numbers just below it for which kernels are made."""
    doubled = [smallest * 2**i for i in range(largest.bit_length()) if smallest * 2**i <= largest]
    round_below = [largest - largest % unit for unit in (2, 4, 8, 16, 32, 64) if 4 * unit <= largest]
    return sorted({*doubled, *(size for size in round_below if size >= smallest), largest})


@dataclass(frozen=True)
class Largest:
    """The largest micro-batch size to try."""

    size: int
    why: str
    """No larger one is tried."""


@dataclass(frozen=True)
class Probes:
    """The search of every mode, as far as the journal knows it."""

    trials: FrontierTrials

    @property
    def smallest(self) -> int:
        return smallest_size(self.trials.context)

    @cached_property
    def modes(self) -> list[Mode]:
        return modes(self.trials.context)

    def proposals(self) -> list[Proposal]:
        proposals, unasked = list[Proposal](), NOTHING
        for mode in self.modes:
            points = [OperatingPoint(mode, size) for size in self.sizes(mode, unasked)]
            unasked += total(
                self.trials.cost_of(point, self.trials.stage.steps)
                for point in points
                if self.trials.probe_of(point) is None
            )
            proposals += map(self.trials.probe, points)
        return proposals

    def sizes(self, mode: Mode, unasked: Cost = NOTHING) -> list[int]:
        """Return the sizes that the search has asked for; when it is over, also the ladder below what it found, as far as a
        full run can use it.

        unasked: what probes of other modes will take, which the journal does not have yet.
        """
        sizes, end = self.search(mode, unasked)
        if end is None or end.micro_batch_size is None:
            return sizes
        spent = self.probed + unasked
        for size in reversed(self._usable_ladder(end.micro_batch_size)):
            point = OperatingPoint(mode, size)
            if size in sizes or (self.trials.probe_of(point) is None and self._why_left_out(point, spent)):
                continue
            sizes.append(size)
            spent += (
                self.trials.cost_of(point, self.trials.stage.steps) if self.trials.probe_of(point) is None else NOTHING
            )
        return sizes

    def search(self, mode: Mode, unasked: Cost = NOTHING) -> tuple[list[int], SearchEnd | None]:
        """Return (the sizes that the search has asked for, how it ended).

        The second is None while the last probe has not ended, or if that ended for another reason than its size. The
        smallest size comes first, wherever the limit is: everything else is held against its memory and its speed.
        """
        trials, probes, sizes = list[Trial](), list[Probe](), [self.smallest]
        while True:
            trial = self.trials.probe_of(OperatingPoint(mode, sizes[-1]))
            if trial is None or not trial.state.ended or ended_for_another_reason(trial):
                return sizes, None
            trials.append(trial)
            probes.append(self.outcome(trial))
            step = self._step(mode, trials, probes)
            if isinstance(step, SearchEnd):
                return sizes, step
            point = OperatingPoint(mode, step.micro_batch_size)
            if self.trials.probe_of(point) is None and self._must_wait(mode):
                return sizes, None
            if self.trials.probe_of(point) is None and (why := self._why_left_out(point, self.probed + unasked)):
                fits = max((one.micro_batch_size for one in probes if one.fits), default=None)
                evidence = f"{fits} fits; {step.micro_batch_size} was left out: {why}"
                return sizes, SearchEnd(fits, evidence, EndedBy.MEMORY if fits is None else EndedBy.BUDGET)
            sizes.append(step.micro_batch_size)

    def _step(self, mode: Mode, trials: list[Trial], probes: list[Probe]) -> Next | SearchEnd:
        predicted = self.trials.predicted(mode)
        line = predicted.lines[-1] if predicted else None  # the one of large sizes, where the limit is
        # Both ends of what fits are looked at, in the first mode: what larger batches would gain in speed is worth knowing.
        largest = self.largest(trials, beyond_use=mode == self.modes[0])
        step = next_probe(probes, self.trials.capacity_bytes(), line, smallest=self.smallest, largest=largest.size)
        if isinstance(step, SearchEnd) and step.ended_by is EndedBy.LARGEST:
            return replace(step, evidence=f"{step.evidence}: {largest.why}")
        return step

    def _why_left_out(self, point: OperatingPoint, spent: Cost) -> str:
        """Return why a point that the journal does not have is not to be probed; empty if it is.

        spent: what all probes before it take.
        """
        if plain := self._plain_mode_that_suffices(point.mode):
            return f"without checkpointing ({plain}) all sizes that a run can use fit, too"
        allowed = self.allowed.part(PROBES_SHARE)
        if len(self.trials.rates) < 2:  # one size is no range: the second one may take any time
            allowed = replace(allowed, seconds=math.inf)
        excess = allowed.exceeded_by(spent + self.trials.cost_of(point, self.trials.stage.steps))
        return f"with it the probes would take {excess}" if excess else ""

    def over_budget(self, point: OperatingPoint) -> bool:
        """True if a point with knobs may not be probed."""
        return bool(self._why_left_out(point, self.probed))

    @cached_property
    def probed(self) -> Cost:
        """What all probes that the journal has take."""
        return total(cost_of(trial) for trial in self.trials.all() if trial.config.dynamic_micro_batch)

    @cached_property
    def allowed(self) -> Allowance:
        """What the stage may take."""
        return self._allowance(self.trials.all())

    def _allowance(self, trials: Iterable[Trial]) -> Allowance:
        rates = rates_of(trials)
        return allowance(self.trials.context, rate_of_batch(rates, self.trials.baseline_size) if rates else None)

    def _must_wait(self, mode: Mode) -> bool:
        """True if the search without checkpointing goes on: it may show that this mode has nothing to give."""
        plain = self._plain(mode)
        if plain is None:
            return False
        sizes, end = self.search(plain)
        last = self.trials.probe_of(OperatingPoint(plain, sizes[-1]))
        return end is None and (last is None or not last.state.ended)

    def _plain_mode_that_suffices(self, mode: Mode) -> Mode | None:
        """Return the same mode without checkpointing, if that holds whatever a run can use; else None.

        Checkpointing saves memory, and costs time: there it has nothing to give.
        """
        plain = self._plain(mode)
        _, end = self.search(plain) if plain else ([], None)
        if end is None or end.ended_by is EndedBy.BUDGET or self.memory_binds(end):
            return None
        return plain

    def memory_binds(self, end: SearchEnd) -> bool:
        """True if, where the search ended, a run could use a larger size, and it is memory that does not hold it."""
        return end.ended_by is EndedBy.MEMORY and (end.micro_batch_size or 0) < self.most_usable

    def _plain(self, mode: Mode) -> Mode | None:
        """Return the same mode without checkpointing; None if that is this mode, or is not tried."""
        plain = replace(mode, activation_checkpointing="none")
        return plain if plain != mode and plain in self.modes else None

    def outcome(self, trial: Trial) -> Probe:
        ran = trial.state is not TrialState.OUT_OF_MEMORY
        peak = trial.metric("peak_memory_bytes") if ran else None
        return Probe(trial.config.micro_batch_size, self.trials.fits(trial), peak)

    def largest(self, trials: list[Trial], *, beyond_use: bool = False) -> Largest:
        """Return the largest size to try after these trials.

        beyond_use: whether to try sizes of which a full run has too few steps, too.
        """
        config, facts, stage = self.trials.context.config, self.trials.study.facts, self.trials.stage
        limits = [Largest(stage.largest, "none larger was asked for")]
        if facts.num_train_samples:
            twice = f"a step would take some of the {facts.num_train_samples:,} training samples twice"
            limits.append(Largest(facts.num_train_samples // config.world_size, twice))
        if not beyond_use:
            too_few = "of a larger one a full run has too few optimizer steps"
            limits.append(Largest(self.most_usable_by(trials), too_few))
        if config.micro_batch is not None and config.micro_batch.tokens != "auto" and facts.longest_sample is not None:
            tokens = config.micro_batch.tokens
            more = f"a larger one would hold more than micro_batch.tokens ({tokens:,})"
            limits.append(Largest(tokens // facts.longest_sample, more))
        if seconds := self._seconds_per_sample(trials):
            longer = f"a step would take longer than max_step_seconds ({stage.max_step_seconds:g})"
            limits.append(Largest(int(stage.max_step_seconds / seconds), longer))
        limits.append(
            Largest(self._most_in_time(trials), "a larger one would take half of what is left of the probes' time")
        )
        least = min(limits, key=lambda limit: limit.size)
        return replace(least, size=max(self.smallest, least.size))

    @cached_property
    def most_usable(self) -> int:
        """The largest size that a run can use at the best rate so far, held against the baseline's."""
        return self.most_usable_by(self.trials.all())

    def most_usable_by(self, trials: Iterable[Trial]) -> int:
        """Return the same by these trials alone."""
        rates = rates_of(trials)
        if not rates:
            return self.trials.stage.largest
        usable = largest_usable(
            self.trials.context, max(rates.values()) / rate_of_batch(rates, self.trials.baseline_size)
        )
        return self.trials.stage.largest if usable is None else max(1, usable // self.trials.context.config.world_size)

    def _most_in_time(self, trials: list[Trial]) -> int:
        """Return the largest size whose probe should take no more than half of the time that these have left to the probes;
        twice the smallest at least."""
        left = self._allowance(trials).part(PROBES_SHARE).seconds - total(map(cost_of, trials)).seconds
        rates, smallest = rates_of(trials), self.smallest
        if not rates or math.isinf(left):
            return self.trials.stage.largest
        most = left / 2 / (self.trials.stage.steps * ACCUMULATED * self.trials.context.config.world_size)
        sizes = range(2 * smallest, max(2 * smallest, self.trials.stage.largest) + 1)
        return max(2 * smallest, sizes[0] + bisect_right(sizes, most, key=lambda size: seconds_at(rates, size)) - 1)

    def _seconds_per_sample(self, trials: list[Trial]) -> float | None:
        """Return the time of a step, for every sample of its micro-batch, at the best rate so far; None before one is known."""
        timed = [(trial.metric("step_seconds"), trial.config.micro_batch_size) for trial in trials]
        return min((seconds / size for seconds, size in timed if seconds), default=None)

    def left_out(self, mode: Mode) -> list[int]:
        """Return the sizes below the largest of a mode that were not probed, for their time or samples."""
        sizes, end = self.sizes(mode), self.search(mode)[1]
        if end is None or end.micro_batch_size is None or self._plain_mode_that_suffices(mode):
            return []
        return [size for size in self._usable_ladder(end.micro_batch_size) if size not in sizes]

    def _usable_ladder(self, largest: int) -> list[int]:
        return [size for size in ladder(self.smallest, largest) if size <= self.most_usable]

    def fitting_without_knobs(self, seq_len: int | None = None) -> dict[OperatingPoint, Trial]:
        """Return the probes that fit, with samples of this length, in the order of the study file's modes, without those with knobs
        that are tried."""
        wanted = [mode for mode in self.modes if mode.seq_len == seq_len]
        points = [OperatingPoint(mode, size) for mode in wanted for size in self.sizes(mode)]
        return {point: trial for point in points if (trial := self.trials.probe_of(point)) and self.trials.fits(trial)}
