"""Where the seconds of a study went. No other file adds them up."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from batchscout.orchestrator.study.state import Study
from batchscout.orchestrator.study.trial import Trial


@dataclass(frozen=True)
class LaneTime:
    """The seconds for which trials held a lane."""

    held: float
    training: float
    """In optimizer steps."""
    compiling: float

    @property
    def rest(self) -> float:
        """The seconds for building models, reading data, evaluating, saving and handing over."""
        return max(0.0, self.held - self.training - self.compiling)


def held_seconds(study: Study, trial: Trial) -> float:
    """Return for how long a trial has held a lane: where it still does, until the last event that is known, as its training is
    known until then."""
    running = (hold.began for hold in trial.holds if hold.ended is None)
    return trial.seconds + sum(max(0.0, (study.last or 0.0) - began) for began in running)


def lane_time(study: Study, trials: Sequence[Trial]) -> LaneTime:
    """Return where the time of these trials went. What an earlier study measured held no lane of this one."""
    ran = [trial for trial in trials if not trial.reused]
    return LaneTime(
        held=sum(held_seconds(study, trial) for trial in ran),
        training=sum(trial.metric("train_seconds") or 0.0 for trial in ran),
        compiling=sum(trial.metric("compile_seconds") or 0.0 for trial in ran),
    )


def time_split(study: Study) -> dict[str, float]:
    """Return the seconds of the whole study by what they were spent on.

    start-up: starting Ray and the lanes, before the first trial. measuring: steps of the short trials. training: steps
    of the full runs. rest: the time for which trials held their lanes beside these and compiling.
    """
    trials = list(study.trials.values())
    whole = lane_time(study, trials)
    return {
        "start-up": sum(study.startup_seconds),
        "compiling": whole.compiling,
        "measuring": lane_time(study, [trial for trial in trials if not trial.config.evaluations]).training,
        "training": lane_time(study, [trial for trial in trials if trial.config.evaluations]).training,
        "rest": whole.rest,
    }
