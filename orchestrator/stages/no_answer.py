"""Runs that tell nothing about what to train with, since nothing trains: what was tried, and what to change. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from batchscout.orchestrator.stages.estimates.ranking import by_candidate, standings
from batchscout.orchestrator.study.causes import Cause
from batchscout.orchestrator.study.trial import Trial, TrialState
from batchscout.orchestrator.units import counted

LOWERED_BY = 4
"""As long as every run diverges, the next one has its learning rate divided by this."""
MOST_LOWERED = 8
"""The most divisions: where a run still diverges at 1e-5 of the rate, the rate is not the cause."""
NOT_THE_RATE = (
    "the rate is hardly the cause: look at the loss (a sum where a mean is meant, a logarithm of 0), at the scale of the data and at the "
    "precision"
)
SAME_LOSS = 1e-6
"""Losses that are this close, as a share of themselves, are the same: not even rounding tells them apart."""


def all_diverged(trials: Sequence[Trial]) -> bool:
    """True if runs diverged, none completed, and none is still to end."""
    return (
        all(trial.state.ended for trial in trials)
        and any(trial.cause is Cause.DIVERGED for trial in trials)
        and not any(trial.state is TrialState.COMPLETE for trial in trials)
    )


def why_none(trials: Sequence[Trial]) -> str | None:
    """Return why the runs of a stage that has ended tell nothing, with the remedy; None where one of them does."""
    if ranking := standings(trials):
        return _why_nothing_is_learned([trial for one in ranking for trial in one.trials])
    if not trials:
        return "undetermined: nothing was run"
    if all_diverged(trials):
        lost = [one for one in trials if one.state in (TrialState.FAILED, TrialState.OUT_OF_MEMORY)]
        first = f"; mend first what ended {lost[0].id} ({lost[0].how_it_ended})" if lost else ""
        return (
            f"nothing trains: {_tried(trials)}{first}, and all {'others ' if lost else ''}that ended by themselves diverged. If a run at the lowest "
            f"rate was among them, {NOT_THE_RATE}; else lower optimizer.lr further"
        )
    return f"undetermined: {_tried(trials)}, and none finished with every seed; see the trials' reasons"


def _tried(trials: Sequence[Trial]) -> str:
    rates = [trial.config.learning_rate for trial in trials]
    low, high = f"{min(rates):.3g}", f"{max(rates):.3g}"
    at = f"learning rate {low}" if low == high else f"learning rates from {low} to {high}"
    return f"{counted(len(by_candidate(trials)), 'run')} at {at}"


def _why_nothing_is_learned(complete: Sequence[Trial]) -> str | None:
    """Return that every run ended at the loss at which it began, whatever its batch and learning rate; None where not."""
    losses = [loss for trial in complete for loss in _losses(trial)]
    if len(losses) < 2 or max(losses) - min(losses) > SAME_LOSS * max(map(abs, losses)):
        return None
    return (
        f"nothing is learned: in {_tried(complete)} the validation loss is {losses[0]:.4g} from the first evaluation to the last. Check whether "
        "the loss depends on the model's parameters, whether those are the ones that train (requires_grad), whether the validation "
        "data have targets, and whether optimizer.lr is far too low"
    )


def _losses(trial: Trial) -> list[float]:
    """Return the validation loss of every evaluation, the last of which is the trial's own; that one alone where none is known."""
    known = [loss for point in trial.history if (loss := point.get("val_loss")) is not None]
    return known or [trial.measured("val_loss")]
