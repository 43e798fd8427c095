"""Runs a study's trials for real, one after the other in this process: the Director's decisions, `batchscout.trainers.loop.train`, and
files where a lane would write them. Ray alone is missing."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from batchscout.orchestrator.config.keys import StudyConfig
from batchscout.orchestrator.decisions.decision import Action
from batchscout.orchestrator.decisions.director import Director
from batchscout.orchestrator.execution.ranks import failure_reason, memory_reason
from batchscout.orchestrator.study.events import RunBegan
from batchscout.orchestrator.study.journal import Journal
from batchscout.orchestrator.study.messages import Message
from batchscout.orchestrator.study.run_directory import discard_what_nobody_needs
from batchscout.orchestrator.study.state import Study
from batchscout.orchestrator.study.trial import Trial
from batchscout.trainers.device.device import pick_device
from batchscout.trainers.device.memory import memory_of
from batchscout.trainers.device.out_of_memory import is_out_of_memory
from batchscout.trainers.loop import train
from batchscout.trainers.report import Answer, Report
from tests.support.lane_player import director_of, next_trial

Metrics = dict[str, float]


def run_for_real(config: StudyConfig, run_dir: Path, measured: Callable[[Metrics], Metrics] = dict) -> Study:
    """Every stage to its conclusion, up to one that ends the study. `measured` may put other times in the place of this machine's."""
    with Journal(run_dir / "journal.jsonl", config.name) as journal:
        journal.append(RunBegan(token="local"))
        for stage in config.stages:
            director = director_of(config, journal, stage.type)
            while (trial := next_trial(director)) is not None:
                director.on_started(trial.id)
                directory = run_dir / "trials" / trial.id
                memory_of(pick_device()).without_after_effects(
                    functools.partial(_train, director, trial, directory, measured)
                )
            director.conclude()
            discard_what_nobody_needs(run_dir, journal.study.of_stage(stage.type))
            if not journal.study.conclusions[stage.type].ok:
                break
        return journal.study


def _train(director: Director, trial: Trial, directory: Path, measured: Callable[[Metrics], Metrics]) -> None:
    last = Message()

    def report(said: Report) -> Answer:
        nonlocal last
        message = Message(measured(said.metrics), said.rungs, said.steps, evaluated=said.kind == "milestone")
        if said.kind == "end":
            last = replace(message, outcome="complete")
            return Answer.GO_ON
        decision = director.on_message(trial.id, message)
        return Answer.GO_ON if decision.action is Action.GO_ON else Answer.STOP

    try:
        if train(trial.config, report, directory) is Answer.STOP:
            return
    except Exception as error:
        if is_out_of_memory(error):
            last = Message(outcome="out_of_memory", reason=memory_reason(str(error), trial.config))
        else:
            last = Message(outcome="failed", reason=failure_reason(error))
    director.on_message(trial.id, last)
