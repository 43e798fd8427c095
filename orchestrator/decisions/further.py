"""What becomes of a study that may go further than before, because a key says so that only says when it stops: pure."""

from __future__ import annotations

from collections.abc import Iterator

from batchscout.orchestrator.config.keys import StudyConfig
from batchscout.orchestrator.config.stages import StageKeys
from batchscout.orchestrator.decisions.budget import Spending
from batchscout.orchestrator.stages import stage_of
from batchscout.orchestrator.stages.context import StageContext
from batchscout.orchestrator.study.causes import Cause
from batchscout.orchestrator.study.events import Reopened, Retried
from batchscout.orchestrator.study.state import Study
from batchscout.orchestrator.study.trial import Proposal


def events_to_go_further(before: StudyConfig, now: StudyConfig, study: Study) -> list[Retried | Reopened]:
    """Return what the journal must hold so that a study goes on as far as its keys let it now: what the budget stopped goes on, and the
    first stage that it kept from more, or that may make more runs, is asked again, with those after it."""
    cut = [] if _spending(now, study).is_spent else [t for t in study.trials.values() if t.cause is Cause.BUDGET]
    further = {trial.stage for trial in cut} | set(_kept_from_more(before, now, study))
    first = [name for name in study.started if name in further and name in study.conclusions][:1]
    why = "budget.device_hours lets it go on"
    goes_on = [Retried(id=trial.id, reason=why, from_checkpoint=True) for trial in cut]
    return [*goes_on, *(Reopened(stage=name) for name in first)]


def _kept_from_more(before: StudyConfig, now: StudyConfig, study: Study) -> Iterator[str]:
    """Yield the concluded stages that want a trial now: those whose own keys have changed, and those that the budget kept from what they
    wanted then. What other stages may take changes nothing that was decided."""
    earlier = {keys.type: keys for keys in before.stages}
    held, holds = _spending(before, study), _spending(now, study)
    for keys in now.stages:
        if keys.type not in study.conclusions:
            continue
        if earlier.get(keys.type) != keys:
            wanted = wanted_by(keys, now, study)
        else:
            wanted = wanted_by(keys, before, study)
            wanted = [] if held.affordable(wanted, ()) else wanted
        if holds.affordable(wanted, ()):
            yield keys.type


def wanted_by(keys: StageKeys, config: StudyConfig, study: Study) -> list[Proposal]:
    """Return the trials that a stage wants and that nobody has proposed."""
    try:
        wanted = stage_of(keys).propose(StageContext(keys, config, study))
    except ValueError:  # what earlier stages chose cannot be run
        return []
    return [one for one in wanted if one.id not in study.trials]


def kept_by_the_budget(config: StudyConfig, study: Study) -> bool:
    """True if the study has ended with less than it wanted, because its budget was spent."""
    if config.budget is None:
        return False
    spending = _spending(config, study)
    if any(trial.cause is Cause.BUDGET for trial in study.trials.values()):
        return True
    wanted = (wanted_by(keys, config, study) for keys in config.stages if keys.type in study.conclusions)
    return any(some and not spending.affordable(some, ()) for some in wanted)


def _spending(config: StudyConfig, study: Study) -> Spending:
    return Spending(config, study, clock=lambda: 0.0)
