"""Whole studies on real Ray, and what is left of them."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from batchscout.orchestrator.output.results import Ending
from batchscout.orchestrator.run import RunOptions, run_study
from batchscout.orchestrator.study.journal import replay
from batchscout.orchestrator.study.lines import read_lines
from batchscout.orchestrator.study.state import Study
from tests.support.studies import tiny_study


@dataclass(frozen=True)
class Ran:
    """A study that has ended, and where its models left the numbers of the processes that built them."""

    ending: Ending
    study: Study
    run_dir: Path
    changes: dict[str, Any]
    log: Path

    def journal(self) -> bytes:
        return (self.run_dir / "journal.jsonl").read_bytes()

    def kinds(self) -> list[str]:
        return [line.event.kind for line in read_lines(self.run_dir / "journal.jsonl")]

    def recommended(self) -> dict[str, Any]:
        return json.loads((self.run_dir / "recommendation.json").read_text())

    def lane_processes(self) -> list[str]:
        """In the order in which they built models. Before anything starts the driver builds one, and the process of the first pass."""
        _first_pass, *lanes = [number for number in self.log.read_text().split() if number != str(os.getpid())]
        return lanes


def run(folder: Path, *, remeasure: bool = True, **changes: Any) -> Ran:
    run_dir, config = folder / "run", tiny_study(**changes)
    ending = run_study(config, run_dir, RunOptions(remeasure=remeasure, quiet=True))
    return Ran(ending, replay(run_dir / "journal.jsonl", config.name), run_dir, changes, folder / "processes")


def run_leaving_traces(folder: Path, **changes: Any) -> Ran:
    """Of a model that says where it is."""
    model = {"target": "tests.support.studies:SaysWhereItIs", "kwargs": {"log": str(folder / "processes")}}
    return run(folder, model=model, **changes)


def states(study: Study) -> dict[str, str]:
    return {trial.id: str(trial.state) for trial in study.trials.values()}
