"""What passes between a trial and whoever directs it. Plain values: neither Ray nor torch is needed to read them."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from batchscout.orchestrator.study.causes import Cause
from batchscout.orchestrator.study.storage.stored_trials import StoredTrials
from batchscout.orchestrator.units import bytes_text
from batchscout.trainers.notices import Notice
from batchscout.trainers.report import Known
from batchscout.trainers.step_log import Step

Outcome = Literal[
    "complete", "stopped", "interrupted", "out_of_memory", "failed", "no_lane", "no_storage", "other_code"
]
"""How a trial's hold on its lane ended. Four outcomes say nothing about the trial itself: its machine was taken away
(`interrupted`), no lane is left to run it (`no_lane`), storage refused to save it or to give it its data
(`no_storage`), or the user's code is no longer that of the trials before it (`other_code`)."""

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
    """Where its files are; in an object store's study, in the driver's copy."""
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
    stored: StoredTrials | None = None
    """Where the study's trials are, if it is in an object store."""
    lane_deaths: int = 0
    """How many groups of processes have died under the trial."""


# What two GPUs of one kind say of their memory may differ by this share, with their drivers and their error correction.
SAME_MEMORY = 0.02


@dataclass(frozen=True)
class Device:
    """What a rank computes on."""

    name: str
    memory_bytes: int
    """All that a GPU has, or a rank's host."""
    is_gpu: bool = False

    def is_like(self, other: Device) -> bool:
        """True if both are of one kind: what one measured holds for the other."""
        most = max(self.memory_bytes, other.memory_bytes)
        alike = (self.name, self.is_gpu) == (other.name, other.is_gpu)
        return alike and abs(self.memory_bytes - other.memory_bytes) <= SAME_MEMORY * most

    def __str__(self) -> str:
        return f"{self.name} ({bytes_text(self.memory_bytes)})"


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
    hardware: Device | None = None
    """The device by its parts; None if nobody has said it."""
    free_bytes: int | None = None
    """What of its GPU was free when it came up; None on a CPU, whose limit the study sets."""
    sees_run_directory: bool = True
    """False if the files that the driver writes there are not to be found on this host."""


@dataclass(frozen=True)
class HeldLane:
    """The lane that a trial runs on."""

    number: int
    """From 0, among those of this run of the study."""
    node: str
    """The host of its rank 0."""
    devices: tuple[Device, ...] = ()
    """What its ranks compute on, by rank; a single one where all have the same. (): nobody has said it."""
    nodes: tuple[str, ...] = ()
    """The hosts of its ranks, by rank, where they are on several."""

    @property
    def place(self) -> tuple[str, ...]:
        """The hosts of its ranks, each once."""
        return tuple(dict.fromkeys(self.nodes)) or (self.node,)


@dataclass(frozen=True)
class FirstLane:
    """What the first lane that came up runs on: all lanes of a study run on the same."""

    device: str = ""
    """Describes the hardware that speed and memory depend on; empty where no lane came up."""
    hardware: Device | None = None
    num_nodes: int = 1
    """The hosts that its ranks are on: with more than one, its speed is one over a network."""
    free_bytes: int | None = None
    """The least that was free of a rank's GPU when it came up; None on CPUs."""


@dataclass(frozen=True)
class Message:
    """What a trial says: a report on the way, a notice, or (with an outcome) its last word."""

    metrics: dict[str, float] = field(default_factory=dict)
    rungs: tuple[int, ...] = ()
    steps: tuple[Step, ...] = ()
    """Those since its last report."""
    evaluated: bool = False
    outcome: Outcome | None = None
    cause: Cause | None = None
    """Why it ended so, where its outcome does not say it all."""
    reason: str = ""
    notice: Notice | None = None
    """Something that it met and has dealt with; such a message says nothing else."""
    lane: HeldLane | None = None
    """Where the trial runs; None if it has no lane, or is told of by one that does not know."""
