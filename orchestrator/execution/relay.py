"""The relay, a Tune trial: it holds no resources, hands its trial to a lane, and relays what comes back.

It is not in lanes.py because its process needs Tune and not torch.
"""

from __future__ import annotations

import contextlib
import uuid
from dataclasses import replace
from typing import Any

import ray
from ray import tune
from ray.exceptions import OutOfMemoryError, RayActorError

from batchscout.orchestrator.execution.dispatcher import DispatcherHandle
from batchscout.orchestrator.study.messages import Assignment, Message

# The Dispatcher died while it was asked, of the node's memory, too, or before that, when Ray no longer knows its name.
NO_DISPATCHER = (RayActorError, OutOfMemoryError, ValueError)


class LaneTrainable(tune.Trainable):
    """A Tune trial without resources of its own. Each of its steps is one message of its trial."""

    def setup(self, config: dict[str, Any]) -> None:
        self._dispatcher_name: str = config["dispatcher"]
        self._assignment: Assignment = config["assignment"]
        self._is_assigned = False

    def step(self) -> dict[str, Any]:
        try:
            message = self._next_message()
        except NO_DISPATCHER as error:
            said = str(error).splitlines()[0]
            message = Message(outcome="no_lane", reason=f"the process that hands trials to the lanes has died: {said}")
        return {"message": message, "done": message.outcome is not None}

    def _next_message(self) -> Message:
        dispatcher = self._dispatcher()
        if not self._is_assigned:
            self._assignment = replace(self._assignment, key=uuid.uuid4().hex)
            ray.get(dispatcher.assign.remote(self._assignment))
            self._is_assigned = True
        return ray.get(dispatcher.next_message.remote(self._assignment.key))

    def _dispatcher(self) -> DispatcherHandle:
        return ray.get_actor(self._dispatcher_name)

    def reset_config(self, new_config: dict[str, Any]) -> bool:
        self._dismiss()
        self.setup(new_config)
        return True

    def cleanup(self) -> None:
        self._dismiss()

    def save_checkpoint(self, checkpoint_dir: str) -> dict[str, Any]:
        """Free the lane: Tune saves a trial that it pauses, whose own checkpoint lies in its directory already."""
        self._dismiss()
        return {"trial": self._assignment.trial_id}

    def load_checkpoint(self, checkpoint: dict[str, Any] | None) -> None:
        """Load nothing: the run goes on from its own checkpoint."""

    def _dismiss(self) -> None:
        if self._is_assigned:
            with contextlib.suppress(*NO_DISPATCHER):  # then no lane runs it any more
                ray.get(self._dispatcher().dismiss.remote(self._assignment.key))
            self._is_assigned = False
