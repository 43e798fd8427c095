"""One rank of a lane, without a Dispatcher."""

from __future__ import annotations

from batchscout.orchestrator.execution.ranks import Place
from batchscout.orchestrator.study.messages import Assignment, Message


class SilentPlace(Place):
    """Of a rank whose words nobody waits for."""

    def say(self, assignment: Assignment, message: Message) -> None:
        pass
