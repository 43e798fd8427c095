"""Studies of up to 100,000 trials on 1,000 lanes, without Ray: CPU seconds per decision, memory, the journal's size, what reading takes.

    python benchmarks/thousand_lanes.py [--device cpu|cuda] [--quick]

Each study is a grid of as many learning rates, with no pruner or under promotion ASHA with two rungs. The real Director decides in one
process, with a real journal; whoever would train says at once what a run has come to: a loss that is a smooth function of the rate and the
samples, at each rung and at the end. All lanes run all the time, each trial has its turn, and a message is one report of one of them: the
Director judges it, journals it, and starts what is next on whatever lane is free. CPU seconds do not count other work on the machine;
they are those of a whole study by its messages, and of its first and last tenth. The journal lies in memory, so the disk's fsync is left
out. `driver_bytes` is what the process holds at the end. Then the verbs read the largest study, each in a process of its own.

`reports_a_minute` is how many reports one driver can answer: in training a lane makes one every few minutes.
"""

from __future__ import annotations

import json
import math
import tempfile
import time
from collections import deque
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml
from driver_scale import resident_bytes
from reading_scale import STUDY, VERBS, cost_of
from side_by_side import machine, options

from orchestrator.config.keys import StudyConfig
from orchestrator.config.load import parse_study
from orchestrator.decisions.decision import Action
from orchestrator.decisions.director import Director
from orchestrator.decisions.observer import Observer
from orchestrator.stages.context import StageContext
from orchestrator.study.events import RunBegan
from orchestrator.study.journal import Journal
from orchestrator.study.messages import Message
from orchestrator.study.trial import Trial

NUM_LANES = 1_000
UNPRUNED = (1_000, 10_000, 100_000)
PRUNED = (300, 1_000)
"""Every message has each rung judged anew, by all that have come there: seconds per message grow with the trials."""
FIRST_RUNG = 16
IN_MEMORY = Path("/dev/shm")
ASHA = {"type": "asha", "min_samples": FIRST_RUNG, "reduction_factor": 2}
FIGURES: dict[str, float] = {f"figure_{i}": i / 7 for i in range(20)} | {"tokens_per_second": 1e4, "step_seconds": 0.1}
"""A trial that has trained reports as many."""


@dataclass
class Course:
    """What a study took, by its messages."""

    cpu_seconds: list[float] = field(default_factory=list)
    """When each was answered, and the lane had its next trial: of the process, from the study's start."""
    longest_seconds: float = 0.0
    """The most CPU seconds of any message."""
    resident_bytes: int = 0


def main() -> None:
    chosen = options(__doc__)
    unpruned, pruned, num_lanes = ((300, 600), (200,), 50) if chosen.quick else (UNPRUNED, PRUNED, NUM_LANES)
    print(f"{machine()}; {num_lanes:,} lanes")
    last_line: dict[str, Any] = {}
    for name, sizes, pruner in (("no_pruner", unpruned, {"type": "none"}), ("asha", pruned, ASHA)):
        for num_trials in sizes:
            with tempfile.TemporaryDirectory(dir=IN_MEMORY if IN_MEMORY.is_dir() else None) as folder:
                found = figures(played(study_of(num_trials, pruner), Path(folder), num_lanes), Path(folder))
                if num_trials == max(*unpruned, *pruned):
                    last_line["reading"] = reading(Path(folder))
            last_line |= {f"{name}, {num_trials} trials": found}
            print(f"{name}, {num_trials:,} trials: {found['milliseconds_per_message']:.2f} ms a message", flush=True)
    print(json.dumps(last_line))


def study_of(num_trials: int, pruner: dict[str, Any]) -> StudyConfig:
    rates = [1e-6 * (i + 1) for i in range(num_trials)]
    stage = {"type": "grid", "learning_rate": rates, "pruner": pruner}
    return parse_study(STUDY | {"stages": [stage], "evaluations": 4}, "the benchmark's study")


def played(config: StudyConfig, run_dir: Path, num_lanes: int) -> Course:
    """Run the study from its first trial to its conclusion."""
    (run_dir / "study.yaml").write_text(yaml.safe_dump(config.model_dump(mode="json"), sort_keys=False))
    course, running = Course(), deque[Trial]()
    with Journal(run_dir / "journal.jsonl", config.name) as journal:
        journal.append(RunBegan(token="scale"))
        director = Director(StageContext(config.stages[0], config, journal.study), journal, Observer(), num_lanes)
        began = before = time.process_time()
        fill(director, running)
        while running:
            trial = running.popleft()
            message = report_of(director.study.trials[trial.id])
            decision = director.on_message(trial.id, message)
            if message.outcome is None and decision.action is Action.GO_ON:
                running.append(trial)
            fill(director, running)
            now = time.process_time()
            course.longest_seconds = max(course.longest_seconds, now - before) if course.cpu_seconds else 0.0
            course.cpu_seconds.append(now - began)
            before = now
        assert director.is_finished()
        director.conclude()
        course.resident_bytes = resident_bytes()
    return course


def fill(director: Director, running: deque[Trial]) -> None:
    """Start what is next on every free lane, as Tune asks for it."""
    director.advance()
    while (trial := director.next_trial()) is not None:
        director.on_started(trial.id)
        running.append(trial)
        director.advance()


def report_of(trial: Trial) -> Message:
    """Return what a run says next: at its next rung, or at its end."""
    before = max(trial.rungs, default=0)
    samples = next((rung for rung in trial.config.rungs if rung > before), trial.config.sample_budget)
    metrics = FIGURES | {"samples_seen": float(samples), "val_loss": loss_at(trial.config.learning_rate, samples)}
    if samples == trial.config.sample_budget:
        return Message(metrics, outcome="complete")
    return Message(metrics, (samples,), evaluated=True)


def loss_at(learning_rate: float, samples: int) -> float:
    return 3 + 0.1 * math.log(learning_rate / 0.03) ** 2 + 10 / samples


def figures(course: Course, run_dir: Path) -> dict[str, float]:
    seconds, tenth = course.cpu_seconds, len(course.cpu_seconds) // 10
    per_message = seconds[-1] / len(seconds)
    return {
        "messages": len(seconds),
        "milliseconds_per_message": 1e3 * per_message,
        "milliseconds_per_message_first_tenth": 1e3 * seconds[tenth] / tenth,
        "milliseconds_per_message_last_tenth": 1e3 * (seconds[-1] - seconds[-tenth]) / tenth,
        "longest_message_milliseconds": 1e3 * course.longest_seconds,
        "reports_a_minute": int(60 / per_message),
        "driver_bytes": course.resident_bytes,
        "journal_bytes": (run_dir / "journal.jsonl").stat().st_size,
    }


def reading(run_dir: Path) -> dict[str, Any]:
    costs = {verb: cost_of(verb, run_dir) for verb in VERBS}
    return {
        "cpu_seconds": {verb: cost.cpu_seconds for verb, cost in costs.items()},
        "peak_bytes": {verb: cost.peak_bytes for verb, cost in costs.items()},
        "report_bytes": (run_dir / "report.html").stat().st_size,
    }


if __name__ == "__main__":
    main()
