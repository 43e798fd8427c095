"""Whole studies through `batchscout run`: one as a user has it, the real edge of a GPU's memory, and what may happen there.

Each has a folder of its own below the setting's, and a process's environment names it, so that what it leaves behind is found.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tarfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lines import HERE, Found, Setting, gpt

if TYPE_CHECKING:
    from batchscout.orchestrator.study.state import Study

MIB = 2**20
MOST_SECONDS_TO_END = 10.0
"""How long the last processes of a study may take to be gone after it."""


class AStudy:
    """A study file, the folder that it is run in, and what its journal tells."""

    def __init__(self, setting: Setting, name: str, **keys: Any) -> None:
        self._setting, self.run_dir = setting, setting.folder / "studies" / name
        self._file = setting.folder / "studies" / f"{name}.yaml"
        # On a CPU oneDNN makes kernels of 0.5 MiB for each shape in bfloat16, and ends its process where one finds no room.
        precision = "float32" if setting.device == "cpu" else "bfloat16"
        fields: dict[str, Any] = {
            "name": name, "precision": precision, "evaluation_samples": 8, "placement": {"lanes": 1},
            "optimizer": {"reference_batch_size": 8},
        }  # fmt: skip
        if setting.device == "cpu":
            fields["placement"]["cpus_per_rank"] = 1
        self._file.parent.mkdir(exist_ok=True)
        self._file.write_text(json.dumps(fields | keys))  # JSON is YAML
        self._environment = {"BATCHSCOUT_CACHE": str(setting.folder / "cache"), "STUDY_OF_THE_LINE": name}

    def command(self) -> list[str]:
        return [sys.executable, "-m", "batchscout", "run", str(self._file), "--dir", str(self.run_dir)]

    def run(self) -> subprocess.CompletedProcess[str]:
        """Run it or go on with it, until its end or the line's; what it printed is kept beside its directory."""
        done = self._setting.command(self.command(), self._environment)
        (self.run_dir.parent / f"{self.run_dir.name}.txt").write_text(done.stdout + done.stderr)
        return done

    @contextmanager
    def running(self) -> Iterator[subprocess.Popen[bytes]]:
        """Start it, and leave it to whoever asks."""
        nothing, environment = subprocess.DEVNULL, os.environ | self._environment
        with subprocess.Popen(self.command(), cwd=HERE, env=environment, stdout=nothing, stderr=nothing) as driver:
            yield driver

    def state(self) -> Study:
        from batchscout.orchestrator.study.journal import replay

        return replay(self.run_dir / "journal.jsonl", self.run_dir.name)

    def verdict(self) -> str | None:
        recommended = self.run_dir / "recommendation.json"
        return json.loads(recommended.read_text())["verdict"] if recommended.exists() else None

    def num_starts(self) -> int:
        """Return how many trials the journal says were started."""
        return sum('"kind":"started"' in line for line in self._lines())

    def trains(self) -> bool:
        return any('"kind":"started"' in line and "train-" in line for line in self._lines())

    def _lines(self) -> list[str]:
        journal = self.run_dir / "journal.jsonl"
        return [line.replace(" ", "") for line in journal.read_text().splitlines()] if journal.exists() else []

    def processes_left(self) -> list[str]:
        """Return the command lines of the processes that it started and that do not end."""
        until = time.monotonic() + MOST_SECONDS_TO_END
        while (left := with_variable(f"STUDY_OF_THE_LINE={self.run_dir.name}")) and time.monotonic() < until:
            time.sleep(0.2)
        return left


def pack(setting: Setting, into: Path) -> None:
    """Pack all studies so far but their weights: a run that is cut off keeps them."""

    def but_weights(member: tarfile.TarInfo) -> tarfile.TarInfo | None:
        return None if "checkpoints" in Path(member.name).parts or member.size > 10 * MIB else member

    if (folder := setting.folder / "studies").exists():
        with tarfile.open(into, "w:gz") as packed:
            packed.add(folder, "studies", filter=but_weights)


def with_variable(variable: str) -> list[str]:
    """Return the command lines of all processes that have this in their environment."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            if variable.encode() in (process / "environ").read_bytes().split(b"\0"):
                found.append((process / "cmdline").read_bytes().replace(b"\0", b" ").decode()[:100])
        except OSError:  # it has ended, or is another user's
            continue
    return found


def small(tiny: bool) -> dict[str, Any]:
    """Return a model and data whose runs and checkpoints take little beside a study's own seconds."""
    return gpt(True) if tiny else gpt(False, seq_len=256, num_layers=6, num_heads=6, hidden_dim=384, vocab_size=256)


def main_job(setting: Setting) -> Found:
    """A small study as a user has it: a limit that two modes must keep to, compiled steps, batches compared, three runs; and its
    command once more, which is to repeat nothing."""
    tiny = setting.tiny
    stages = [
        {
            "type": "frontier", "activation_checkpointing": ["none", "full"], "smallest": 2 if tiny else 16,
            "largest": 8 if tiny else 128, "compile": [not tiny], "cross_entropy": ["whole"],
            "finalists": 1 if tiny else 2, "rounds": 1,
            "max_rounds": 1, "max_samples": 100_000,
        },
        {"type": "throughput", "multiples": [1, 2], "rounds": 1, "max_rounds": 1, "max_samples": 100_000},
        {"type": "train", "max_runs": 3},
    ]  # fmt: skip
    study = AStudy(
        setting, "main", **small(tiny), stages=stages, memory_limit="16MiB" if tiny else "4GiB",
        sample_budget=256 if tiny else 8_192, evaluation_samples=8 if tiny else 256, evaluations=2,
        optimizer={"lr": 1e-3, "reference_batch_size": 8 if tiny else 32},
    )  # fmt: skip
    done = study.run()
    trials, verdict = study.state().trials.values(), study.verdict()
    states = [str(trial.state) for trial in trials]
    left = study.processes_left()
    for trial in trials:
        setting.lines.say("trial", **told_of(trial))
    num_starts = study.num_starts()
    again = study.run() if done.returncode == 0 else done
    repeated = study.num_starts() - num_starts
    return {
        "exit_code": done.returncode, "again": again.returncode, "started_again": repeated, "verdict": verdict, "states": {state: states.count(state) for state in states},
        "processes_left": left, "said": (done.stdout + done.stderr)[-1500:] if done.returncode else "",
        "ok": done.returncode == again.returncode == repeated == 0 and verdict is not None and "failed" not in states and not left,
    }  # fmt: skip


def frontier(setting: Setting, compiled: bool) -> Found:
    """GPT-2 until memory runs out, in two modes."""
    tiny, cpu = setting.tiny, setting.device == "cpu"
    stage = {
        "type": "frontier", "activation_checkpointing": ["none", "full"], "smallest": 2 if tiny else 8,
        "largest": 8 if tiny else 256, "compile": [compiled and not tiny], "finalists": 1, "rounds": 1,
        "cross_entropy": ["whole"], "memory_knobs": [], "max_samples": 100_000,
    }  # fmt: skip
    study = AStudy(
        setting, "frontier-compiled" if compiled else "frontier", **gpt(tiny), stages=[stage], sample_budget=8192,
        **({"memory_limit": "16MiB"} if cpu else {}),  # a GPU's own edge is what this is after
    )  # fmt: skip
    done = study.run()
    trials = list(study.state().trials.values())
    for trial in trials:
        setting.lines.say("probe", **told_of(trial))
    ran_out = {
        mode: sum(t.state == "out_of_memory" for t in trials if t.config.activation_checkpointing == mode)
        for mode in ("none", "full")
    }
    failed = [t.id for t in trials if t.state == "failed"]
    largest = {
        mode: max((t.config.micro_batch_size for t in trials if fits(t, mode)), default=None) for mode in ran_out
    }
    # In the 16 MiB of a CPU's run what a fresh process sets up beside its tensors counts, so that more run out there.
    few = cpu or max(ran_out.values()) <= 1
    return {
        "exit_code": done.returncode, "num_out_of_memory": ran_out, "largest": largest,
        "predicted": predicted_edges(study.state()),
        "expected": {"largest": "about what is predicted", "num_out_of_memory": "at most 1 in each mode, none failed"},
        "said": (done.stdout + done.stderr)[-1500:] if done.returncode else "", "failed": failed,
        "ok": done.returncode == 0 and not failed and few,
    }  # fmt: skip


def killed(setting: Setting) -> Found:
    """Kill the driver while a run of `train` trains, then give the same command. Ray's agents of the first may outlive it by a
    minute: they hold nothing of the GPU."""
    tiny = setting.tiny
    stages = [
        {"type": "throughput", "multiples": [1, 2], "rounds": 1, "max_rounds": 1},
        {"type": "train", "max_runs": 2},
    ]
    study = AStudy(
        setting, "killed", **small(tiny), stages=stages, batch={"micro_batch_size": 2 if tiny else 8},
        sample_budget=512 if tiny else 2048, compile=False,
    )  # fmt: skip
    with study.running() as driver:
        while driver.poll() is None and not study.trains() and setting.seconds_left() > 5:
            time.sleep(0.1)
        struck = driver.poll() is None
        driver.send_signal(signal.SIGKILL)
    done = study.run()
    states = sorted({str(trial.state) for trial in study.state().trials.values()})
    return {
        "struck": struck, "exit_code": done.returncode, "verdict": study.verdict(), "states": states,
        "said": (done.stdout + done.stderr)[-1500:] if done.returncode else "",
        "ok": struck and done.returncode == 0 and study.verdict() is not None,
    }  # fmt: skip


def out_of_range(setting: Setting) -> Found:
    """A trial whose targets are out of range, between two that are fine, on one lane."""
    shape = small(setting.tiny)
    model = {"target": "out_of_range:OutOfRange", "kwargs": shape["model"]["kwargs"]}
    grid = {"type": "grid", "micro_batch_size": [2, 3, 4], "compile": [False]}
    study = AStudy(setting, "out_of_range", data=shape["data"], model=model, stages=[grid], sample_budget=24)
    done = study.run()
    trials = study.state().trials
    told = {name: [str(trial.state), trial.reason[:300]] for name, trial in trials.items()}
    states = [str(trial.state) for trial in trials.values()]
    return {
        "exit_code": done.returncode, "said": done.stderr[-500:] if done.returncode == 2 else "", "trials": told,
        "ok": states == ["complete", "failed", "complete"],
    }  # fmt: skip


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
