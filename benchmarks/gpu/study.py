"""Does a study find the real edge of a GPU's memory, and survive what happens there? Each part writes a JSON line.

    python benchmarks/gpu/study.py [--device cpu|cuda] [--tiny] [--out FILE] [--limit-seconds 580] [--dir FOLDER]

The frontier of GPT-2 to out of memory; the same command once more, which repeats nothing; a driver killed while it trains, and
the same command until it ends with 0; a trial whose targets are out of range, and the one after it.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lines import HERE, Lines, ended, gpt, options

if TYPE_CHECKING:
    from orchestrator.study.state import Study

MIB = 2**20


def main() -> None:
    chosen = options(__doc__, 580)
    lines = Lines(chosen.out, chosen.limit_seconds)
    with tempfile.TemporaryDirectory(prefix="study-") as folder:
        studies = Studies(lines, chosen.tiny, chosen.device, Path(folder))
        for name, seconds, part in (
            ("the frontier to the edge", 200, studies.frontier),
            ("the same command repeats nothing", 40, studies.again),
            ("a driver killed while it trains", 150, studies.killed),
            ("targets out of range", 90, studies.out_of_range),
        ):
            lines.take(name, 1 if chosen.tiny else seconds, part)
    ended(lines)


class Studies:
    def __init__(self, lines: Lines, tiny: bool, device: str, folder: Path) -> None:
        self._lines, self._tiny, self._device, self._folder = lines, tiny, device, folder

    def _file(self, name: str, **keys: Any) -> Path:
        shape = gpt(self._tiny)
        # On a CPU oneDNN makes kernels of 0.5 MiB for each shape in bfloat16, and ends its process where one finds no room.
        precision = "float32" if self._device == "cpu" else "bfloat16"
        fields = {
            "name": name, **shape, "precision": precision, "evaluation_samples": 8, "sample_budget": 128,
            "placement": {"lanes": 1}, "optimizer": {"reference_batch_size": 8},
        }  # fmt: skip
        if self._device == "cpu":
            fields["placement"]["cpus_per_rank"] = 1
        path = self._folder / f"{name}.yaml"
        path.write_text(json.dumps(fields | keys))  # JSON is YAML
        return path

    def _command(self, file: Path) -> list[str]:
        run_dir = self._folder / file.stem
        return [sys.executable, "-m", "orchestrator", "run", str(file), "--dir", str(run_dir)]

    def _run(self, file: Path) -> subprocess.CompletedProcess[str]:
        seconds = max(10.0, self._lines.seconds_left())
        environment = {**os.environ, "BATCHSCOUT_CACHE": str(self._folder / "cache")}
        return subprocess.run(
            self._command(file), cwd=HERE, env=environment, capture_output=True, text=True, timeout=seconds
        )

    def _study(self, file: Path) -> Study:
        from orchestrator.study.journal import replay

        return replay(self._folder / file.stem / "journal.jsonl", file.stem)

    def frontier(self) -> dict[str, Any]:
        stage = {
            "type": "frontier", "activation_checkpointing": ["none", "full"], "smallest": 8 if not self._tiny else 2,
            "largest": 256 if not self._tiny else 32, "compile": [not self._tiny], "finalists": 1, "rounds": 1,
            "cross_entropy": ["whole"], "max_samples": 100_000,
        }  # fmt: skip
        limit = {"memory_limit": "16MiB"} if self._device == "cpu" else {}  # a GPU's own edge is what this is after
        self._frontier = self._file("frontier", stages=[stage], sample_budget=8192, **limit)
        started = time.monotonic()
        done = self._run(self._frontier)
        seconds = time.monotonic() - started
        trials = list(self._study(self._frontier).trials.values())
        for trial in trials:
            self._lines.say("probe", **told_of(trial))
        ran_out = {
            mode: sum(t.state == "out_of_memory" for t in trials if t.config.activation_checkpointing == mode)
            for mode in ("none", "full")
        }
        failed = [t.id for t in trials if t.state == "failed"]
        largest = {
            mode: max((t.config.micro_batch_size for t in trials if fits(t, mode)), default=None) for mode in ran_out
        }
        # In the 16 MiB of a CPU's run what a fresh process sets up beside its tensors counts, so that more run out there.
        few = self._device == "cpu" or max(ran_out.values()) <= 1
        return {
            "exit_code": done.returncode, "wall_seconds": seconds, "num_out_of_memory": ran_out, "largest": largest,
            "predicted": predicted_edges(self._study(self._frontier)),
            "expected": {"largest": "about what is predicted", "num_out_of_memory": "at most 1 in each mode, none failed"},
            "said": done.stderr[-500:] if done.returncode else "", "failed": failed,
            "ok": done.returncode == 0 and not failed and few,
        }  # fmt: skip

    def again(self) -> dict[str, Any]:
        before = starts(self._folder / "frontier")
        done = self._run(self._frontier)
        more = starts(self._folder / "frontier") - before
        return {"exit_code": done.returncode, "trials_started": more, "ok": done.returncode == 0 and not more}

    def killed(self) -> dict[str, Any]:
        """Kill the driver while a run of `train` trains, then give the same command until it ends."""
        size = 8 if not self._tiny else 2
        stages = [
            {"type": "throughput", "multiples": [1, 2], "rounds": 1, "max_rounds": 1},
            {"type": "train", "max_runs": 2},
        ]
        budget = 2048 if not self._tiny else 512
        file = self._file(
            "killed", stages=stages, batch={"micro_batch_size": size}, sample_budget=budget, compile=False
        )
        environment = {**os.environ, "BATCHSCOUT_CACHE": str(self._folder / "cache")}
        with subprocess.Popen(
            self._command(file), cwd=HERE, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        ) as driver:
            while driver.poll() is None and not trains(self._folder / file.stem) and self._lines.seconds_left() > 5:
                time.sleep(0.1)
            struck = driver.poll() is None
            driver.send_signal(signal.SIGKILL)
        codes = [self._run(file).returncode]
        trials = self._study(file).trials.values()
        states = sorted({str(trial.state) for trial in trials})
        return {"struck": struck, "exit_codes": codes, "states": states, "ok": struck and codes[-1] == 0}

    def out_of_range(self) -> dict[str, Any]:
        shape = gpt(self._tiny)
        model = {"target": "out_of_range:OutOfRange", "kwargs": shape["model"]["kwargs"]}
        grid = {"type": "grid", "micro_batch_size": [2, 3, 4], "compile": [False]}
        done = self._run(file := self._file("out_of_range", model=model, stages=[grid], sample_budget=24))
        trials = self._study(file).trials
        told = {name: [str(trial.state), trial.reason[:300]] for name, trial in trials.items()}
        states = [str(trial.state) for trial in trials.values()]
        said = done.stderr[-500:] if done.returncode == 2 else ""
        return {
            "exit_code": done.returncode,
            "said": said,
            "trials": told,
            "ok": states == ["complete", "failed", "complete"],
        }


def fits(trial: Any, mode: str) -> bool:
    return trial.state == "complete" and trial.config.activation_checkpointing == mode


def predicted_edges(study: Study) -> dict[str, float]:
    """Return the largest micro-batch of each mode that eager code was predicted to fit with into what the device had."""
    trials = study.trials.values()
    told = [trial.config.memory_limit_bytes or trial.metrics.get("device_memory_bytes") for trial in trials]
    limit = min(filter(None, told), default=None)
    found = {}
    for mode, peak in (study.facts.predicted_memory or {}).items():
        line = peak.lines[-1]
        if limit:
            found[mode] = round((0.95 * limit - line.base_bytes) / line.bytes_per_sample, 1)
    return found


def told_of(trial: Any) -> dict[str, Any]:
    """Return a probe's peaks, predicted, reserved and allocated, in MiB, and what it took."""
    keys = ("peak_memory_bytes", "peak_allocated_bytes", "device_memory_bytes")
    peaks = {key: round(trial.metrics[key] / MIB, 1) for key in keys if key in trial.metrics}
    predicted = trial.proposal.expected.get("predicted_memory_bytes")
    return {
        "id": trial.id, "state": str(trial.state), "mebibytes": peaks, "seconds_on_lane": round(trial.seconds, 2),
        "predicted_mebibytes": round(predicted / MIB, 1) if predicted else None,
        "compile_seconds": trial.metrics.get("compile_seconds"), "reason": trial.reason[:200],
    }  # fmt: skip


def starts(run_dir: Path) -> int:
    """Return how many trials the journal says were started."""
    return sum('"kind":"started"' in line.replace(" ", "") for line in lines_of(run_dir))


def trains(run_dir: Path) -> bool:
    started = (line.replace(" ", "") for line in lines_of(run_dir))
    return any('"kind":"started"' in line and "train-" in line for line in started)


def lines_of(run_dir: Path) -> list[str]:
    journal = run_dir / "journal.jsonl"
    return journal.read_text().splitlines() if journal.exists() else []


if __name__ == "__main__":
    main()
