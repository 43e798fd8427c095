"""What becomes of a running trial, with the reason."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from batchscout.orchestrator.study.causes import Cause


class Action(StrEnum):
    GO_ON = "go on"
    PAUSE = "pause"
    STOP = "stop"


@dataclass(frozen=True)
class Decision:
    action: Action
    cause: Cause | None = None
    """None where the trial simply goes on, or where it has said its last word itself."""
    reason: str = ""


GO_ON = Decision(Action.GO_ON)


def stop(cause: Cause, reason: str) -> Decision:
    return Decision(Action.STOP, cause, reason)
