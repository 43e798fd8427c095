"""What is tried again of a study in which something failed, once what it was made of has changed: pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from orchestrator.study.causes import Cause
from orchestrator.study.events import Reopened, Retried
from orchestrator.study.state import Study
from orchestrator.study.trial import Trial, TrialState

MOST_NAMED = 3


def failed_trials(study: Study) -> list[Trial]:
    """Return the trials that say nothing but that something is wrong, in the order proposed: those that failed, and those that were
    not started because of them."""
    return [trial for trial in study.trials.values() if _has_failed(trial)]


def _has_failed(trial: Trial) -> bool:
    return trial.state is TrialState.FAILED or trial.cause is Cause.STOPPED


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


def changed_inputs(before: Mapping[str, str] | None, now: Mapping[str, str]) -> list[str]:
    """Return the names of the files that are others now; none where nobody knows how they were."""
    if before is None:
        return []
    return [name for name in sorted({**before, **now}) if before.get(name) != now.get(name)]


def why_again(changed: Sequence[str]) -> str:
    """Return in words why something is tried again. changed: the names of what has changed; none: the user asks for it."""
    if not changed:
        return "you ask for it (--retry-failed)"
    more = f" and {len(changed) - MOST_NAMED} more" if len(changed) > MOST_NAMED else ""
    has = "has" if len(changed) == 1 else "have"
    return f"{', '.join(changed[:MOST_NAMED])}{more} {has} changed since"
