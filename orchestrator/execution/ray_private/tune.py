"""What Tune keeps and says."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from ray.tune.execution import class_cache
from ray.tune.progress_reporter import TrialProgressCallback

if TYPE_CHECKING:
    from ray.tune.execution.tune_controller import TuneController
    from ray.tune.experiment import Trial as TuneTrial


def keep_relays(tune_controller: TuneController, trial: TuneTrial, num_lanes: int) -> None:
    """Have Tune keep an idle actor for every lane: by itself it keeps one, and ends the processes of the others."""
    tune_controller._actor_cache.increase_max(trial.placement_group_factory, by=num_lanes)


def forget_ended_trials(tune_controller: TuneController) -> None:
    """Drop the trials that have ended from Tune's memory: it keeps every figure of theirs, and the journal has them
    all."""
    trials = tune_controller.get_trials()
    trials[:] = [trial for trial in trials if not trial.is_finished()]
    tune_controller._stopped_trials.clear()
    tune_controller._trials_to_cache.clear()


class NoProgress(TrialProgressCallback):
    """Replaces Tune's own callback, which prints nothing either but keeps every trial it hears of, with all its
    figures."""

    def on_trial_result(self, *told: object, **more: object) -> None: ...
    def on_trial_error(self, *told: object, **more: object) -> None: ...
    def on_trial_complete(self, *told: object, **more: object) -> None: ...


def quiet_tune() -> None:
    """Silence Tune's log of a lost trial with Ray's whole stack: the journal has one line, which names the stack's
    file."""
    logging.getLogger("ray.tune.execution.tune_controller").setLevel(logging.CRITICAL)


def forward_no_keys() -> None:
    """Keep Tune from forwarding the keys of an AWS account to its actors, which read nothing from there.

    Tune puts them into the actors' runtime environment, and Ray writes those into a log.
    """
    class_cache.ENV_VARS_TO_PROPAGATE -= {name for name in class_cache.ENV_VARS_TO_PROPAGATE if name.startswith("AWS_")}
