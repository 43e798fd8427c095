"""What has happened to one trial, event by event, as the journal has it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from batchscout.orchestrator.study.events import Event, Noticed
from batchscout.orchestrator.study.journal import applied
from batchscout.orchestrator.study.state import Study
from batchscout.orchestrator.study.trial import Trial
from batchscout.trainers.notices import heard_by


@dataclass(frozen=True)
class Change:
    """An event, and what it made of a trial."""

    event: Event
    before: Trial | None
    """None where it was not proposed yet, or is withdrawn."""
    after: Trial | None


def history_of(path: Path, name: str, trial_id: str) -> list[Change]:
    """Return the events of a journal that changed a trial, and those that tell of something amiss in it. An event that stands twice
    changes nothing the second time."""
    study, found = Study(name), list[Change]()
    before: Trial | None = None
    with heard_by(lambda _: None):  # a damaged line is told where the study itself is read
        for line in applied(path, study):
            after = study.trials.get(trial_id)
            of_it = isinstance(line.event, Noticed) and line.event.id == trial_id
            if after != before or of_it:
                found.append(Change(line.event, before, after))
            before = after
    return found
