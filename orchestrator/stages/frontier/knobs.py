"""Memory knobs in the frontier: tried where memory is what binds, with at most twelve probes in all, beside the largest micro-batch
that fits without them.

A knob saves memory and mostly costs time. So it pays only where it lets a larger micro-batch, or less checkpointing, fit. It is not
probed where the prediction sees no saving, and no further where even the growth of speed so far would not carry it past the fastest
point without it. One that changes the loss may be chosen only after its quality check.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass, replace
from functools import cached_property

from batchscout.orchestrator.config.mode import Mode
from batchscout.orchestrator.config.stages import Frontier
from batchscout.orchestrator.stages.context import StageContext
from batchscout.orchestrator.stages.estimates.timing import TIE
from batchscout.orchestrator.stages.frontier.findings import OperatingPoint, Quality
from batchscout.orchestrator.stages.frontier.measured import ended_for_another_reason, rate_of
from batchscout.orchestrator.stages.frontier.modes import knobs_to_try, with_knobs
from batchscout.orchestrator.stages.frontier.probes import Probes
from batchscout.orchestrator.stages.frontier.quality import (
    CHECKED_SHARE,
    QUALITY_STEPS,
    quality_of,
    quality_split,
    quality_trials,
)
from batchscout.orchestrator.stages.frontier.search import TOLERANCE, SearchEnd, next_probe
from batchscout.orchestrator.stages.frontier.trials import FrontierTrials
from batchscout.orchestrator.study.trial import Proposal, Trial
from batchscout.trainers.knobs import excluding, that_change_the_loss

MOST_PROBES = 12
"""Of all knobs together."""
MOST_PROBES_OF_A_MODE = 3
"""One where the mode without the knob ends, one where the line through its peak puts the limit, and one to correct that."""


def together(context: StageContext[Frontier]) -> list[tuple[str, ...]]:
    """Return each knob to try, and after them the pairs that do not exclude each other."""
    names = knobs_to_try(context)
    pairs = [pair for pair in itertools.combinations(names, 2) if excluding(pair) is None]
    return [*((name,) for name in names), *pairs]


@dataclass(frozen=True)
class KnobMode:
    """A mode with knobs, and the same without them."""

    mode: Mode
    ground: Mode
    names: tuple[str, ...]
    """The knobs that it has and its ground has not."""


@dataclass(frozen=True)
class KnobSearch:
    """The knobs' probes as far as the journal knows them. It is asked once all other probes have ended."""

    trials: FrontierTrials
    probes: Probes

    @cached_property
    def modes(self) -> list[KnobMode]:
        """What is to be probed, in this order."""
        return [one for one in self.candidates if not self.saves_nothing(one)]

    @cached_property
    def candidates(self) -> list[KnobMode]:
        """Each knob, then pairs, with the checkpointing of the fastest point and with none; where nothing fits without a knob, with
        the most checkpointing. None where memory is not what binds."""
        if not self.memory_binds:
            return []
        fitting = self.probes.fitting_without_knobs()
        of_the_data = [mode for mode in self.probes.modes if mode.seq_len is None]
        fastest = max(fitting, key=lambda point: rate_of(fitting[point])).mode if fitting else of_the_data[-1]
        plain = replace(fastest, activation_checkpointing="none")
        grounds = [fastest, plain] if plain != fastest and plain in self.probes.modes else [fastest]
        return [
            KnobMode(mode, ground, names)
            for names in together(self.trials.context)
            for ground in grounds
            if (mode := with_knobs(self.trials.context, ground, names))
        ]

    @cached_property
    def memory_binds(self) -> bool:
        """True if a larger micro-batch would be tried without checkpointing, were there memory for it."""
        first = next((mode for mode in self.probes.modes if mode.seq_len is None), None)
        end = self.probes.search(first)[1] if first else None
        return end is not None and self.probes.memory_binds(end) and self.trials.capacity_bytes() is not None

    def saves_nothing(self, one: KnobMode) -> bool:
        """True if the prediction, where there is one, sees no saving at the largest size that fits without the knob."""
        before, after = self.trials.predicted(one.ground), self.trials.predicted(one.mode)
        if before is None or after is None:
            return False
        size = self.first_size(one)
        return after.bytes_at(size) > (1 - TOLERANCE) * before.bytes_at(size)

    def first_size(self, one: KnobMode) -> int:
        """Return the largest size that fits without the knob; the smallest of the stage if none does."""
        sizes = [point.micro_batch_size for point in self.probes.fitting_without_knobs() if point.mode == one.ground]
        return max(sizes, default=self.probes.smallest)

    def proposals(self) -> list[Proposal]:
        """Return the probes so far and the next one; once all have ended, the quality checks of those that would pay."""
        proposals = list[Proposal]()
        for one in self.modes:
            sizes, over = self.sizes(one)
            room = MOST_PROBES - len(proposals)
            proposals += [self.trials.probe(OperatingPoint(one.mode, size)) for size in sizes[:room]]
            if not over and len(sizes) <= room:
                return proposals
            if len(proposals) == MOST_PROBES:
                break
        if not self.trials.context.have_ended(proposals):
            return proposals
        checks = [trial for one in self.to_check for trial in quality_trials(self.trials.context, one.mode, one.ground)]
        once = {trial.id: trial for trial in checks}  # modes of one ground share the runs without a knob
        return [*proposals, *once.values()]

    def sizes(self, one: KnobMode) -> tuple[list[int], bool]:
        """Return (the sizes to probe so far, whether no other will follow)."""
        trials, sizes = list[Trial](), [self.first_size(one)]
        while True:
            point = OperatingPoint(one.mode, sizes[-1])
            trial = self.trials.probe_of(point)
            if trial is None and self.probes.over_budget(point):
                return sizes[:-1], True
            if trial is None or not trial.state.ended:
                return sizes, False
            trials.append(trial)
            following = None if ended_for_another_reason(trial) else self._following(one, trials)
            if following is None or len(sizes) == MOST_PROBES_OF_A_MODE or following in sizes:
                return sizes, True
            sizes.append(following)

    def _following(self, one: KnobMode, trials: list[Trial]) -> int | None:
        """Return the size to probe next; None where the search has ended, or no size that may fit could pay."""
        predicted = self.trials.predicted(one.mode) or self.trials.predicted(one.ground)
        step = next_probe(
            [self.probes.outcome(trial) for trial in trials],
            self.trials.capacity_bytes(),
            predicted.lines[-1] if predicted else None,
            smallest=self.probes.smallest,
            largest=self.probes.largest(trials).size,
        )
        if isinstance(step, SearchEnd) or self._cannot_pay(one, trials, step.micro_batch_size):
            return None
        return step.micro_batch_size

    def _cannot_pay(self, one: KnobMode, trials: list[Trial], size: int) -> bool:
        """True if the knob's speed, growing with the size as fast as it last did without the knob, stays below the fastest."""
        timed = {trial.config.micro_batch_size: rate for trial in trials if (rate := rate_of(trial))}
        if not timed:
            return False
        last = max(timed)
        growth = max(self._growth(one.ground), 0.0)
        reach = timed[last] * max(1.0, size / last) ** growth
        return reach < (1 - TIE) * self.fastest_without()

    def _growth(self, ground: Mode) -> float:
        """Return the exponent with which speed last grew with the size; 1, the most there is, where one size alone was probed."""
        rates = {
            point.micro_batch_size: rate_of(trial)
            for point, trial in self.probes.fitting_without_knobs().items()
            if point.mode == ground and rate_of(trial) > 0
        }
        if len(rates) < 2:
            return 1.0
        largest = max(rates)
        before = max((size for size in rates if size <= largest / 2), default=min(rates))
        return math.log(rates[largest] / rates[before]) / math.log(largest / before)

    def fastest_without(self) -> float:
        return max(map(rate_of, self.probes.fitting_without_knobs().values()), default=0.0)

    # What may be chosen

    def fitting(self, one: KnobMode) -> dict[OperatingPoint, Trial]:
        """Return the probes of a mode that fit."""
        points = [OperatingPoint(one.mode, size) for size in self.sizes(one)[0]]
        return {point: trial for point in points if (trial := self.trials.probe_of(point)) and self.trials.fits(trial)}

    @cached_property
    def to_check(self) -> list[KnobMode]:
        """The modes whose loss must be looked at, since they change it and would be chosen otherwise; as many as the stage may
        take the time for."""
        wanted = [one for one in self.modes if that_change_the_loss(one.names) and self.is_faster(one)]
        allowed, spent = self.probes.allowed.part(CHECKED_SHARE), self.probes.probed
        return [
            one
            for number, one in enumerate(wanted, start=1)
            if allowed.holds(
                spent + self.trials.cost(one.ground, quality_split(self.trials.context), number * QUALITY_STEPS)
            )
        ]

    def is_faster(self, one: KnobMode) -> bool:
        """True if a size with the knobs was faster than every size without."""
        return max(map(rate_of, self.fitting(one).values()), default=0.0) > self.fastest_without()

    def quality(self, one: KnobMode) -> Quality | None:
        """Return what the quality check found; None while it has not ended, and of a mode that needs none."""
        return quality_of(self.trials.context, one.mode, one.ground) if one in self.to_check else None

    def eligible(self) -> dict[OperatingPoint, Trial]:
        """Return the probes that fit of the modes that a study may go on with: where they change the loss they have
        passed their check."""
        found = dict[OperatingPoint, Trial]()
        for one in self.modes:
            quality = self.quality(one)
            sound = bool(quality and quality.passed) or not that_change_the_loss(one.names)
            if sound:
                found |= self.fitting(one)
        return found
