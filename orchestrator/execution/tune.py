"""The Director as Ray Tune sees it: a search algorithm that names the next trial, and a scheduler that pauses and
stops.

Tune starts every trial it knows without asking, so it is told of a trial only when the trial is to run now. That bounds
how many run at once, too: Tune's `max_concurrent_trials` counts paused trials, and would wait for ever with a lane
idle.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from ray import tune
from ray.tune import TuneError
from ray.tune.experiment import Trial as TuneTrial
from ray.tune.schedulers import TrialScheduler
from ray.tune.search import Searcher

from batchscout.orchestrator.decisions.decision import Action
from batchscout.orchestrator.decisions.director import Director
from batchscout.orchestrator.execution.fleet import Fleet
from batchscout.orchestrator.execution.ray_private.cluster import ON_THE_HEAD
from batchscout.orchestrator.execution.ray_private.environment import relay_environment
from batchscout.orchestrator.execution.ray_private.tune import NoProgress, forget_ended_trials, keep_relays, quiet_tune
from batchscout.orchestrator.execution.relay import LaneTrainable
from batchscout.orchestrator.execution.session import environment_with
from batchscout.orchestrator.study.messages import Assignment, Message
from batchscout.orchestrator.study.run_directory import trial_directory
from batchscout.orchestrator.study.trial import Trial, TrialState

if TYPE_CHECKING:
    from ray.tune.execution.tune_controller import TuneController

# A Tune trial only relays and takes no CPU. The lanes take the CPUs and GPUs.
RELAY_RESOURCES = {"CPU": 0, **ON_THE_HEAD}

_ACTIONS = {
    Action.GO_ON: TrialScheduler.CONTINUE,
    Action.PAUSE: TrialScheduler.PAUSE,
    Action.STOP: TrialScheduler.STOP,
}


class _NotRestored:
    """An object that pickles as nothing: Tune pickles what it is given, but a study is restored from its journal."""

    def __getstate__(self) -> dict[str, object]:
        return {}


class StageSearch(_NotRestored, Searcher):
    """Suggests the trial that the Director wants to run now, if Tune does not hold it paused already."""

    def __init__(
        self, director: Director, scheduler: StageScheduler, dispatcher: str, run_dir: Path, token: str
    ) -> None:
        super().__init__()
        self._director, self._scheduler = director, scheduler
        self._dispatcher, self._run_dir, self._token = dispatcher, run_dir, token

    def suggest(self, trial_id: str) -> Any:  # a dictionary, None or FINISHED, which Tune's own type leaves out
        trial = self._scheduler.next_trial()
        if trial is None:
            return Searcher.FINISHED if self._director.is_finished() else None
        if self._scheduler.holds(trial.id):
            return None
        self._director.on_started(trial.id)
        return {"dispatcher": self._dispatcher, "assignment": self._assignment(trial)}

    def _assignment(self, trial: Trial) -> Assignment:
        config = self._director.context.config
        return Assignment(
            trial_id=trial.id,
            config_json=trial.config.model_dump_json(),
            directory=str(trial_directory(self._run_dir, trial.id)),
            token=self._token,
            known=self._director.study.known(trial),
            stored=published.trials if (published := self._director.journal.published) else None,
            recycle_after=config.isolation == "trial",
            fresh_process=trial.proposal.fresh_process,
        )

    def on_trial_complete(self, trial_id: str, result: dict[str, Any] | None = None, error: bool = False) -> None:
        """Do nothing: the scheduler hears it first."""

    def save(self, checkpoint_path: str) -> None:
        """Save nothing: the journal is the truth, and Tune's restore is not used."""

    def restore(self, checkpoint_path: str) -> None:
        raise AssertionError("a study is resumed from its journal")


class StageScheduler(_NotRestored, TrialScheduler):
    """Turns messages into Tune's decisions, and unpauses what the Director promotes."""

    def __init__(self, director: Director, fleet: Fleet | None = None) -> None:
        super().__init__()
        self._director, self._fleet = director, fleet
        self._known: dict[str, TuneTrial] = {}
        self._keeps_relays = False

    def next_trial(self) -> Trial | None:
        """Return the trial that the Director wants to run now.

        A trial that Tune has yet to save or to stop still counts as holding its lane: its actor is about to be free,
        and until then Tune would start another process, and keep a record of it for ever.
        """
        trials = self._director.study.trials
        held = [name for name, trial in self._known.items() if trial.status in (TuneTrial.PENDING, TuneTrial.RUNNING)]
        num_held = sum(trials[name].state is not TrialState.RUNNING for name in held)
        self._director.advance(num_held)
        if self._fleet is not None:
            self._fleet.hear(self._director.wanted())
            for change in self._fleet.changes():
                self._director.on_lanes_changed(change)
        return self._director.next_trial(num_held)

    def holds(self, trial_id: str) -> bool:
        """True if Tune has the trial already, paused, so that it must be unpaused and not created."""
        return trial_id in self._known

    def on_trial_add(self, tune_controller: TuneController, trial: TuneTrial) -> None:
        if not self._keeps_relays:
            keep_relays(tune_controller, trial, self._director.num_lanes)
            self._keeps_relays = True
        self._known[_id(trial)] = trial

    def on_trial_result(self, tune_controller: TuneController, trial: TuneTrial, result: dict[str, Any]) -> str:
        message: Message = result["message"]
        return _ACTIONS[self._director.on_message(_id(trial), message).action]

    def on_trial_complete(self, tune_controller: TuneController, trial: TuneTrial, result: dict[str, Any]) -> None:
        """Pass on the trial's last result, on which Tune asks for no decision."""
        self._known.pop(_id(trial), None)
        forget_ended_trials(tune_controller)
        message: Message = result["message"]
        if message.outcome is not None:
            self._director.on_message(_id(trial), message)

    def on_trial_error(self, tune_controller: TuneController, trial: TuneTrial) -> None:
        self._known.pop(_id(trial), None)
        self._director.on_relay_lost(_id(trial), f"its Tune actor was lost; see {trial.error_file or 'the Ray logs'}")

    def on_trial_remove(self, tune_controller: TuneController, trial: TuneTrial) -> None:
        self._known.pop(_id(trial), None)
        forget_ended_trials(tune_controller)

    def choose_trial_to_run(self, tune_controller: TuneController) -> TuneTrial | None:
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
        return f"stage {self._director.context.stage.type}"

    def _drop_ended(self, tune_controller: TuneController) -> None:
        """Stop the paused trials that the Director has cut since: Tune would wait for them for ever."""
        for trial_id, trial in list(self._known.items()):
            if trial.status == TuneTrial.PAUSED and self._director.study.trials[trial_id].state.ended:
                self._known.pop(trial_id)
                tune_controller.stop_trial(trial)


def _id(trial: TuneTrial) -> str:
    return trial.config["assignment"].trial_id


def run_stage(director: Director, dispatcher: str, run_dir: Path, token: str, fleet: Fleet | None = None) -> None:
    """Run one stage in one Tuner: the Director decides, Tune and the lanes act.

    dispatcher: the actor's name. token: marks the checkpoints that this run of the study writes. fleet: opens and releases
    lanes; None where they are all open.
    """
    quiet_tune()
    scheduler = StageScheduler(director, fleet)
    tuner = tune.Tuner(
        tune.with_resources(LaneTrainable, RELAY_RESOURCES),
        tune_config=tune.TuneConfig(
            search_alg=StageSearch(director, scheduler, dispatcher, run_dir, token),
            scheduler=scheduler,
            num_samples=-1,
            reuse_actors=True,
            trial_dirname_creator=lambda trial: trial.trial_id,
        ),
        run_config=tune.RunConfig(
            name=f"{director.context.stage.type}-{token}",
            storage_path=str(run_dir / ".ray"),
            verbose=0,
            callbacks=[NoProgress()],
        ),
    )
    with environment_with(relay_environment(director.num_lanes)):
        try:
            tuner.fit()
        except TuneError:  # as which Tune raises what the scheduler raised
            director.journal.raise_if_lost()
            raise
