"""What is struck: a study, its driver, and what its processes log; one study after another."""

from __future__ import annotations

import json
import random
from abc import ABC, abstractmethod
from pathlib import Path
from typing import Any

from batchscout.orchestrator.study.events import Event
from tests.faults.driver import Driver
from tests.support.processes import read
from tests.support.studies import TINY, grid

MICRO_BATCH_SIZE, SAMPLE_BUDGET, EVALUATIONS = 4, 768, 6
STUDY: dict[str, Any] = TINY | {
    "name": "struck",
    "sample_budget": SAMPLE_BUDGET,
    "evaluations": EVALUATIONS,
    "kill": {"min_relative_throughput": None},
    "stages": grid(learning_rate=[1e-4, 1e-3, 3e-3], pruner={"type": "asha", "min_samples": 128}),
}


class Scene(ABC):
    """A study with its driver; where it runs is said by those that derive from this."""

    driver: Driver

    def __init__(self, folder: Path, chance: random.Random) -> None:
        self.folder, self.chance = folder, chance
        self.log = folder / "unused"
        self.lane_was_killed = False
        """By this driver's life: a trial under which its lane died twice is at fault itself."""
        self.known: list[Event] = []
        """What the journal must hold whatever is struck next."""
        self.may_repeat_steps: set[str] = set()
        """The trials of which a checkpoint, or what the journal said of it, was damaged."""
        self.num_damaged_lines = 0
        """Of the journal: each must be told."""
        self.clocks_are_right = True
        """False once the times in the journal and in the log may be of clocks that were set."""

    def new_study(self) -> None:
        """Make the next one the scene's, in a directory of its own, and with a log of its own."""
        number = sum(1 for _ in self.folder.glob("study-*"))
        place = self.folder / f"study-{number}"
        place.mkdir()
        self.log = place / "batches.jsonl"
        model = {"target": "tests.support.studies:LogsItsBatches", "kwargs": {"log": str(self.log)}}
        self.driver = self.driver_of(STUDY | {"model": model}, place)
        self.known, self.may_repeat_steps, self.num_damaged_lines, self.clocks_are_right = [], set(), 0, True

    @abstractmethod
    def driver_of(self, study: dict[str, Any], place: Path) -> Driver: ...

    def start(self) -> None:
        self.driver.start()
        self.lane_was_killed = False

    def logged(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self.log.read_text().splitlines()] if self.log.exists() else []

    def rank(self) -> int | None:
        """The process that trains now."""
        logged = self.logged()
        ranks = {line["pid"] for line in logged if line.get("rank", -1) >= 0}  # and not who only looks at the model
        pids = [line["pid"] for line in logged if line["pid"] in ranks]
        return pids[-1] if pids and alive(pids[-1]) else None

    @abstractmethod
    def check_nothing_is_left_over(self) -> None: ...


def alive(pid: int) -> bool:
    return bool(title(pid))


def title(pid: int) -> str:
    """Empty of a process that has ended, reaped or not."""
    return read(Path(f"/proc/{pid}/cmdline"))
