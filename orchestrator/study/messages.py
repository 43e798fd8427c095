"""What passes between a trial and whoever directs it. Plain values: neither Ray nor torch is needed to read them."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from orchestrator.study.causes import Cause
from trainers.notices import Notice
from trainers.report import Known

Outcome = Literal["complete", "stopped", "interrupted", "out_of_memory", "failed", "no_lane", "no_storage"]
"""How a trial's hold on its lane ended. Three outcomes say nothing about the trial itself: its machine was taken away
(`interrupted`), no lane is left to run it (`no_lane`), or storage refused to save it or to give it its data
(`no_storage`)."""

Blame = Literal["trial", "memory", "machine"]
"""What a lane's processes died of: the trial that they ran, the memory of their host running out, or the loss of their
machine, for which neither is to blame."""


@dataclass(frozen=True)
class Assignment:
    """A trial, or what is left of it, as handed to a lane."""

    trial_id: str
    config_json: str
    """Its TrialConfig as JSON: whoever passes it on needs neither pydantic nor torch."""
    directory: str
    token: str
    """Names the driver; the checkpoints of the trial are marked with it."""
    known: Known | None = None
    """What the journal knows of the trial's run. None: whatever checkpoint it has is its own."""
    recycle_after: bool = False
    """True if the next trial of the lane is to have new processes."""
    fresh_process: bool = False
    """True if the trial must run in processes that have run nothing before."""
    key: str = ""
    """Names this handing over: a rank that still speaks for an earlier handing over of the same trial is told apart by
    it."""
    lane_deaths: int = 0
    """How many groups of processes have died under the trial."""


@dataclass(frozen=True)
class Host:
    """Where a rank of a lane runs."""

    name: str
    device: str
    """Describes the hardware that speed and memory depend on."""
    memory_kills: int
    """How many processes the kernel has ended so far, in the rank's control group, because memory had run out."""
    process_id: int = 0
    pid_namespace: str = ""
    """Where `process_id` means this process; nowhere if it is empty."""


@dataclass(frozen=True)
class HeldLane:
    """The lane that a trial runs on."""

    number: int
    """From 0, among those of this run of the study."""
    node: str
    """The host of its rank 0."""


@dataclass(frozen=True)
class Message:
    """What a trial says: a report on the way, a notice, or (with an outcome) its last word."""

    metrics: dict[str, float] = field(default_factory=dict)
    rungs: tuple[int, ...] = ()
    step_losses: tuple[float, ...] = ()
    evaluated: bool = False
    outcome: Outcome | None = None
    cause: Cause | None = None
    """Why it ended so, where its outcome does not say it all."""
    reason: str = ""
    notice: Notice | None = None
    """Something that it met and has dealt with; such a message says nothing else."""
    lane: HeldLane | None = None
    """Where the trial runs; None if it has no lane, or is told of by one that does not know."""
