"""The candidates of the train stage, and what each may train on. Pure."""

from __future__ import annotations

import math
from dataclasses import dataclass

from batchscout.orchestrator.config.stages import Train
from batchscout.orchestrator.config.trial import baseline_batch
from batchscout.orchestrator.stages.candidates import Candidate
from batchscout.orchestrator.stages.chosen import chosen_mode
from batchscout.orchestrator.stages.context import StageContext
from batchscout.orchestrator.stages.rates import Rate, rates
from batchscout.orchestrator.stages.too_short import TooShort, in_words, too_short


@dataclass(frozen=True)
class Lineup:
    """Who takes part in the train stage."""

    candidates: tuple[Candidate, ...]
    """One for every effective batch, the smallest first; one of them is the baseline."""
    seconds: float | None
    """The training time that each may take; None where no rate is known, or all train on the same samples."""
    left_out: tuple[str, ...]
    """Why batches with a known rate are no candidates, each with its numbers."""

    @property
    def baseline(self) -> Candidate:
        return next(one for one in self.candidates if one.protected)


def lineup_of(context: StageContext[Train]) -> Lineup:
    """Return every effective batch whose rate is known, in its fastest form; the study file's batch if none is."""
    known = rates(context)
    if not known:
        given = context.given_split()
        budget = context.config.sample_budget
        alone = Candidate("", given, chosen_mode(context.study), budget, protected=True)
        return Lineup((alone,), None, ())
    own = baseline_batch(context.config)  # or the nearest to it in proportion
    baseline = min(known, key=lambda rate: abs(math.log(rate.effective_batch_size / own)))
    budget = context.config.sample_budget
    seconds = None if context.config.objective == "samples" else budget / baseline.samples_per_second
    candidates = tuple(_candidate(context, rate, seconds, baseline, known) for rate in known)
    short = dict[Candidate, TooShort]()
    for one, rate in zip(candidates, known, strict=True):
        speedup = rate.samples_per_second / baseline.samples_per_second
        found = too_short(context.config, rate.effective_batch_size, speedup)
        if found and not one.protected:
            short[one] = found
    large_enough = tuple(one for one in candidates if one not in short)
    return Lineup(large_enough, seconds, (f"left out: {in_words([*short.values()])}",) if short else ())


def _candidate(
    context: StageContext[Train], rate: Rate, seconds: float | None, baseline: Rate, known: tuple[Rate, ...]
) -> Candidate:
    batch, budget = rate.effective_batch_size, context.config.sample_budget
    if seconds is not None and rate is not baseline:
        budget = max(1, round(seconds * rate.samples_per_second / batch)) * batch
    split = context.split(rate.micro_batch_size, rate.gradient_accumulation_steps)
    is_fastest = rate is max(known, key=lambda one: one.samples_per_second)
    return Candidate(
        "most samples/s" if is_fastest else "",
        split,
        rate.mode,
        budget,
        rate.samples_per_second,
        protected=rate is baseline,
    )
