"""Short runs, which measure memory, speed or rounding and not how well anything trains. What they measure hardly depends on the learning
rate, so one that diverges is made again at a lower one, as are those after it. Pure."""

from __future__ import annotations

import math

from batchscout.orchestrator.config.mode import mode_of
from batchscout.orchestrator.config.stages import StageKeys
from batchscout.orchestrator.stages.context import StageContext
from batchscout.orchestrator.stages.no_answer import NOT_THE_RATE
from batchscout.orchestrator.study.causes import Cause
from batchscout.orchestrator.study.trial import Trial
from batchscout.orchestrator.units import counted
from batchscout.trainers.config import Split

LOWERED_BY = 64
"""A run of a few steps need not train well, but must end, so its learning rate is divided by a large factor."""
MOST_LOWERED = 3
"""The most divisions: where a run still diverges at 4e-6 of the rate, the rate is not the cause."""


def short_run(context: StageContext[StageKeys], name: str, split: Split) -> tuple[str, float]:
    """Return (the id, the learning rate) of the short run of a split that has this name: what has run, or what is to run next.

    Once a run has diverged at the lowest rate it stays the one.
    """
    trials = context.study.trials
    if name in trials and trials[name].cause is not Cause.DIVERGED:
        return name, trials[name].config.learning_rate
    rule = context.rule_rate(split.effective_batch_size)
    rates = [rule / LOWERED_BY**times for times in range(MOST_LOWERED + 1)]
    ids = [short_id(context, name, split, rate) for rate in rates]
    ran = (times for times, one in enumerate(ids) if one in trials and trials[one].cause is not Cause.DIVERGED)
    times = next(ran, _num_lowered(context))
    return ids[times], rates[times]


def short_id(context: StageContext[StageKeys], name: str, split: Split, learning_rate: float) -> str:
    rule = context.rule_rate(split.effective_batch_size)
    return name if math.isclose(learning_rate, rule) else f"{name}-lr{learning_rate:.3g}"


def _num_lowered(context: StageContext[StageKeys]) -> int:
    """Return how many times the learning rate of short runs has been lowered by now."""
    diverged = [one.config for one in diverged_short_runs(context)]
    shares = [context.rule_rate(one.effective_batch_size) / one.learning_rate for one in diverged]
    return min(round(math.log(max(shares) * LOWERED_BY, LOWERED_BY)), MOST_LOWERED) if shares else 0


def diverged_short_runs(context: StageContext[StageKeys]) -> list[Trial]:
    """Return those that diverged, in any stage. A control may train for long, and at another precision."""
    return [
        trial
        for trial in context.study.trials.values()
        if trial.cause is Cause.DIVERGED and not trial.config.evaluations and not trial.proposal.control
    ]


def made_again(context: StageContext[StageKeys], trial: Trial) -> bool:
    """True of a short run that diverged, and was made again at a lower learning rate."""
    return trial.cause is Cause.DIVERGED and any(
        other.config.learning_rate < trial.config.learning_rate
        and other.proposal.round == trial.proposal.round
        and other.config.split == trial.config.split
        and mode_of(other.config) == mode_of(trial.config)
        for other in context.trials()
    )


def lowered(context: StageContext[StageKeys]) -> int:
    """Return by what factor the learning rate of the stage's short runs was lowered at most; 1 where it was not."""
    ran = [one.config for one in context.trials() if not one.config.evaluations and not one.proposal.control]
    return round(max((context.rule_rate(one.effective_batch_size) / one.learning_rate for one in ran), default=1.0))


def notes_on_divergence(context: StageContext[StageKeys]) -> list[str]:
    """Return, of a stage with short runs, that some diverged and were made again, or that it began with the rate at which those of the
    stages before did not."""
    if lowered(context) == 1:
        return []
    number = sum(made_again(context, one) for one in context.trials())
    were = "was" if number == 1 else "were"
    why = f"{counted(number, 'short run')} diverged, and {were} made again" if number else "the short runs were made"
    lowest = f"1/{lowered(context):,} of the study's at the lowest"
    before = "" if number else ", as those of the stages before diverged"
    return [f"{why} at a lower learning rate, {lowest}{before}: what they measure hardly depends on it"]


def why_they_diverge(context: StageContext[StageKeys]) -> str | None:
    """Return the stage's last short run that diverged at the lowest learning rate, too, with the remedy; None where none did."""
    diverged = [one for one in diverged_short_runs(context) if one.stage == context.stage.type]
    last = next((one for one in reversed(diverged) if not made_again(context, one)), None)
    if last is None:
        return None
    return (
        f"{last.id}: {last.explanation}, at learning rates from {context.rule_rate(last.config.effective_batch_size):.3g} down to "
        f"{last.config.learning_rate:.3g}: {NOT_THE_RATE}"
    )
