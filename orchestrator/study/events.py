"""What happens to a study, as the journal holds it: one type for each kind of event, and the version of their format.

An event's `kind` and the names of its fields are what `jq` and `grep` see. Whoever changes them raises FORMAT_VERSION,
and writes into `upgrade.py` how lines of the format before are read.
"""

from __future__ import annotations

import time
from typing import Annotated, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, JsonValue, TypeAdapter

from batchscout.orchestrator.study.causes import Cause
from batchscout.orchestrator.study.facts import Facts
from batchscout.orchestrator.study.messages import HeldLane
from batchscout.orchestrator.study.trial import Metrics, Proposal, Reuse, TrialState
from batchscout.orchestrator.terminal import printable
from batchscout.orchestrator.units import shortened
from batchscout.trainers.config import TrialConfig
from batchscout.trainers.notices import Notice, NoticeKind

FORMAT_VERSION = 4


def _now() -> float:
    return round(time.time(), 3)


# A user's exception may have any length, and whoever reads the journal reads it all.
MOST_CHARACTERS = 4000


def _for_people(text: str) -> str:
    """Return the text, bounded, without what a user's message must not do: half a letter would end a study, and a
    control character would act on every terminal that shows it."""
    return printable(shortened(text, MOST_CHARACTERS).encode("utf-8", "replace").decode())


Prose = Annotated[str, AfterValidator(_for_people)]
"""Text for people."""


Name = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._+-]*$")]
"""Names a trial, and its directory: never a path."""


class _Event(BaseModel):
    """What all events have: the version of their format, and when they happened, in seconds since 1970."""

    model_config = ConfigDict(frozen=True, extra="forbid", ser_json_inf_nan="null")

    version: Literal[4] = FORMAT_VERSION
    time: float = Field(default_factory=_now)


class _OnALane(_Event):
    """What a trial told from a lane, or what was concluded from it."""

    lane: HeldLane | None = None
    """Where it ran; None if it was not heard of there."""


class RunBegan(_Event):
    """A driver took the study up: what the driver before it left running waits again."""

    kind: Literal["run_began"] = "run_began"
    token: str
    """Names this driver among all that have run the study."""
    given: dict[str, JsonValue] = {}
    """The keys of the study that its file and options gave; all others had their defaults."""
    told: tuple[str, ...] = ()
    """Where the study differs from the object that its `from` names, one sentence each."""
    cluster_options: tuple[str, ...] = ()
    """The options of the command that say on which cluster it runs the study: whoever goes on with it types them again."""


class RunStopped(_Event):
    """A driver stopped in order: what it leaves running holds no lane from here on. One that is killed writes no such line."""

    kind: Literal["run_stopped"] = "run_stopped"


class ClusterReady(_Event):
    kind: Literal["cluster_ready"] = "cluster_ready"
    token: str
    """Names the driver, as in `RunBegan`."""
    seconds: float
    """How long it took from the command until the cluster and its lanes were there."""


class LanesChanged(_Event):
    """The study has other lanes than before, on a cluster that grows and shrinks, or has asked for room for others."""

    kind: Literal["lanes_changed"] = "lanes_changed"
    lanes: int
    """Those that are open, on nodes that are there."""
    most: int
    """How many there may be at once."""
    asked: int = 0
    """For how many lanes in all the cluster's autoscaler was asked to have room; 0: for no more than there is."""
    reason: Prose


class FactsRead(_Event):
    kind: Literal["facts_read"] = "facts_read"
    facts: Facts


class StageBegan(_Event):
    kind: Literal["stage_began"] = "stage_began"
    stage: str


class Proposed(_Event):
    """A stage wants a trial: it waits from here on."""

    kind: Literal["proposed"] = "proposed"
    id: Name
    stage: str
    config: TrialConfig
    candidate: str
    role: str
    protected: bool
    fresh_process: bool
    round: int | None
    control: bool
    expected: dict[str, float]

    def proposal(self) -> Proposal:
        """Return the proposal that this event tells of."""
        return Proposal(**{name: getattr(self, name) for name in Proposal.__dataclass_fields__})


class Started(_Event):
    kind: Literal["started"] = "started"
    id: str


class Evaluated(_OnALane):
    """A trial has evaluated itself, and saved a checkpoint."""

    kind: Literal["evaluated"] = "evaluated"
    id: str
    metrics: Metrics
    rungs: dict[int, float | None] = {}
    """The objective's value at each rung that it has reached here."""


class Paused(_OnALane):
    """A trial waits at a rung for the verdict on it."""

    kind: Literal["paused"] = "paused"
    id: str
    rung: int
    reason: Prose
    seconds: float
    """How long it has held its lane."""


class Promoted(_Event):
    """A trial was let past a rung."""

    kind: Literal["promoted"] = "promoted"
    id: str
    rung: int
    reason: Prose


class Interrupted(_OnALane):
    """A trial lost its machine through no fault of its own: it waits again."""

    kind: Literal["interrupted"] = "interrupted"
    id: str
    reason: Prose
    seconds: float
    """How long it has held its lane."""


class Ended(_OnALane):
    """A trial has its final state."""

    kind: Literal["ended"] = "ended"
    id: str
    state: TrialState
    cause: Cause | None
    reason: Prose
    metrics: Metrics
    seconds: float
    """How long it has held its lane."""
    reused: Reuse | None = None
    """The study that measured it, where this one did not."""


class Retried(_Event):
    """A trial that had ended is run again: from its beginning, as what it was made of has changed, or the user asked for it; or from its
    checkpoint, as nothing but a key had stopped it that lets it go on now. How it had ended stands in the line that says so."""

    kind: Literal["retried"] = "retried"
    id: str
    reason: Prose
    from_checkpoint: bool = False


class Reopened(_Event):
    """A stage has no result any more, since trials of it are tried again, and neither have those after it. Their trials stand, and
    count again once their stages ask for them."""

    kind: Literal["reopened"] = "reopened"
    stage: str


class Noticed(_Event):
    """Something amiss was met and dealt with, such as a damaged file: the results stand."""

    kind: Literal["noticed"] = "noticed"
    id: Name | None
    """The trial that met it; None where the driver did."""
    notice: NoticeKind
    reason: Prose


class Concluded(_Event):
    """A stage has its result."""

    kind: Literal["concluded"] = "concluded"
    stage: str
    ok: bool
    reason: Prose
    findings: JsonValue = None
    """What it found, as JSON of the stage's own type; `batchscout.orchestrator.stages.findings` reads it back."""
    notes: tuple[Prose, ...] = ()
    bad_input: bool = False
    """True if what the user gave cannot be run, and nothing else is wrong."""


TrialEvent = Started | Evaluated | Paused | Promoted | Interrupted | Ended
"""What happens to a trial after it was proposed, until it ends."""

Event = (
    RunBegan
    | RunStopped
    | ClusterReady
    | LanesChanged
    | FactsRead
    | StageBegan
    | Reopened
    | Proposed
    | TrialEvent
    | Retried
    | Noticed
    | Concluded
)

parser: TypeAdapter[Event] = TypeAdapter(Annotated[Event, Field(discriminator="kind")])


def noticed(notice: Notice, trial_id: str | None = None) -> Noticed:
    """Return the event that a trial, or the driver, met something amiss."""
    return Noticed(id=trial_id, notice=notice.kind, reason=notice.text)


def proposed(wanted: Proposal) -> Proposed:
    """Return the event that a stage wants this trial."""
    return Proposed(**{name: getattr(wanted, name) for name in Proposal.__dataclass_fields__})
