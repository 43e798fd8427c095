"""What must hold whatever was struck: nothing is lost, nothing doubled, and nothing decided otherwise."""

from __future__ import annotations

import itertools
import json
import zlib
from collections.abc import Iterator
from typing import Any

from batchscout.orchestrator.config.load import parse_study
from batchscout.orchestrator.config.trial import base_trial
from batchscout.orchestrator.study.events import Evaluated, Event, Noticed, Started
from batchscout.trainers.data.batches import fetch
from batchscout.trainers.data.order import SampleOrder
from batchscout.trainers.notices import NoticeKind
from tests.faults.driver import Driver, check_nothing_was_lost_or_doubled
from tests.faults.scene import MICRO_BATCH_SIZE, SAMPLE_BUDGET, STUDY, Scene
from tests.support.map_style import map_style_sets


def check_journal_only_grew(scene: Scene) -> None:
    assert scene.driver.events()[: len(scene.known)] == scene.known, "the journal's past changed"
    check_nothing_was_lost_or_doubled(scene.driver.events(), scene.driver.study())


def check_it_ended_as_undisturbed(scene: Scene, undisturbed: Driver) -> None:
    study, reference = scene.driver.study(), undisturbed.study()
    for trial_id, trial in reference.trials.items():
        assert study.trials[trial_id].state == trial.state, study.trials[trial_id].reason
        losses = [point["val_loss"] for point in study.trials[trial_id].history]
        assert losses == [point["val_loss"] for point in trial.history], "to the bit"
    assert recommended(scene.driver) == recommended(undisturbed)
    check_nothing_was_lost_or_doubled(scene.driver.events(), scene.driver.study())
    told = [event.notice for event in scene.driver.events() if isinstance(event, Noticed)]
    assert told.count(NoticeKind.DAMAGED_JOURNAL) == scene.num_damaged_lines, "every damaged line is told, once"


def recommended(driver: Driver) -> dict[str, Any]:
    found = json.loads((driver.run_dir / "recommendation.json").read_text())
    keys = ("micro_batch_size", "gradient_accumulation_steps", "learning_rate", "activation_checkpointing", "compile")
    return {key: found[key] for key in keys}


def check_nothing_was_trained_twice(scene: Scene, order: list[int]) -> None:
    """Every process trained a run of consecutive batches, from the last evaluation that the journal had, or later.

    A trial that has lost a checkpoint may begin anywhere before. What came before what is told by their times.
    """
    if not scene.clocks_are_right:
        return
    for segment in segments(scene.logged()):
        if not set(order).intersection(segment["batches"]):
            continue  # a process warms up on a batch of its own
        places = [order.index(batch) for batch in segment["batches"]]
        assert places == list(range(places[0], places[0] + len(places)))
        trial = last_started(scene.driver.events(), segment["time"])
        known = [
            event.metrics["samples_seen"] or 0
            for event in scene.driver.events()
            if isinstance(event, Evaluated) and event.id == trial and event.time < segment["time"]
        ]
        is_further = places[0] * MICRO_BATCH_SIZE >= max(known, default=0)
        assert is_further or trial in scene.may_repeat_steps, f"{trial} was trained again"


def segments(lines: list[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """{time, batches} of every run of a trial in a process: what follows a model's being built there."""
    for _, mine in itertools.groupby(sorted(lines, key=lambda line: line["pid"]), key=lambda line: line["pid"]):
        runs: list[dict[str, Any]] = []
        for line in mine:
            if "batch" in line:
                runs[-1]["batches"].append(line["batch"])
            else:
                runs.append({"time": line["time"], "batches": []})
        yield from (run for run in runs if run["batches"])


def last_started(events: list[Event], before: float) -> str:
    return [event.id for event in events if isinstance(event, Started) and event.time < before][-1]


def batches_in_order() -> list[int]:
    """What `LogsItsBatches` logs of a run from its first step to its last."""
    trial = base_trial(parse_study(STUDY, "the harness's study"), None)
    train_set, _ = map_style_sets(trial.data)
    order = SampleOrder(len(train_set), trial.seed)
    starts = range(0, SAMPLE_BUDGET, MICRO_BATCH_SIZE)
    batches = [fetch(train_set, order.indices(range(start, start + MICRO_BATCH_SIZE))) for start in starts]
    return [zlib.crc32(batch["input_ids"].numpy().tobytes()) for batch in batches]
