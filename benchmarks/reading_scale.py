"""Reading a study of 1,000 trials: CPU seconds and memory of the replay, `status`, `status --json` and `report`.

    python benchmarks/reading_scale.py [--device cpu|cuda] [--quick]

The study is a grid of as many learning rates. Each trial was evaluated once with 27 figures; of three, two completed and one
was cut at a rung. Its journal is written at once, by the code that a driver writes it with. Each verb is a process of its
own, its start and imports included; they take turns. CPU seconds do not count other work on the machine; memory is the
most that was resident. Reading needs no device.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import yaml
from side_by_side import machine, options

from batchscout.orchestrator.config.load import parse_study
from batchscout.orchestrator.stages import stage_of
from batchscout.orchestrator.stages.context import StageContext
from batchscout.orchestrator.study.causes import Cause
from batchscout.orchestrator.study.events import (
    Concluded,
    Ended,
    Evaluated,
    Event,
    RunBegan,
    StageBegan,
    Started,
    proposed,
)
from batchscout.orchestrator.study.state import Study
from batchscout.orchestrator.study.trial import Metrics, TrialState
from batchscout.trainers.lines import line_of

NUM_TRIALS, NUM_ROUNDS = 1_000, 7
STUDY: dict[str, Any] = {
    "name": "scale",
    "model": {"target": "gpt", "kwargs": {"num_layers": 1, "num_heads": 2, "hidden_dim": 32}},
    "data": {"target": "python_stdlib", "kwargs": {"seq_len": 32, "tokenizer": "bytes"}},
    "sample_budget": 64,
}
FIGURES = {f"figure_{i}": i / 7 for i in range(20)} | {
    "tokens_per_second": 1e4,
    "train_seconds": 2.0,
    "compile_seconds": 1.0,
    "step_seconds": 0.1,
    "peak_memory_bytes": 2e8,
}
# Told by the process itself: what the kernel says of a child that has ended includes what its parent held when it began.
TELL_PEAK = """
import atexit, sys
from pathlib import Path
@atexit.register
def tell_peak():
    peak = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM:"))
    print(int(peak.split()[1]) * 1024, file=sys.stderr)
"""
REPLAY = """
from batchscout.orchestrator.study.run_directory import load_stored_study
from batchscout.orchestrator.study.journal import replay
run_dir = Path(sys.argv[1])
replay(run_dir / "journal.jsonl", load_stored_study(run_dir / "study.yaml").name)
"""
VERB = "from batchscout.orchestrator.cli import main; main({} + sys.argv[1:])"
VERBS = {
    "replay": REPLAY,
    "status": VERB.format(["status"]),
    "status_json": VERB.format(["status", "--json"]),
    "report": VERB.format(["report"]),
}


@dataclass(frozen=True)
class Cost:
    cpu_seconds: float
    peak_bytes: int


def main() -> None:
    chosen = options(__doc__)
    num_trials, rounds = (1_000, 1) if chosen.quick else (NUM_TRIALS, NUM_ROUNDS)
    with tempfile.TemporaryDirectory() as folder:
        write_study(Path(folder), num_trials)
        turns = [{verb: cost_of(verb, Path(folder)) for verb in VERBS} for _ in range(rounds)]
    print(f"{machine()}; {num_trials:,} trials, median of {rounds} [lowest, highest]")
    for verb in VERBS:
        seconds = [turn[verb].cpu_seconds for turn in turns]
        low, middle, high = min(seconds), statistics.median(seconds), max(seconds)
        memory = statistics.median(turn[verb].peak_bytes for turn in turns) / 2**20
        print(f"{verb:<12} {middle:>6.2f} s [{low:.2f}, {high:.2f}] {memory:>6.0f} MiB")
    print(json.dumps(_last_line(turns)))


def write_study(run_dir: Path, num_trials: int) -> None:
    """Leave a run directory as a driver does that has run the whole study."""
    rates = [1e-6 * (i + 1) for i in range(num_trials)]
    config = parse_study(STUDY | {"stages": [{"type": "grid", "learning_rate": rates}]}, "the benchmark's study")
    stage, study = stage_of(config.stages[0]), Study(config.name)
    context = StageContext(config.stages[0], config, study)
    (run_dir / "study.yaml").write_text(yaml.safe_dump(config.model_dump(mode="json"), sort_keys=False))
    with (run_dir / "journal.jsonl").open("wb") as file:
        _put(file, study, RunBegan(token="scale"), StageBegan(stage="grid"))
        wanted = stage.propose(context)
        _put(file, study, *map(proposed, wanted))
        for number, one in enumerate(wanted):
            _put(file, study, *_course(one.id, number, loss=3 + abs(number / num_trials - 1 / 3)))
        found = stage.conclude(context)
        _put(file, study, Concluded(stage="grid", ok=True, reason=found.reason, findings=found.findings))


def _course(trial_id: str, number: int, loss: float) -> list[Event]:
    """Return what becomes of a trial: one of three is cut."""
    half, whole = _figures(32, loss), _figures(64, loss)
    is_cut = number % 3 == 2
    state, cause = (TrialState.PRUNED, Cause.RUNG) if is_cut else (TrialState.COMPLETE, None)
    reason = f"place {number} at rung 32; the best third goes on, whose val loss is at most 3.2" if is_cut else ""
    return [
        Started(id=trial_id),
        Evaluated(id=trial_id, metrics=half, rungs={32: loss}),
        Ended(id=trial_id, state=state, cause=cause, reason=reason, metrics={} if is_cut else whole, seconds=2.5),
    ]


def _figures(samples_seen: int, loss: float) -> Metrics:
    return {**FIGURES, "loss": loss, "val_loss": loss, "samples_seen": float(samples_seen)}


def _put(file: BinaryIO, study: Study, *events: Event) -> None:
    for event in events:
        file.write(line_of(event.model_dump_json().encode()))
        study.apply(event)


def cost_of(verb: str, run_dir: Path) -> Cost:
    """Return what a process of its own takes for this verb."""
    command = [sys.executable, "-c", TELL_PEAK + VERBS[verb], str(run_dir)]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        said = process.stderr.read()
        _, status, usage = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
    assert process.returncode == 0, said
    return Cost(usage.ru_utime + usage.ru_stime, int(said))


def _last_line(turns: list[dict[str, Cost]]) -> dict[str, dict[str, float]]:
    return {
        "cpu_seconds": {verb: statistics.median(turn[verb].cpu_seconds for turn in turns) for verb in VERBS},
        "peak_bytes": {verb: statistics.median(turn[verb].peak_bytes for turn in turns) for verb in VERBS},
    }


if __name__ == "__main__":
    main()
