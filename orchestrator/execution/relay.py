"""A Tune trial: it holds no resources, hands its trial to a lane, and relays what comes back.

Apart from the lanes, because its process needs Tune and not torch.
"""

from __future__ import annotations

import contextlib
import uuid
from dataclasses import replace
from typing import Any

import ray
from ray import tune
from ray.exceptions import RayActorError

from orchestrator.study.messages import Assignment, Message

# It died while it was asked, or before (then nobody has its name).
NO_SWITCHBOARD = (RayActorError, ValueError)


class LaneTrainable(tune.Trainable):
    """A Tune trial without resources of its own: it hands its trial to a lane and relays what comes back."""

    def setup(self, config: dict[str, Any]) -> None:
        self._switchboard: str = config["switchboard"]
        self._assignment: Assignment = config["assignment"]
        self._assigned = False

    def step(self) -> dict[str, Any]:
        try:
            message = self._next_message()
        except NO_SWITCHBOARD as error:
            said = str(error).splitlines()[0]
            message = Message(outcome="no_lane", reason=f"the process that hands trials to the lanes has died: {said}")
        return {"message": message, "done": message.outcome is not None}

    def _next_message(self) -> Message:
        board: Any = ray.get_actor(self._switchboard)
        if not self._assigned:
            self._assignment = replace(self._assignment, key=uuid.uuid4().hex)
            ray.get(board.assign.remote(self._assignment))
            self._assigned = True
        return ray.get(board.next_message.remote(self._assignment.key))

    def reset_config(self, new_config: dict[str, Any]) -> bool:
        self._dismiss()
        self.setup(new_config)
        return True

    def cleanup(self) -> None:
        self._dismiss()

    def save_checkpoint(self, checkpoint_dir: str) -> dict[str, Any]:
        """Tune saves when it pauses: the lane is free from here on, and the run's own checkpoint lies in its directory."""
        self._dismiss()
        return {"trial": self._assignment.trial_id}

    def load_checkpoint(self, checkpoint: Any) -> None:
        """Nothing: the run goes on from its own checkpoint."""

    def _dismiss(self) -> None:
        if self._assigned:
            with contextlib.suppress(*NO_SWITCHBOARD):  # then no lane runs it any more
                board: Any = ray.get_actor(self._switchboard)
                ray.get(board.dismiss.remote(self._assignment.key))
            self._assigned = False
