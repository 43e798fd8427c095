"""The throughput stage's trials: every form of every effective batch, in rounds."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import cached_property

from batchscout.orchestrator.config.stages import Throughput
from batchscout.orchestrator.config.trial import baseline_batch
from batchscout.orchestrator.stages.chosen import chosen_mode, chosen_split
from batchscout.orchestrator.stages.context import StageContext
from batchscout.orchestrator.stages.estimates.node_speeds import rates_by_round, stragglers
from batchscout.orchestrator.stages.estimates.timing import (
    GPU_TIMING_SECONDS,
    MARGIN,
    Ratio,
    Timings,
    in_turn,
    rounds_wanted,
)
from batchscout.orchestrator.stages.findings import found
from batchscout.orchestrator.stages.forms import Form, forms
from batchscout.orchestrator.stages.frontier.findings import FrontierFindings
from batchscout.orchestrator.stages.probing import (
    Allowance,
    Cost,
    allowance,
    cost_of,
    disturbed_rounds,
    samples_per_second,
    total,
)
from batchscout.orchestrator.stages.short_runs import short_run
from batchscout.orchestrator.stages.throughput.batches import Batches, batches, named
from batchscout.orchestrator.study.trial import Proposal, Trial, TrialState

# The first steps of a trial are not timed.
UNTIMED_STEPS = 3
# A trial times so many micro-batches, and at least two steps.
TIMED_MICRO_BATCHES = 5


def propose(context: StageContext[Throughput]) -> list[Proposal]:
    """Return the trials of all rounds so far; the same journal always gives the same ones."""
    return ThroughputProgress(context).proposals()


@dataclass(frozen=True)
class ThroughputProgress:
    """The stage as far as the journal knows it when this is made; made anew for every question."""

    context: StageContext[Throughput]

    def proposals(self) -> list[Proposal]:
        rounds = range(1, self.num_rounds + 1)
        lanes = self.context.num_lanes
        return [self._timing(form, number) for number in rounds for form in in_turn(self.forms, number, lanes)]

    @cached_property
    def batches(self) -> Batches:
        """The effective batches that are timed: as many as the stage may take `rounds` rounds of. The baseline and the chosen
        one are, and where it is the time that is short the smallest and the largest, too."""
        wanted = batches(self.context)
        if self.allowed.holds(self._cost(wanted.forms)):
            return wanted
        forms = {batch: some[:1] for batch, some in wanted.forms.items()}
        needed = {baseline_batch(self.context.config), chosen_split(self.context).effective_batch_size}
        dropped = self._drop(forms, needed | {min(forms), max(forms)}, replace(self.allowed, samples=None))
        dropped += self._drop(forms, needed, replace(self.allowed, seconds=math.inf))
        why = f"left out: {self.context.stage.rounds} rounds with all of them take {self.allowed.exceeded_by(self._cost(wanted.forms))}"
        notes = [f"{named(dropped)} {why}"] if dropped else []
        return Batches(forms, (*wanted.left_out, *notes))

    def _drop(self, forms: dict[int, list[Form]], needed: set[int], allowed: Allowance) -> list[int]:
        """Take batches out of the forms, the one that takes longest first, until the rounds are allowed; return them."""
        dropped = list[int]()
        costs = {batch: self._cost({batch: forms[batch]}) for batch in forms.keys() - needed}
        optional = sorted(costs, key=lambda batch: (costs[batch].seconds, costs[batch].samples))
        while optional and not allowed.holds(self._cost(forms)):
            dropped.append(optional.pop())
            del forms[dropped[-1]]
        return dropped

    @cached_property
    def allowed(self) -> Allowance:
        """What the stage may take; any time where no rate is known yet."""
        baseline, frontier = baseline_batch(self.context.config), found(self.context.study, FrontierFindings)
        fastest = forms(frontier, baseline, self.context.config.world_size)[:1] if frontier else []
        return allowance(self.context, fastest[0].predicted if fastest else None)

    @cached_property
    def forms(self) -> list[Form]:
        return [form for some in self.batches.forms.values() for form in some]

    def _cost(self, forms: dict[int, list[Form]]) -> Cost:
        """Return what the fewest rounds take, without what measuring the noise scale takes."""
        all_forms = [form for some in forms.values() for form in some]
        return self.context.stage.rounds * total(_cost(form, _timed_steps(form)) for form in all_forms)

    @cached_property
    def _measures_noise(self) -> bool:
        """True if the stage may take the steps that measure the noise scale, too."""
        more = total(_cost(form, self._noise_steps(form) - _timed_steps(form)) for form in self.forms)
        return self.allowed.holds(self._cost(self.batches.forms) + more)

    def _noise_steps(self, form: Form) -> int:
        """Return the optimizer steps of a timing that measures the noise scale, which takes several micro-batches a
        step. None does where they are cut by tokens."""
        measures = self.context.config.statistics and self.context.config.micro_batch is None
        if form.split.num_micro_batches == 1 or not measures:
            return _timed_steps(form)
        return max(_timed_steps(form), math.ceil(2 * self.context.stage.steps / form.split.num_micro_batches))

    @cached_property
    def num_rounds(self) -> int:
        stage = self.context.stage
        return rounds_wanted(stage.rounds, stage.max_rounds, self._suffice, self._has_begun) if self.forms else 0

    def _has_begun(self, number: int) -> bool:
        return any(self.trial_of(form, number) is not None for form in self.forms)

    def _suffice(self, num_rounds: int) -> bool:
        """True if so many rounds tell the rates, have not ended yet, or may not be followed by another. Only those that nothing
        disturbed count as max_rounds."""
        last = [self.trial_of(form, num_rounds) for form in self.forms]
        timed = self._timed_in(num_rounds)
        if timed is None or not all(trial is not None and trial.state.ended for trial in last):
            return True
        sure = timed.num_quiet_rounds >= self.context.stage.rounds and self._is_clear(timed)
        sure = sure or timed.num_quiet_rounds >= self.context.stage.max_rounds
        another = total(_cost(form, _timed_steps(form)) for form in self.forms)
        return sure or not self.allowed.holds(total(map(cost_of, self.context.trials())) + another)

    def _is_clear(self, timed: Timings[Form]) -> bool:
        """True if every rate is known well enough to say how many samples a run has in some time, and of every batch
        which form is the fastest."""
        intervals = [timed.interval(form) for form in timed.rates]
        known = all(interval is None or interval[1] <= interval[0] * (1 + MARGIN) ** 2 for interval in intervals)
        ran = [[form for form in some if form in timed.rates] for some in self.batches.forms.values()]
        return known and all(timed.is_clear(some) for some in ran if some)

    @cached_property
    def timed(self) -> Timings[Form] | None:
        """The samples/s of the forms that ran in every round so far; None where none did."""
        return self._timed_in(self.num_rounds)

    def _timed_in(self, num_rounds: int) -> Timings[Form] | None:
        slow = stragglers(self.context.trials())
        rates = rates_by_round(self.forms, num_rounds, self.trial_of, samples_per_second, slow)
        return Timings(rates, disturbed_rounds(self.context)) if rates and num_rounds else None

    def fastest_form(self, timed: Timings[Form], batch: int) -> Form | None:
        """Return the form to keep of a batch: of those that may be the fastest, the study file's own, or the one in the fewest micro-batches.
        None if none of them ran."""
        ran = [form for form in self.batches.forms[batch] if form in timed.rates]
        if not ran:
            return None
        fastest, *others = timed.fastest_first(ran)
        alike = [fastest, *(one for one in others if _may_be_as_fast(timed.ratio(one, fastest, num_compared=2)))]
        own = self.context.given_split()
        return min(alike, key=lambda form: (form.split != own, form.split.num_micro_batches))

    def trial_of(self, form: Form, number: int) -> Trial | None:
        return self.context.study.trials.get(self._run(form, number)[0])

    def first_round(self) -> list[Trial]:
        """Return the trials that measured the noise scale, and completed."""
        trials = [self.trial_of(form, 1) for form in self.forms]
        return [trial for trial in trials if trial is not None and trial.state is TrialState.COMPLETE]

    def _timing(self, form: Form, number: int) -> Proposal:
        name, rate = self._run(form, number)
        if name in self.context.study.trials:
            return self.context.study.trials[name].proposal
        steps = self._noise_steps(form) if number == 1 and self._measures_noise else _timed_steps(form)
        config = self.context.short_trial(
            form.split, form.mode, steps, gpu_timing_seconds=GPU_TIMING_SECONDS, learning_rate=rate
        )
        return Proposal(name, "throughput", config, candidate=name, round=number)

    def _run(self, form: Form, number: int) -> tuple[str, float]:
        """Return (the id, the learning rate) of a form's trial in a round."""
        mode = "" if form.mode == chosen_mode(self.context.study) else f"-{form.mode}"
        return short_run(self.context, f"throughput-{form.split}{mode}-round{number}", form.split)


def _may_be_as_fast(ratio: Ratio) -> bool:
    return ratio.order != "slower" and ratio.point >= 1 - MARGIN


def _timed_steps(form: Form) -> int:
    return UNTIMED_STEPS + max(2, math.ceil(TIMED_MICRO_BATCHES / form.split.gradient_accumulation_steps))


def _cost(form: Form, steps: int) -> Cost:
    """Return what so many steps of a form are expected to take; of one without a predicted rate the samples alone are known."""
    samples = steps * form.split.effective_batch_size
    return Cost(samples / form.predicted if form.predicted else 0.0, samples)
