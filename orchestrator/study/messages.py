"""What passes between a trial and whoever directs it. Plain values: neither Ray nor torch is needed to read them."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from orchestrator.study.causes import Cause

Outcome = Literal["complete", "stopped", "interrupted", "out_of_memory", "failed", "no_lane", "no_room"]
"""How a trial's hold on its lane ended. Three say nothing of the trial: its machine was taken away (`interrupted`), there is
nowhere left to run it (`no_lane`), or no disk to save it on (`no_room`)."""

Blame = Literal["trial", "memory", "machine"]
"""What a lane's processes died of: of what they ran, of the memory of their host, or of what has nothing to do with either."""


@dataclass(frozen=True)
class Assignment:
    """A trial, or what is left of it, as handed to a lane."""

    trial_id: str
    config_json: str
    """Its TrialConfig as JSON: whoever passes it on needs neither pydantic nor torch."""
    directory: str
    token: str
    recycle_after: bool = False
    fresh_process: bool = False
    """Only for processes that have run nothing before."""
    key: str = ""
    """Of this handing over: what a rank of an earlier one still says of the same trial is not taken for this one's."""
    lane_deaths: int = 0


@dataclass(frozen=True)
class Host:
    """Where a lane's first rank runs."""

    name: str
    device: str
    """What speed and memory depend on."""
    memory_kills: int
    """How many processes the host's kernel has ended since it started because memory had run out."""


@dataclass(frozen=True)
class Message:
    """What a trial says: a report on the way, or (with an outcome) its last word."""

    metrics: dict[str, float] = field(default_factory=dict)
    rungs: tuple[int, ...] = ()
    step_losses: tuple[float, ...] = ()
    evaluated: bool = False
    outcome: Outcome | None = None
    cause: Cause | None = None
    """Why it ended so, where its outcome does not say it all."""
    reason: str = ""
