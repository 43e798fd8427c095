"""The driver against the number of trials: seconds per trial, memory, and the time to go on from the journal.

    python benchmarks/driver_scale.py [--device cpu|cuda] [--quick]

Studies of 100 and 1,000 trials, one after the other in one process and one Ray cluster: the real Director, journal,
scheduler, Tune, Tune actors and Dispatcher, without training: NUM_LANES lanes answer every assignment at once, as a trial
does that has completed. The device makes no difference. Each study is one grid stage of as many learning rates, proposed at
its start, so every event is decided in a study of the full number. Seconds per trial are wall-clock over the whole study,
Tune's start and end included; of the first and the last 100 alone, between their ends. Memory is the driver's resident set
when the last trial ends, and its growth that since the end of the study of 100. Going on is what the same command does
first when run again: replay the journal, and ask the stage what is left to do.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import tempfile
import time
import uuid
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from side_by_side import machine, options

from batchscout.orchestrator.config.keys import StudyConfig
from batchscout.orchestrator.config.load import parse_study
from batchscout.orchestrator.decisions.director import Director
from batchscout.orchestrator.decisions.observer import Observer
from batchscout.orchestrator.execution.session import start_ray
from batchscout.orchestrator.execution.tune import run_stage
from batchscout.orchestrator.stages.context import StageContext
from batchscout.orchestrator.study.events import RunBegan
from batchscout.orchestrator.study.journal import Journal
from batchscout.orchestrator.study.messages import Message
from batchscout.orchestrator.study.trial import Trial

SIZES = (100, 1_000)
NUM_LANES = 4
# The Ray cluster has one CPU for every lane, however many the machine has.
NUM_CPUS = NUM_LANES
EDGE = 100
STUDY: dict[str, Any] = {
    "name": "scale",
    "model": {"target": "gpt", "kwargs": {"num_layers": 1, "num_heads": 2, "hidden_dim": 32}},
    "data": {"target": "python_stdlib", "kwargs": {"seq_len": 32, "tokenizer": "bytes"}},
    "sample_budget": 8,
}
# A trial that has trained reports as many figures.
METRICS = {f"figure_{i}": i / 7 for i in range(20)} | {"samples_seen": 8.0, "val_loss": 3.0, "tokens_per_second": 1e4}


@dataclass
class Course(Observer):
    """One study, watched from the driver."""

    began: float = field(default_factory=time.monotonic)
    ends: list[float] = field(default_factory=list)
    """When each trial ended."""
    cpu_began: float = field(default_factory=time.process_time)
    cpu_ends: list[float] = field(default_factory=list)
    """How many CPU seconds the driver had used by then. Other work on the machine does not count."""
    resident_bytes: int = 0
    resume_seconds: float = 0.0

    def ended(self, trial: Trial) -> None:
        self.ends.append(time.monotonic())
        self.cpu_ends.append(time.process_time())
        self.resident_bytes = resident_bytes()

    @property
    def seconds_per_trial(self) -> float:
        return (self.ends[-1] - self.began) / len(self.ends)

    @property
    def cpu_seconds_per_trial(self) -> float:
        return (self.cpu_ends[-1] - self.cpu_began) / len(self.ends)


def pace(ends: list[float]) -> float:
    """Return the mean seconds from one end to the next."""
    return (ends[-1] - ends[0]) / (len(ends) - 1)


def main() -> None:
    chosen = options(__doc__)
    sizes = SIZES[:2] if chosen.quick else SIZES
    with tempfile.TemporaryDirectory() as folder:
        start_ray(study_of(1), None, Path(folder), num_cpus=NUM_CPUS)
        courses = {size: run(size, Path(folder) / str(size)) for size in sizes}
    _print_table(courses)
    print(json.dumps(_last_line(courses)))


def study_of(num_trials: int) -> StudyConfig:
    rates = [1e-6 * (i + 1) for i in range(num_trials)]
    return parse_study(STUDY | {"stages": [{"type": "grid", "learning_rate": rates}]}, "the benchmark's study")


def run(num_trials: int, run_dir: Path) -> Course:
    """Run the study from its first trial to its last, then open it again to time how long resuming takes."""
    config, course = study_of(num_trials), Course()
    run_dir.mkdir()
    with Journal(run_dir / "journal.jsonl", config.name) as journal, lanes() as dispatcher:
        journal.append(RunBegan(token="scale"))
        course.began, course.cpu_began = time.monotonic(), time.process_time()
        director = _director(config, journal, course)
        director.advance()
        assert not director.is_finished()
        run_stage(director, dispatcher, run_dir, "scale")
    assert len(course.ends) == num_trials
    began = time.monotonic()
    with Journal(run_dir / "journal.jsonl", config.name) as journal:
        again = _director(config, journal, Observer())
        again.advance()
        assert again.is_finished()
        course.resume_seconds = time.monotonic() - began
    print(f"{num_trials:,} trials: {course.seconds_per_trial * 1e3:.1f} ms each", flush=True)
    return course


def _director(config: StudyConfig, journal: Journal, observer: Observer) -> Director:
    context = StageContext(config.stages[0], config, journal.study)
    return Director(context, journal, [observer], NUM_LANES)


@contextlib.contextmanager
def lanes() -> Iterator[str]:
    """A Dispatcher, by its name, and lanes that take from it as `batchscout.orchestrator.execution.ranks.serve` does."""
    import ray

    from batchscout.orchestrator.execution.dispatcher import Dispatcher

    name = f"dispatcher-{uuid.uuid4().hex[:8]}"
    actor: Any = ray.remote(Dispatcher)
    dispatcher = actor.options(name=name, num_cpus=0, max_concurrency=1000).remote(NUM_LANES)
    answering = ray.remote(_answer_at_once).remote(dispatcher)
    try:
        yield name
    finally:
        ray.get(dispatcher.close.remote())
        ray.get(answering)
        ray.kill(dispatcher)


def _answer_at_once(dispatcher: Any) -> None:
    """All lanes, each a thread. Their first trials end together, when the relays of all have started."""
    import threading

    import ray

    together = threading.Barrier(NUM_LANES)

    def serve(lane: str) -> None:
        for turn in itertools.count(1):
            assignment: Any = ray.get(dispatcher.take.remote(lane, lane, turn))
            if assignment is None:
                return
            if turn == 1:
                together.wait()
            ray.get(dispatcher.say.remote(assignment.key, Message(METRICS, outcome="complete")))
            ray.get(dispatcher.freed.remote(lane))

    threads = [threading.Thread(target=serve, args=(f"lane-{i}",)) for i in range(NUM_LANES)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def resident_bytes() -> int:
    """Return the resident memory of this process, which is the driver."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def _print_table(courses: dict[int, Course]) -> None:
    import ray

    print(f"{machine()}, ray {ray.__version__}; {NUM_LANES} lanes")
    print(f"{'':>8} {'milliseconds per trial':^30} {'of that the driver on a CPU':^30} {'MiB':>7} {'':>7} {'going':>7}")
    paces = f"{'all':>9} {f'first {EDGE}':>10} {f'last {EDGE}':>10}"
    print(f"{'trials':>8} {paces} {paces} {'driver':>7} {'growth':>7} {'on, s':>7}")
    for size, course in courses.items():
        seconds = [course.seconds_per_trial, pace(course.ends[:EDGE]), pace(course.ends[-EDGE:])]
        seconds += [course.cpu_seconds_per_trial, pace(course.cpu_ends[:EDGE]), pace(course.cpu_ends[-EDGE:])]
        columns = " ".join(f"{1e3 * one:>{9 + (i % 3 > 0)}.1f}" for i, one in enumerate(seconds))
        memory = f"{course.resident_bytes / 2**20:>7.0f} {_growth(courses, size) / 2**20:>7.1f}"
        print(f"{size:>8,} {columns} {memory} {course.resume_seconds:>7.2f}")


def _growth(courses: dict[int, Course], size: int) -> int:
    return courses[size].resident_bytes - courses[SIZES[0]].resident_bytes


def _last_line(courses: dict[int, Course]) -> dict[str, Any]:
    largest = max(courses)
    return {
        "seconds_per_trial": {str(size): courses[size].seconds_per_trial for size in courses if size > SIZES[0]},
        "memory_growth_bytes": _growth(courses, largest),
        "resume_seconds": courses[largest].resume_seconds,
    }


if __name__ == "__main__":
    main()
