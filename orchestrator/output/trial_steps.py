"""What has happened to one trial, a sentence for each event."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from batchscout.orchestrator.study.events import (
    Ended,
    Evaluated,
    Interrupted,
    Noticed,
    Paused,
    Promoted,
    Proposed,
    Reopened,
    Retried,
    RunBegan,
    Started,
)
from batchscout.orchestrator.study.history import Change
from batchscout.orchestrator.study.state import Study
from batchscout.orchestrator.units import loss_text
from batchscout.trainers.files import quoted


@dataclass(frozen=True)
class Step:
    """Something that happened to the trial."""

    seconds: float
    """Since the study's first event."""
    what: str
    """The kind of event, for programs."""
    text: str


def steps_of(changes: Iterable[Change], study: Study) -> Iterator[Step]:
    for change in changes:
        if text := _told(change):
            kind = change.event.kind
            yield Step(round(change.event.time - (study.began or change.event.time), 3), kind, text)


def _told(change: Change) -> str:
    """Return what an event did to the trial; nothing where that is of no interest."""
    trial = change.after or change.before
    assert trial is not None, "the event has changed it"
    match change.event:
        case Proposed():
            return f"asked for by the stage {trial.stage}" + (f": {trial.role}" if trial.role else "")
        case Started():
            return "given a lane" if change.before and not change.before.holds else "given a lane again, and goes on"
        case Evaluated() as event:
            return _evaluation(event)
        case Paused(rung=rung, reason=reason):
            return _with(f"paused at the rung of {rung:,} samples", reason)
        case Promoted(rung=rung, reason=reason):
            return _with(f"continued past the rung of {rung:,} samples", reason)
        case Interrupted(reason=reason):
            return _with("lost its lane through no fault of its own, and waits again", reason)
        case RunBegan():
            return "its driver had ended: another one resumed the study, and it waits again"
        case Ended():
            return trial.how_it_ended + (
                f"; measured by the study in {quoted(trial.reused.run_dir)}" if trial.reused else ""
            )
        case Retried(reason=reason, from_checkpoint=goes_on):
            return _with("goes on from its checkpoint" if goes_on else "is tried again, from its beginning", reason)
        case Reopened(stage=stage):
            return f"withdrawn, as the stage {stage} before it is open again"
        case Noticed(reason=reason):
            return _with("notice", reason)
        case _:
            return ""


def _evaluation(event: Evaluated) -> str:
    """Return what an evaluation found; nothing for the end of a probe, which is there to be timed."""
    samples, loss = event.metrics.get("samples_seen"), event.metrics.get("val_loss")
    if samples is None or (loss is None and not event.rungs):
        return ""
    found = "val loss not finite" if loss is None else f"val loss {loss_text(loss)}"
    rungs = f" (rung {', '.join(f'{rung:,}' for rung in event.rungs)})" if event.rungs else ""
    return f"evaluated after {samples:,.0f} samples{rungs}: {found}"


def _with(said: str, reason: str) -> str:
    return f"{said}: {reason}" if reason else said
