"""The Director as Ray Tune sees it: a search algorithm that names the next trial, a scheduler that pauses, promotes, stops.

Tune starts every trial it knows without asking, so it is told of a trial only when that is to run now. Concurrency is
bounded there too: `max_concurrent_trials` counts paused trials and would wait for ever with the last lane idle.
"""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

from ray.tune.experiment import Trial as TuneTrial
from ray.tune.progress_reporter import TrialProgressCallback
from ray.tune.schedulers import TrialScheduler
from ray.tune.search import Searcher

from orchestrator.decisions.director import Director
from orchestrator.execution.placement import ON_THE_HEAD
from orchestrator.execution.session import environment_with
from orchestrator.study.messages import Assignment, Message
from orchestrator.study.state import Trial, TrialState

_ACTIONS = {"go on": TrialScheduler.CONTINUE, "pause": TrialScheduler.PAUSE, "stop": TrialScheduler.STOP}


class _NotRestored:
    """Tune pickles what it is given so that it could restore it; a study is restored from its journal instead."""

    def __getstate__(self) -> dict[str, Any]:
        return {}


class StageSearch(_NotRestored, Searcher):
    """Suggests the trial that the Director wants to run now, if Tune does not hold it paused already."""

    def __init__(self, director: Director, scheduler: StageScheduler, switchboard: str, token: str) -> None:
        super().__init__()
        self._director, self._scheduler = director, scheduler
        self._switchboard, self._token = switchboard, token

    def suggest(self, trial_id: str) -> Any:
        trial = self._scheduler.next_trial()
        if trial is None:
            return Searcher.FINISHED if self._director.finished() else None
        if self._scheduler.holds(trial.id):
            return None
        self._director.on_started(trial.id)
        assignment = Assignment(
            trial_id=trial.id,
            config=trial.config.model_dump(mode="json"),
            directory=f"{self._director.setting.run_dir}/trials/{trial.id}",
            token=self._token,
            recycle_after=self._director.setting.study.isolation == "trial",
            fresh=trial.fresh,
        )
        return {"switchboard": self._switchboard, "assignment": assignment}

    def on_trial_complete(self, trial_id: str, result: dict[str, Any] | None = None, error: bool = False) -> None:
        """Nothing: the scheduler hears it first."""

    def save(self, checkpoint_path: str) -> None:
        """Nothing: the journal is the truth, and Tune's restore is not used."""

    def restore(self, checkpoint_path: str) -> None:
        raise AssertionError("a study is resumed from its journal")


class StageScheduler(_NotRestored, TrialScheduler):
    """Turns messages into Tune's decisions, and unpauses what the Director promotes."""

    def __init__(self, director: Director) -> None:
        super().__init__()
        self._director = director
        self._known: dict[str, TuneTrial] = {}
        self._keeps_actors = False

    def next_trial(self) -> Trial | None:
        """What the Director wants to run now. Not in the place of a trial that Tune has yet to save or to stop: its actor will
        be free then, and until it is Tune would start another process, of which it keeps a record for ever."""
        trials = self._director.journal.study.trials
        held = [name for name, trial in self._known.items() if trial.status in (TuneTrial.PENDING, TuneTrial.RUNNING)]
        return self._director.next_trial(sum(trials[name].state is not TrialState.RUNNING for name in held))

    def holds(self, trial_id: str) -> bool:
        """Whether Tune has the trial, paused, so that it is to be unpaused and not created."""
        return trial_id in self._known

    def on_trial_add(self, tune_controller: Any, trial: TuneTrial) -> None:
        # By itself Tune keeps one actor for the trials to come, and ends the processes of other lanes.
        if not self._keeps_actors:
            tune_controller._actor_cache.increase_max(trial.placement_group_factory, by=self._director.num_lanes)
            self._keeps_actors = True
        self._known[_id(trial)] = trial

    def on_trial_result(self, tune_controller: Any, trial: TuneTrial, result: dict[str, Any]) -> str:
        message: Message = result["message"]
        return _ACTIONS[self._director.on_message(_id(trial), message).action]

    def on_trial_complete(self, tune_controller: Any, trial: TuneTrial, result: dict[str, Any]) -> None:
        """The trial's last result: Tune asks for no decision on it."""
        self._known.pop(_id(trial), None)
        _forget_ended(tune_controller)
        message: Message = result["message"]
        if message.outcome is not None:
            self._director.on_message(_id(trial), message)

    def on_trial_error(self, tune_controller: Any, trial: TuneTrial) -> None:
        self._known.pop(_id(trial), None)
        self._director.on_relay_lost(_id(trial), f"its Tune actor was lost; see {trial.error_file or 'the Ray logs'}")

    def on_trial_remove(self, tune_controller: Any, trial: TuneTrial) -> None:
        self._known.pop(_id(trial), None)
        _forget_ended(tune_controller)

    def choose_trial_to_run(self, tune_controller: Any) -> TuneTrial | None:
        self._drop_ended(tune_controller)
        wanted = self.next_trial()
        if wanted is None or wanted.id not in self._known:
            return None
        trial = self._known[wanted.id]
        if trial.status != TuneTrial.PAUSED:
            return None
        self._director.on_started(wanted.id)
        return trial

    def debug_string(self) -> str:
        return f"stage {self._director.stage.type}"

    def _drop_ended(self, tune_controller: Any) -> None:
        """Tune waits for paused trials for ever: those that the Director has cut since are taken from it."""
        for trial_id, trial in list(self._known.items()):
            if trial.status == TuneTrial.PAUSED and self._director.journal.study.trials[trial_id].state.ended:
                self._known.pop(trial_id)
                tune_controller.stop_trial(trial)


class Silence(TrialProgressCallback):
    """Instead of Tune's own, which prints nothing either but keeps, with all its figures, every trial it hears of."""

    def on_trial_result(self, *told: Any, **more: Any) -> None: ...
    def on_trial_error(self, *told: Any, **more: Any) -> None: ...
    def on_trial_complete(self, *told: Any, **more: Any) -> None: ...


def _forget_ended(tune_controller: Any) -> None:
    """Tune keeps what has ended, with every figure's history, and at its own end writes all of it down: the journal has it."""
    trials = tune_controller.get_trials()
    trials[:] = [trial for trial in trials if not trial.is_finished()]
    tune_controller._stopped_trials.clear()
    tune_controller._trials_to_cache.clear()


def _id(trial: TuneTrial) -> str:
    return trial.config["assignment"].trial_id


# A trial in Tune only relays: it takes no CPU. Lanes take the CPUs and GPUs.
RELAY_RESOURCES = {"CPU": 0, **ON_THE_HEAD}


def run_in_tune(director: Director, switchboard: str, run_dir: Path, token: str) -> None:
    """One Tuner for one stage: the Director decides, Tune and the lanes act."""
    from ray import tune

    from orchestrator.execution.relay import LaneTrainable

    # What it logs as an error, with Ray's whole stack, the journal says in a line that names the file of the stack.
    logging.getLogger("ray.tune.execution.tune_controller").setLevel(logging.CRITICAL)
    scheduler = StageScheduler(director)
    tuner = tune.Tuner(
        tune.with_resources(LaneTrainable, RELAY_RESOURCES),
        tune_config=tune.TuneConfig(
            search_alg=StageSearch(director, scheduler, switchboard, token),
            scheduler=scheduler,
            num_samples=-1,
            reuse_actors=True,
            trial_dirname_creator=lambda trial: trial.trial_id,
        ),
        run_config=tune.RunConfig(
            name=f"{director.stage.type}-{token}",
            storage_path=str(run_dir / ".ray"),
            verbose=0,
            callbacks=[Silence()],
        ),
    )
    # By itself Tune starts the relays of a search algorithm one after the other.
    with environment_with({"TUNE_MAX_PENDING_TRIALS_PG": str(director.num_lanes)}):
        tuner.fit()
