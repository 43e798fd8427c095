"""What Ray Tune holds while a stage runs: no more than what runs."""

from __future__ import annotations

import contextlib
import gc
import itertools
import math
import threading
from pathlib import Path
from typing import Any

import pytest

from batchscout.orchestrator.decisions.observer import Observer
from batchscout.orchestrator.study.journal import Journal
from batchscout.orchestrator.study.messages import Assignment, Message
from batchscout.orchestrator.study.state import Study
from batchscout.orchestrator.study.trial import Trial, TrialState
from tests.support.lane_player import director_of, study_of
from tests.support.processes import HANGS_AFTER_SECONDS

pytestmark = [pytest.mark.ray, pytest.mark.usefixtures("ray_cluster")]


@pytest.mark.parametrize("ending", ["complete", "pruned"])
def test_tune_holds_the_trials_that_run_and_one_actor_a_lane(tmp_path: Path, ending: str) -> None:
    import ray
    from ray._private.state import state

    from batchscout.orchestrator.execution.dispatcher import Dispatcher
    from batchscout.orchestrator.execution.tune import run_stage

    num_trials, num_lanes = 30, 3
    config = study_of(stages=[{"type": "grid", "learning_rate": [1e-4 * (i + 1) for i in range(num_trials)]}])
    actor: Any = ray.remote(Dispatcher)
    dispatcher = actor.options(name=ending, num_cpus=0, max_concurrency=1000).remote(num_lanes)
    together = threading.Barrier(num_lanes, timeout=HANGS_AFTER_SECONDS)
    args = [(dispatcher, f"lane-{i}", together, ending == "pruned") for i in range(num_lanes)]
    lanes = [threading.Thread(target=end_together, args=one, daemon=True) for one in args]
    for lane in lanes:
        lane.start()

    def relays() -> int:
        return sum(one["ActorClassName"].endswith("ResourceTrainable") for one in state.actor_table(None).values())

    before = relays()
    with Journal(tmp_path / "journal.jsonl", config.name) as journal:
        counter = CountsTuneTrials(journal.study, TrialState(ending))
        director = director_of(config, journal, "grid", num_lanes, observer=counter)
        run_stage(director, ending, tmp_path, "token")
        assert journal.study.count("grid", TrialState(ending)) == num_trials
    ray.get(dispatcher.close.remote())
    for lane in lanes:
        lane.join()
    ray.kill(dispatcher)
    assert max(counter.held) <= 2 * num_lanes, "those that run, and those that are being saved"
    assert relays() - before == num_lanes


class CountsTuneTrials(Observer):
    """Counts the trials that Tune holds whenever ten more have ended, as `ending`; in between, Tune has its own pace."""

    def __init__(self, study: Study, ending: TrialState) -> None:
        self._study, self._ending = study, ending
        self.held: list[int] = []

    def started(self, trial: Trial) -> None:
        self._count()

    def waits(self, trial: Trial) -> None:
        self._count()

    def ended(self, trial: Trial) -> None:
        self._count()

    def _count(self) -> None:
        from ray.tune.experiment import Trial as TuneTrial

        if self._study.count("grid", self._ending) % 10 == 0:
            gc.collect()
            self.held.append(sum(type(one) is TuneTrial for one in gc.get_objects()))


def end_together(dispatcher: Any, lane: str, together: threading.Barrier, diverge: bool) -> None:
    """A lane whose trials end at the moment when those of all lanes do; those that diverge when they are told to."""
    import ray

    for turn in itertools.count(1):
        assignment = ray.get(dispatcher.take.remote(lane, lane, turn))
        if assignment is None:
            return
        assert isinstance(assignment, Assignment)
        with contextlib.suppress(threading.BrokenBarrierError):  # then the counts say so
            together.wait()
        loss = math.nan if diverge else 3.0
        if diverge:
            ray.get(dispatcher.ask.remote(assignment.key, Message({"val_loss": loss}, evaluated=True)))
        outcome = "stopped" if diverge else "complete"
        ray.get(dispatcher.say.remote(assignment.key, Message({"val_loss": loss}, outcome=outcome)))
        ray.get(dispatcher.freed.remote(lane))
