"""The frontier's trials: probes, then timings of the finalists, then the best once more in a fresh process."""

from __future__ import annotations

import itertools
import math
from bisect import bisect_right
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property

from batchscout.orchestrator.config.mode import Mode
from batchscout.orchestrator.config.stages import Frontier, Train
from batchscout.orchestrator.config.trial import baseline_batch
from batchscout.orchestrator.stages.context import StageContext
from batchscout.orchestrator.stages.estimates.node_speeds import Place, Straggler, slowness, stragglers
from batchscout.orchestrator.stages.estimates.timing import (
    DISAGREEMENT,
    GPU_PROBE_SECONDS,
    GPU_TIMING_SECONDS,
    Timings,
    in_turn,
    rounds_wanted,
)
from batchscout.orchestrator.stages.frontier.checkpointing import not_checkpointed
from batchscout.orchestrator.stages.frontier.findings import OperatingPoint
from batchscout.orchestrator.stages.frontier.knobs import KnobSearch, knobs_to_try, with_knobs
from batchscout.orchestrator.stages.frontier.measured import peak_of, rate_of, says_nothing
from batchscout.orchestrator.stages.frontier.search import Next, Probe, SearchEnd, next_probe
from batchscout.orchestrator.stages.frontier.variants import Variant, variants
from batchscout.orchestrator.stages.probing import (
    NOTHING,
    Allowance,
    Cost,
    allowance,
    cost_of,
    disturbed_rounds,
    fastest_by_size,
    largest_usable,
    num_full_runs,
    rate_at,
    rate_of_batch,
    samples_per_second,
    seconds_at,
    total,
)
from batchscout.orchestrator.stages.too_short import too_short
from batchscout.orchestrator.study.state import Study
from batchscout.orchestrator.study.trial import Proposal, Trial, TrialState
from batchscout.trainers.before.peak_memory import PeakMemory
from batchscout.trainers.config import ActivationCheckpointing, Split

# Optimizer steps of a timing, of which the first few are not timed.
TIMED_STEPS = 8
# Accumulation steps of every trial here: the gradient that is kept while the next micro-batch runs takes memory, too.
ACCUMULATED = 2
# The probes may take this share of what the stage may take; the rest is for timing and verification.
PROBES_SHARE = 0.5
# After a point has fallen in its verification the finalists are timed so many times more.
MORE_ROUNDS = 2


def propose(context: StageContext[Frontier]) -> list[Proposal]:
    """Return all proposals so far and the next ones; the same journal always gives the same ones."""
    known = FrontierProgress(context)
    proposals = known.probes()
    for further in (known.knobs.proposals, known.timings, known.verifications):
        if not known.all_ended(proposals):
            break
        proposals += further()
    return proposals


def modes(context: StageContext[Frontier]) -> list[Mode]:
    """Return the modes to compare. Those with other sample lengths come last, and only show what the lengths cost."""
    stage = context.stage
    precisions = stage.precision or (context.config.precision,)
    kinds = stage.cross_entropy or ("whole",)
    lengths = (None, *(length for length in stage.seq_len if length != context.config.data.kwargs.get("seq_len")))
    left_out = not_checkpointed(context)
    checkpointing: list[ActivationCheckpointing] = [
        mode for mode in stage.activation_checkpointing if mode not in left_out
    ]
    axes = itertools.product(lengths, checkpointing, stage.compile or (True,), precisions, kinds)
    always = context.config.memory_knobs
    return [Mode(mode, compiled, precision, kind, length, always) for length, mode, compiled, precision, kind in axes]


def smallest_size(context: StageContext[Frontier]) -> int:
    """Return the micro-batch size at which the search starts: the stage's, or more where the model takes no single sample."""
    return max(context.stage.smallest, context.study.facts.smallest_micro_batch)


def ladder(smallest: int, largest: int) -> list[int]:
    """Return sizes that double up to the largest, and the round numbers just below it for which kernels are made."""
    doubled = [smallest * 2**i for i in range(largest.bit_length()) if smallest * 2**i <= largest]
    round_below = [largest - largest % unit for unit in (2, 4, 8, 16, 32, 64) if 4 * unit <= largest]
    return sorted({*doubled, *(size for size in round_below if size >= smallest), largest})


def predicted_modes(context: StageContext[Frontier]) -> list[Mode]:
    """Return every mode that the frontier may run: its own, and each again in the variants and with the knobs that it tries."""
    compared = modes(context)
    of_the_data = [mode for mode in compared if mode.seq_len is None]
    varied = [variant.of_mode(mode) for variant in variants(context) for mode in of_the_data]
    return [*compared, *varied, *modes_with_knobs(context)]


def modes_with_knobs(context: StageContext[Frontier]) -> list[Mode]:
    """Return every mode with each of the knobs that may be tried in it. Pairs, of which there are many, are not predicted."""
    of_the_data = [mode for mode in modes(context) if mode.seq_len is None]
    with_each = [with_knobs(context, mode, (name,)) for name in knobs_to_try(context) for mode in of_the_data]
    return [mode for mode in with_each if mode is not None]


def prediction_key(mode: Mode) -> str:
    """Return the key of a mode's prediction: compiled and eager modes share one, which is made for eager code."""
    return f"{replace(mode, compile=True)}, {mode.precision}"


@dataclass(frozen=True)
class FrontierProgress:
    """The frontier stage as far as the journal knows it when this is made; made anew for every question."""

    context: StageContext[Frontier]

    @property
    def stage(self) -> Frontier:
        return self.context.stage

    @property
    def smallest(self) -> int:
        return smallest_size(self.context)

    @property
    def study(self) -> Study:
        return self.context.study

    @cached_property
    def modes(self) -> list[Mode]:
        return modes(self.context)

    @cached_property
    def knobs(self) -> KnobSearch:
        return KnobSearch(self)

    # Probes

    def probes(self) -> list[Proposal]:
        proposals, unasked = list[Proposal](), NOTHING
        for mode in modes(self.context):
            points = [OperatingPoint(mode, size) for size in self.sizes(mode, unasked)]
            unasked += total(self._cost(point, self.stage.steps) for point in points if self.probe_of(point) is None)
            proposals += map(self.probe, points)
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
            if size in sizes or (self.probe_of(point) is None and self._left_out(point, spent)):
                continue
            sizes.append(size)
            spent += self._cost(point, self.stage.steps) if self.probe_of(point) is None else NOTHING
        return sizes

    def search(self, mode: Mode, unasked: Cost = NOTHING) -> tuple[list[int], SearchEnd | None]:
        """Return (the sizes that the search has asked for, how it ended).

        The second is None while the last probe has not ended, or if that ended for another reason than its size. The
        smallest size comes first, wherever the limit is: everything else is held against its memory and its speed.
        """
        trials, probes, sizes = list[Trial](), list[Probe](), [self.smallest]
        while True:
            trial = self.probe_of(OperatingPoint(mode, sizes[-1]))
            if trial is None or not trial.state.ended or says_nothing(trial):
                return sizes, None
            trials.append(trial)
            probes.append(self.outcome(trial))
            step = self._step(mode, trials, probes)
            if isinstance(step, SearchEnd):
                return sizes, step
            point = OperatingPoint(mode, step.micro_batch_size)
            if self.probe_of(point) is None and self._must_wait(mode):
                return sizes, None
            if self.probe_of(point) is None and (why := self._left_out(point, self.probed + unasked)):
                fits = max((one.micro_batch_size for one in probes if one.fits), default=None)
                evidence = f"{fits} fits; {step.micro_batch_size} was left out: {why}"
                return sizes, SearchEnd(fits, evidence, is_largest=fits is not None)
            sizes.append(step.micro_batch_size)

    def _step(self, mode: Mode, trials: list[Trial], probes: list[Probe]) -> Next | SearchEnd:
        predicted = self.predicted(mode)
        line = predicted.lines[-1] if predicted else None  # the one of large sizes, where the limit is
        # Both ends of what fits are looked at, in the first mode: what larger batches would gain in speed is worth knowing.
        largest = self.largest_of(trials, beyond_use=mode == modes(self.context)[0])
        return next_probe(probes, self.capacity_bytes(), line, smallest=self.smallest, largest=largest)

    def _left_out(self, point: OperatingPoint, spent: Cost) -> str:
        """Return why a point that the journal does not have is not to be probed; empty if it is.

        spent: what all probes before it take.
        """
        if plain := self._roomy(point.mode):
            return f"without checkpointing ({plain}) all sizes that a run can use fit, too"
        allowed = self.allowed.part(PROBES_SHARE)
        if len(self._rates) < 2:  # one size is no range: the second one may take any time
            allowed = replace(allowed, seconds=math.inf)
        excess = allowed.exceeded_by(spent + self._cost(point, self.stage.steps))
        return f"with it the probes would take {excess}" if excess else ""

    def over_budget(self, point: OperatingPoint) -> bool:
        """True if a point with knobs may not be probed."""
        return bool(self._left_out(point, self.probed))

    @cached_property
    def probed(self) -> Cost:
        """What all probes that the journal has take."""
        return total(cost_of(trial) for trial in self.trials() if trial.config.dynamic_micro_batch)

    @cached_property
    def allowed(self) -> Allowance:
        """What the stage may take."""
        return self._allowance(self.trials())

    def _allowance(self, trials: Iterable[Trial]) -> Allowance:
        rates = _rates(trials)
        return allowance(self.context, rate_of_batch(rates, self._baseline_size) if rates else None)

    @property
    def _baseline_size(self) -> int:
        """The micro-batch size that is the baseline's effective batch without accumulation."""
        return baseline_batch(self.context.config) // self.context.config.world_size

    @cached_property
    def _rates(self) -> dict[int, float]:
        return _rates(self.trials())

    def _cost(self, point: OperatingPoint, steps: int) -> Cost:
        """Return what a trial of the point is expected to take, of so many optimizer steps."""
        return self.cost(point.mode, self._split(point), steps)

    def cost(self, mode: Mode, split: Split, steps: int) -> Cost:
        """Return what so many optimizer steps of a split are expected to take, at the speed of what was probed."""
        in_mode = [one for one in self.trials() if one.config.activation_checkpointing == mode.activation_checkpointing]
        rates = _rates(in_mode) or self._rates
        samples = steps * split.effective_batch_size
        size = split.micro_batch_size
        return Cost(samples / size * seconds_at(rates, size) if rates else 0.0, samples)

    def _must_wait(self, mode: Mode) -> bool:
        """True if the search without checkpointing goes on: it may show that this mode has nothing to give."""
        plain = self._plain(mode)
        if plain is None:
            return False
        sizes, end = self.search(plain)
        last = self.probe_of(OperatingPoint(plain, sizes[-1]))
        return end is None and (last is None or not last.state.ended)

    def _roomy(self, mode: Mode) -> Mode | None:
        """Return the same mode without checkpointing, if that holds whatever a run can use; else None.

        Checkpointing saves memory, and costs time: there it has nothing to give.
        """
        plain = self._plain(mode)
        _, end = self.search(plain) if plain else ([], None)
        return plain if end is not None and not self.memory_binds(end) else None

    def memory_binds(self, end: SearchEnd) -> bool:
        """True if, where the search ended, a run could use a larger size, and it is memory that does not hold it."""
        return not end.is_largest and (end.micro_batch_size or 0) < self.most_usable

    def _plain(self, mode: Mode) -> Mode | None:
        """Return the same mode without checkpointing; None if that is this mode, or is not tried."""
        plain = replace(mode, activation_checkpointing="none")
        return plain if plain != mode and plain in modes(self.context) else None

    def probe_of(self, point: OperatingPoint) -> Trial | None:
        return self.study.trials.get(self.name(point))

    def outcome(self, trial: Trial) -> Probe:
        ran = trial.state is not TrialState.OUT_OF_MEMORY
        peak = trial.metric("peak_memory_bytes") if ran else None
        return Probe(trial.config.micro_batch_size, self.fits(trial), peak)

    def fits(self, trial: Trial) -> bool:
        """True if the trial ran, and left the headroom free."""
        capacity = self.capacity_bytes()
        return trial.state is TrialState.COMPLETE and (capacity is None or peak_of(trial) <= capacity)

    def largest_of(self, trials: list[Trial], *, beyond_use: bool = False) -> int:
        """Return the largest size to try.

        A step must not see a sample twice, nor take longer than max_step_seconds, a probe must not take the time of all others,
        and a micro-batch must not hold more tokens than the study file allows.

        beyond_use: whether to try sizes of which a full run has too few steps, too.
        """
        num_samples = self.study.facts.num_train_samples
        of_data = num_samples // self.context.config.world_size if num_samples else self.stage.largest
        of_use = self.stage.largest if beyond_use else self.most_usable_by(trials)
        return max(
            self.smallest,
            min(
                self.stage.largest,
                of_data,
                of_use,
                self.most_of_tokens(),
                self.slowest(trials),
                self.most_in_time(trials),
            ),
        )

    def most_of_tokens(self) -> int:
        """Return how many of the longest samples the study file's `micro_batch` holds."""
        micro_batch, longest = self.context.config.micro_batch, self.study.facts.longest_sample
        if micro_batch is None or micro_batch.tokens == "auto" or longest is None:
            return self.stage.largest
        return micro_batch.tokens // longest

    @cached_property
    def most_usable(self) -> int:
        """The largest size that a run can use at the best rate so far, held against the baseline's."""
        return self.most_usable_by(self.trials())

    def most_usable_by(self, trials: Iterable[Trial]) -> int:
        """Return the same by these trials alone."""
        rates = _rates(trials)
        if not rates:
            return self.stage.largest
        usable = largest_usable(self.context, max(rates.values()) / rate_of_batch(rates, self._baseline_size))
        return self.stage.largest if usable is None else max(1, usable // self.context.config.world_size)

    def most_in_time(self, trials: list[Trial]) -> int:
        """Return the largest size whose probe should take no more than half of the time that these have left to the probes;
        twice the smallest at least."""
        left = self._allowance(trials).part(PROBES_SHARE).seconds - total(map(cost_of, trials)).seconds
        rates, smallest = _rates(trials), self.smallest
        if not rates or math.isinf(left):
            return self.stage.largest
        most = left / 2 / (self.stage.steps * ACCUMULATED * self.context.config.world_size)
        sizes = range(2 * smallest, max(2 * smallest, self.stage.largest) + 1)
        return max(2 * smallest, sizes[0] + bisect_right(sizes, most, key=lambda size: seconds_at(rates, size)) - 1)

    def slowest(self, trials: list[Trial]) -> int:
        """Return the size whose step would take max_step_seconds at the best rate so far."""
        seconds = self._seconds_per_size(trials)
        return int(self.stage.max_step_seconds / seconds) if seconds else self.stage.largest

    def _seconds_per_size(self, trials: list[Trial]) -> float | None:
        """Return the time of a step, for every sample of its micro-batch, at the best rate so far; None before one is known."""
        timed = [(trial.metric("step_seconds"), trial.config.micro_batch_size) for trial in trials]
        return min((seconds / size for seconds, size in timed if seconds), default=None)

    def probe(self, point: OperatingPoint) -> Proposal:
        name = self.name(point)
        if name in self.study.trials:
            return self.study.trials[name].proposal
        config = self.context.short_trial(
            self._split(point),
            point.mode,
            self.stage.steps,
            dynamic_micro_batch=True,
            gpu_timing_seconds=GPU_PROBE_SECONDS,
            longest_samples=True,
            evaluation_samples=self.context.split(point.micro_batch_size).effective_batch_size,
        )
        return Proposal(name, "frontier", config, candidate=name, expected=self._expected(point))

    def _expected(self, point: OperatingPoint) -> dict[str, float]:
        predicted = self.predicted(point.mode)
        return {"predicted_memory_bytes": predicted.bytes_at(point.micro_batch_size)} if predicted else {}

    def predicted(self, mode: Mode) -> PeakMemory | None:
        """Return the peak memory that fake tensors predict for the mode in eager code; None if they could not follow
        it."""
        return (self.study.facts.predicted_memory or {}).get(prediction_key(mode))

    def fitting(self, seq_len: int | None = None) -> dict[OperatingPoint, Trial]:
        """Return the probes that fit, with samples of this length, in the order of the study file's modes; last those with knobs
        that the study may go on with."""
        return self.without_knobs(seq_len) | ({} if seq_len else self.knobs.eligible())

    def usable(self, fitting: Mapping[OperatingPoint, Trial]) -> dict[OperatingPoint, Trial]:
        """Return those of which a full run has enough steps, and the smallest."""
        smallest = min((point.micro_batch_size for point in fitting), default=0)
        return {
            point: trial
            for point, trial in fitting.items()
            if point.micro_batch_size == smallest or self._is_usable(point.micro_batch_size)
        }

    def _is_usable(self, size: int) -> bool:
        if not num_full_runs(self.context.config, self.study) or not self._rates:
            return True
        speedup = rate_at(self._rates, size) / rate_of_batch(self._rates, self._baseline_size)
        return too_short(self.context.config, size * self.context.config.world_size, speedup) is None

    def without_knobs(self, seq_len: int | None = None) -> dict[OperatingPoint, Trial]:
        """Return the same without any knob that is tried."""
        wanted = [mode for mode in modes(self.context) if mode.seq_len == seq_len]
        points = [OperatingPoint(mode, size) for mode in wanted for size in self.sizes(mode)]
        return {point: trial for point in points if (trial := self.probe_of(point)) and self.fits(trial)}

    # Timings

    def timings(self) -> list[Proposal]:
        """Return a trial of every finalist in every round, round by round; none if there is only one finalist."""
        rounds = range(1, self.num_rounds + 1)
        return [self._static(point, f"round{n}", round=n) for n in rounds for point in self._in_order(n)]

    def _in_order(self, number: int) -> list[OperatingPoint]:
        return in_turn(self._in_round(number), number, self.context.num_lanes)

    def _in_round(self, number: int) -> list[OperatingPoint]:
        """Return the finalists of a round, without those that did not run in one before: they would compile in vain again."""
        earlier = {point: [self.timing_of(point, before) for before in range(1, number)] for point in self.finalists}
        return [point for point, trials in earlier.items() if not any(map(_ended_without_a_rate, trials))]

    @cached_property
    def finalists(self) -> list[OperatingPoint]:
        """The fastest probes that fit and are of use, and the variants of the fastest of all: as many of them as may be timed."""
        usable = self.usable(self.fitting())
        points = sorted(usable, key=lambda point: -rate_of(usable[point]))[: self.stage.finalists]
        points[2:2] = [variant.of(points[0]) for variant in variants(self.context) if points]
        while len(points) > 1 and not self._affordable(points, self.stage.rounds):
            points.pop()
        return points

    @cached_property
    def num_rounds(self) -> int:
        """How many rounds to time by now: one more until they tell who is the fastest, or there may be no more."""
        if len(self.finalists) < 2:
            return 0
        return rounds_wanted(self.stage.rounds, self.stage.max_rounds, self._suffice)

    def _suffice(self, num_rounds: int) -> bool:
        """True if so many rounds tell who is the fastest, have not ended yet, or may not be followed by another. Only those that
        nothing disturbed count as max_rounds."""
        last = [self.timing_of(point, num_rounds) for point in self._in_round(num_rounds)]
        timed = self._timed_in(num_rounds)
        if timed is None or not all(trial is not None and trial.state.ended for trial in last):
            return True
        wanted = self.stage.rounds + (MORE_ROUNDS if self.fallen else 0)
        clear = timed.is_clear() and timed.num_quiet_rounds >= wanted
        return (
            clear
            or timed.num_quiet_rounds >= self.stage.max_rounds
            or not self._affordable(self.finalists, num_rounds + 1)
        )

    def _affordable(self, finalists: list[OperatingPoint], num_rounds: int) -> bool:
        """True if the stage may take so many rounds beside the probes and the verifications."""
        costs = [self._cost(point, TIMED_STEPS) for point in finalists]
        edges = set(self._edges_of(self.fitting())) - set(finalists) if self._trains() else set()
        longest = max(costs, key=lambda cost: cost.samples)
        verifications = longest + total(self._cost(point, TIMED_STEPS) for point in edges)
        checks = total(cost_of(trial) for trial in self.trials() if trial.proposal.control)
        return self.allowed.holds(self.probed + checks + verifications + num_rounds * total(costs))

    def timing_of(self, point: OperatingPoint, number: int) -> Trial | None:
        return self.study.trials.get(self.name(point, f"round{number}"))

    @cached_property
    def timed(self) -> Timings[OperatingPoint] | None:
        """The rates of the finalists that ran in every round so far; None where fewer than two did."""
        return self._timed_in(self.num_rounds)

    def _timed_in(self, num_rounds: int) -> Timings[OperatingPoint] | None:
        rates = dict[OperatingPoint, dict[int, float]]()
        for point in self.finalists:
            trials = {number: self.timing_of(point, number) for number in range(1, num_rounds + 1)}
            ran = {n: trial for n, trial in trials.items() if trial and trial.state is TrialState.COMPLETE}
            done = {n: rate_of(trial) * slowness(trial, self._stragglers) for n, trial in ran.items()}
            if len(done) == num_rounds and all(done.values()):
                rates[point] = done
        return Timings(rates, disturbed_rounds(self.context)) if num_rounds and len(rates) > 1 else None

    @cached_property
    def _stragglers(self) -> Mapping[Place, Straggler]:
        return stragglers(self.trials())

    # Verification

    def verifications(self) -> list[Proposal]:
        """Return trials in a fresh process: of the best point, and of the largest that are to be trained. Where one does
        not fit there, the next one follows."""
        edges = self._edges_of(self.standing()) if self._trains() else []
        points = [*self._until_one_fits(), *map(self.as_trained, edges)]
        return [
            self._static(point, "verified", role="once more, in a fresh process", fresh_process=True)
            for point in dict.fromkeys(points)
        ]

    def _until_one_fits(self) -> list[OperatingPoint]:
        points = self.by_preference()
        waited_for = next((place for place, point in enumerate(points) if not self.is_refuted(point)), len(points))
        return points[: waited_for + 1]

    def as_trained(self, point: OperatingPoint) -> OperatingPoint:
        """Return the point in the variant that the best one is, which later stages take for all sizes."""
        return point if self._taken is None else self._taken.of(point)

    @cached_property
    def _taken(self) -> Variant | None:
        best = self._until_one_fits()[-1:]
        return self.variant_of(best[0]) if best else None

    def variant_of(self, point: OperatingPoint) -> Variant | None:
        """Return the variant that a finalist is; None of one that was probed."""
        probed = self.fitting()
        found = (one for one in variants(self.context) for other in probed if one.of(other) == point)
        return None if point in probed else next(found, None)

    def _trains(self) -> bool:
        """True if a later stage trains other sizes than the chosen one."""
        return self.context.config.keys_of(Train) is not None

    def _edges_of(self, probes: dict[OperatingPoint, Trial]) -> list[OperatingPoint]:
        """Return each mode's largest size of those at which it is the fastest and that a run can use: that is how they are
        trained.

        Where the largest size fits the mode's smaller ones do, too, so they are not run in a process of their own.
        """
        usable = self.usable(probes)
        by_rate = sorted(usable, key=lambda point: rate_of(usable[point]))
        fastest = {point.micro_batch_size: point for point in by_rate}
        return list({fastest[size].mode: fastest[size] for size in sorted(fastest)}.values())

    def standing(self) -> dict[OperatingPoint, Trial]:
        """Return the probes that fit, without those that did not do so again in a fresh process."""
        fell = {point for point in self.fitting() if self.is_refuted(point) or self.is_refuted(self.as_trained(point))}
        return {point: trial for point, trial in self.fitting().items() if point not in fell}

    def is_refuted(self, point: OperatingPoint) -> bool:
        trial = self.verification_of(point)
        return trial is not None and trial.state.ended and not self.fits(trial)

    def verification_of(self, point: OperatingPoint) -> Trial | None:
        return self.study.trials.get(self.name(point, "verified"))

    def left_out(self, mode: Mode) -> list[int]:
        """Return the sizes below the largest of a mode that were not probed, for their time or samples."""
        sizes, end = self.sizes(mode), self.search(mode)[1]
        if end is None or end.micro_batch_size is None or self._roomy(mode):
            return []
        return [size for size in self._usable_ladder(end.micro_batch_size) if size not in sizes]

    def _usable_ladder(self, largest: int) -> list[int]:
        return [size for size in ladder(self.smallest, largest) if size <= self.most_usable]

    def verified(self) -> OperatingPoint | None:
        """Return the best point that fitted in a fresh process; None if none has."""
        verifications = {point: self.verification_of(point) for point in self.by_preference()}
        return next((point for point, trial in verifications.items() if trial and self.fits(trial)), None)

    def may_be_chosen(self, point: OperatingPoint) -> bool:
        """True if nothing has shown that the point does not fit."""
        verification = self.verification_of(point)
        fitted = verification is None or not verification.state.ended or self.fits(verification)
        return fitted and self.most_memory(point) <= (self.capacity_bytes() or math.inf)

    @cached_property
    def fallen(self) -> list[Trial]:
        """The verifications that were much slower than the same point's probe: something else had the machine."""
        pairs = [(probe, self.verification_of(point)) for point, probe in self.fitting().items()]
        return [one for probe, one in pairs if one and 0 < rate_of(one) * DISAGREEMENT < rate_of(probe)]

    def by_preference(self) -> list[OperatingPoint]:
        """Return the points to verify, the best first.

        These are the finalists that fitted in every round: first those that tie for the fastest, the one with the least
        memory leading, then the others by speed. All other points that fit follow, in case no finalist is verified, those last
        that a full run cannot use.
        """
        fitting = self.fitting()
        usable, others = self.usable(fitting), [point for point in fitting if point not in self.finalists]
        return self._ranked_finalists() + sorted(
            others, key=lambda point: (point not in usable, -rate_of(fitting[point]))
        )

    def _ranked_finalists(self) -> list[OperatingPoint]:
        capacity, rates = self.capacity_bytes() or math.inf, self.timed.rates if self.timed else {}
        held = {point: rounds for point, rounds in rates.items() if self.most_memory(point) <= capacity}
        if not held:
            return [] if self.num_rounds else self.finalists
        timed = Timings(held, disturbed_rounds(self.context))
        tied = sorted(timed.tied(), key=self.most_memory)
        return tied + [point for point in timed.fastest_first() if point not in tied]

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

    def trials_of(self, point: OperatingPoint) -> list[Trial]:
        """Return the point's probe, timings and verification, as far as there are any."""
        timings = [self.timing_of(point, number) for number in range(1, self.num_rounds + 1)]
        trials = [self.probe_of(point), *timings, self.verification_of(point)]
        return [trial for trial in trials if trial is not None]

    # What all of them share

    def _split(self, point: OperatingPoint) -> Split:
        return self.context.split(point.micro_batch_size, ACCUMULATED)

    def _static(
        self, point: OperatingPoint, what: str, *, role: str = "", fresh_process: bool = False, round: int | None = None
    ) -> Proposal:
        """Return a trial that is compiled for this size alone, as training will be.

        A timing uses ordinary samples, and a verification the longest ones.
        """
        name = self.name(point, what)
        if name in self.study.trials:
            return self.study.trials[name].proposal
        config = self.context.short_trial(
            self._split(point),
            point.mode,
            TIMED_STEPS,
            gpu_timing_seconds=GPU_TIMING_SECONDS,
            longest_samples=fresh_process,
            evaluation_samples=self.context.split(point.micro_batch_size).effective_batch_size,
        )
        return Proposal(
            name,
            "frontier",
            config,
            candidate=name,
            role=role,
            fresh_process=fresh_process,
            round=round,
            expected=self._expected(point),
        )

    def name(self, point: OperatingPoint, what: str = "") -> str:
        several = f"-{point.mode.precision}" if len(self.stage.precision) > 1 else ""
        return f"frontier-{point.mode}{several}-m{point.micro_batch_size}" + (f"-{what}" if what else "")

    def all_ended(self, proposals: list[Proposal]) -> bool:
        return all(p.id in self.study.trials and self.study.trials[p.id].state.ended for p in proposals)

    def limit_bytes(self) -> int | None:
        """Return the limit of study file or host, or the GPU's memory as the ranks read it; None until one has."""
        read = [bytes for t in self.trials() if (bytes := t.metric("device_memory_bytes")) is not None]
        return self.context.limit_bytes() or (int(min(read)) if read else None)

    def capacity_bytes(self) -> float | None:
        """Return the limit less the headroom; None if no limit is known."""
        limit = self.limit_bytes()
        return None if limit is None else limit * (1 - self.context.config.headroom)

    def trials(self) -> list[Trial]:
        return self.context.trials()


def _rates(trials: Iterable[Trial]) -> dict[int, float]:
    """Return the most samples/s, over all ranks, that a micro-batch size reached in any mode."""
    return fastest_by_size((trial.config.micro_batch_size, samples_per_second(trial)) for trial in trials)


def _ended_without_a_rate(trial: Trial | None) -> bool:
    return trial is not None and trial.state.ended and trial.state is not TrialState.COMPLETE
