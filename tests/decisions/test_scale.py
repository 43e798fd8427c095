"""What the driver asks of a study at every event."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from batchscout.orchestrator.config.trial import base_trial
from batchscout.orchestrator.stages import stage_of
from batchscout.orchestrator.study.events import Ended, Evaluated, Event, Paused, Promoted, RunBegan, Started, proposed
from batchscout.orchestrator.study.journal import Journal
from batchscout.orchestrator.study.state import Study
from batchscout.orchestrator.study.trial import Proposal, TrialState
from tests.support.lane_player import Player, director_of, know, study_of
from tests.support.worlds import TIMED, bowl, curves

CONFIG = base_trial(study_of(), None)


def random_events(draw: random.Random, number: int) -> Iterator[Event]:
    """What happens to trials of two stages, in any order: a journal's are a few of these."""
    names: list[str] = []
    for _ in range(number):
        stage, name = draw.choice(["train", "grid"]), draw.choice(names) if names else ""
        if not names or draw.random() < 0.2:
            names.append(f"{stage}-{len(names)}")
            yield proposed(Proposal(names[-1], stage, CONFIG, candidate=names[-1]))
        elif draw.random() < 0.02:
            yield RunBegan(token="again")
        else:
            yield draw.choice(EVENTS)(name, draw.choice([1, 2, 4]), draw)


EVENTS: list[Callable[[str, int, random.Random], Event]] = [
    lambda name, rung, draw: Started(id=name),
    lambda name, rung, draw: Started(id=name),
    lambda name, rung, draw: Evaluated(id=name, metrics={"samples_seen": rung}, rungs={rung: 3.0}),
    lambda name, rung, draw: Paused(id=name, rung=rung, reason="", seconds=1.0),
    lambda name, rung, draw: Promoted(id=name, rung=rung, reason=""),
    lambda name, rung, draw: Promoted(id=name, rung=rung, reason=""),
    lambda name, rung, draw: Ended(
        id=name, state=draw.choice(ENDS), cause=None, reason="", metrics={"samples_seen": rung}, seconds=1.0
    ),
]
ENDS = [state for state in TrialState if state.ended]


@pytest.mark.parametrize("seed", range(5))
def test_what_is_found_by_state_is_what_a_look_at_all_trials_finds(seed: int) -> None:
    study = Study("s")
    for event in random_events(random.Random(seed), 400):
        study.apply(event)
        for stage in ("train", "grid", "frontier"):
            for state in TrialState:
                scanned = [trial for trial in study.of_stage(stage) if trial.state is state]
                scanned.sort(key=lambda trial: -len(trial.promoted))
                assert study.in_state(stage, state) == scanned, event
                assert study.furthest(stage, state) == next(iter(scanned), None)
                assert study.count(stage, state) == len(scanned)
    assert {trial.state for trial in study.trials.values()} == set(TrialState), "some of each"


def test_who_is_asked_once_would_never_answer_otherwise(tmp_path: Path) -> None:
    stage = {"type": "grid", "micro_batch_size": [4, 8], "learning_rate": [1e-3, 2e-3]}
    config = study_of(stages=[stage])
    assert stage_of(config.stages[0]).proposes_once
    with Journal(tmp_path / "journal.jsonl", config.name) as journal:
        director = director_of(config, journal, "grid")
        wanted = director.proposals()
        player = Player(director, curves)
        player.before_message = lambda: check(director.proposals())

        def check(now: list[Proposal]) -> None:
            assert now == wanted

        study = player.play()
    assert len(wanted) == len(study.of_stage("grid")) > 1


@pytest.mark.parametrize("stage", [{"type": "train", "max_runs": 6}, {"type": "learning_rate"}])
def test_who_is_asked_again_never_takes_back_what_it_asked_for(tmp_path: Path, stage: dict[str, Any]) -> None:
    config = study_of(stages=[stage], evaluations=1)
    assert not stage_of(config.stages[0]).proposes_once
    answers: list[list[Proposal]] = []
    with Journal(tmp_path / "journal.jsonl", config.name) as journal:
        know(journal, found=TIMED)
        director = director_of(config, journal, stage["type"])
        player = Player(director, bowl)
        player.before_message = lambda: answers.append(director.proposals())
        study = player.play()
    assert all(later[: len(earlier)] == earlier for earlier, later in itertools.pairwise(answers))
    assert len(answers[0]) < len(answers[-1]) == len(study.of_stage(stage["type"])), "it asked for more"
