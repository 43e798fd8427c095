"""What becomes of a study's trials once what they were made of has changed: pure. What failed is tried again; what ended stands only
if the user says so."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from batchscout.orchestrator.study.causes import Cause
from batchscout.orchestrator.study.events import Reopened, Retried
from batchscout.orchestrator.study.state import Study
from batchscout.orchestrator.study.trial import Trial, TrialState
from batchscout.trainers.errors import first_of

MOST_NAMED = 3


def failed_trials(study: Study) -> list[Trial]:
    """Return the trials that say nothing but that something is wrong, in the order proposed: those that failed, and those that were
    not started because of them."""
    return [one for one in study.trials.values() if one.state is TrialState.FAILED or one.cause is Cause.STOPPED]


def tried_again(study: Study) -> list[Trial]:
    """Return the trials to try again: those that failed, and all of a stage that has no result though none of its own did."""
    failed = failed_trials(study)
    without_result = {name for name, conclusion in study.conclusions.items() if not conclusion.ok}
    without_result -= {trial.stage for trial in failed}
    return failed + [t for t in study.trials.values() if t.stage in without_result and t.state.ended]


def events_of(study: Study, trials: Sequence[Trial], why: str) -> list[Retried | Reopened]:
    """Return what the journal must hold so that these trials are tried again, and the first stage that this may change is asked again,
    with those after it. why: a sentence."""
    in_doubt = {trial.stage for trial in trials}
    in_doubt |= {name for name, conclusion in study.conclusions.items() if not conclusion.ok}
    first = [name for name in study.started if name in in_doubt and name in study.conclusions][:1]
    return [*(Retried(id=trial.id, reason=why) for trial in trials), *(Reopened(stage=name) for name in first)]


def changed_names(before: Mapping[str, str] | None, now: Mapping[str, str]) -> list[str]:
    """Return the names of what has another digest now; none where nobody knows how it was."""
    if before is None:
        return []
    return [name for name in sorted({**before, **now}) if before.get(name) != now.get(name)]


def trials_that_count(study: Study) -> list[Trial]:
    """Return the trials whose results the study goes by: those that ended, and those that others are already compared with. What would
    be tried again is none of them."""
    return [trial for trial in _that_stand(study) if trial.state.ended or trial.history]


def _that_stand(study: Study) -> list[Trial]:
    again = {trial.id for trial in tried_again(study)}
    return [trial for trial in study.trials.values() if trial.id not in again]


def why_refused(study: Study, code: Sequence[str], data: Sequence[str]) -> str | None:
    """Return, in words, why a study does not go on whose code or data have changed; None where nothing that counts was made with what
    they were. Code counts as soon as a trial has been evaluated, and a checkpoint of other code is not taken; data and weights count
    from the first proposal, which goes by them."""
    has_begun = bool(_that_stand(study)) and not study.begins_again
    changed = [*(code if trials_that_count(study) else ()), *(data if has_begun else ())]
    if not changed:
        return None
    retried = ", and to try again what failed" if failed_trials(study) else ""
    return (
        f"{_has_changed(changed)} since this study began, and trials of old and new code or data do not compare. Choose "
        f"another --dir to begin anew, or add --keep-finished to go on with both{retried}"
    )


def kept_text(study: Study, changed: Sequence[str]) -> str:
    """Return, in words, that trials are kept that were made before this has changed."""
    count = len(trials_that_count(study))
    trials, is_part = ("a trial", "is") if count == 1 else (f"{count} trials", "are")
    return (
        f"{trials} had been measured before {first_of(changed, MOST_NAMED)} changed, and {is_part} part of the answer"
    )


def why_again(changed: Sequence[str]) -> str:
    """Return in words why something is tried again. changed: the names of what has changed; none: the user asks for it."""
    if not changed:
        return "you ask for it (--retry-failed)"
    return f"{_has_changed(changed)} since"


def _has_changed(changed: Sequence[str]) -> str:
    return f"{first_of(changed, MOST_NAMED)} {'has' if len(changed) == 1 else 'have'} changed"
