"""What was measured on this machine before: a second study does not measure it again.

One file in the cache directory, a JSON object a line, for all studies of this user. A measurement is found again by all
that decides on its outcome: what the trial runs, the source it runs, the model as it was counted and predicted, torch
and the device. It goes by the trial's id, too: the third of five timings is not the first.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import importlib.util
import json
import os
import platform
import re
import time
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from orchestrator.config.keys import StudyConfig
from orchestrator.config.stages import Frontier
from orchestrator.study.messages import HOST_RAN_OUT
from orchestrator.study.state import REUSED, Proposal, Trial, TrialState

# What a trial of a few steps is as fast and as large without.
WITHOUT_EFFECT = {"learning_rate", "warmup_samples", "schedule", "seed", "keep_checkpoints"}
# Timings that were taken in turns say something beside each other alone.
IN_TURNS = re.compile(r"-round\d+$")


@dataclass(frozen=True)
class Measured:
    """How a trial ended, and in which study."""

    state: TrialState
    reason: str
    metrics: dict[str, float]
    run_dir: str


class Measurements:
    """What a study may take from earlier ones, and what it leaves for later ones."""

    def __init__(self, file: Path, identity: dict[str, Any], run_dir: str, *, fresh: bool = False) -> None:
        """identity: what all trials of the study share, see `identity`. fresh: take nothing."""
        self._file, self._identity, self._run_dir = file, identity, run_dir
        self._known = {} if fresh else {record["key"]: record for record in _records(file)}

    def find(self, wanted: Sequence[Proposal]) -> dict[str, Measured]:
        """How those of these trials that are known ended in another study, with that said in their reasons.

        Timings in turns only if all of these are known, from one study: last week's are no peers of today's.
        """
        known = {one.id: measured for one in wanted if (measured := self._find(one))}
        turns = [one.id for one in wanted if IN_TURNS.search(one.id)]
        together = all(name in known for name in turns) and len({known[name].run_dir for name in turns}) <= 1
        return known if together else {name: one for name, one in known.items() if name not in turns}

    def _find(self, wanted: Proposal) -> Measured | None:
        record = self._known.get(self._key(wanted, wanted.expected))
        if record is None:
            return None
        day = time.strftime("%Y-%m-%d", time.localtime(record["time"]))
        reason = "; ".join(filter(None, [record["reason"], f"{REUSED}measured on {day} in {record['run_dir']}"]))
        return Measured(TrialState(record["state"]), reason, record["metrics"], record["run_dir"])

    def remember(self, trial: Trial) -> None:
        """Leave a trial that ended with a result to later studies."""
        if not _is_of_the_trial(trial):
            return
        about = {"id": trial.id, "state": trial.state, "reason": trial.reason, "metrics": trial.metrics}
        record = {"key": self._key(trial, trial.metrics), "time": time.time(), "run_dir": self._run_dir, **about}
        try:
            self._file.parent.mkdir(parents=True, exist_ok=True)
            with self._file.open("a") as file:
                fcntl.flock(file, fcntl.LOCK_EX)
                file.write(json.dumps(record) + "\n")
        except OSError as error:  # this study has it in its journal
            warnings.warn(f"{trial.id} is not kept for later studies: {error}", stacklevel=2)

    def _key(self, trial: Proposal | Trial, metrics: dict[str, float]) -> str:
        config = trial.config.model_dump(mode="json", exclude=WITHOUT_EFFECT)
        what = [trial.id, config, metrics.get("predicted_memory_bytes"), self._identity]
        return hashlib.sha256(json.dumps(what, sort_keys=True).encode()).hexdigest()


def _is_of_the_trial(trial: Trial) -> bool:
    """Whether it would end so another day: not a failure, not a learning rate that diverged, not a host that others filled."""
    if trial.state is TrialState.PRUNED:
        return trial.reason.startswith(("too_slow:", "thrashing:"))
    of_the_host = trial.reason.startswith(HOST_RAN_OUT)
    return trial.state in (TrialState.COMPLETE, TrialState.OUT_OF_MEMORY) and not of_the_host


def _records(file: Path) -> Iterator[dict[str, Any]]:
    """All that can be read: a line that was cut off is measured again."""
    for line in file.read_bytes().splitlines() if file.exists() else ():
        with contextlib.suppress(ValueError):
            record = json.loads(line)
            if isinstance(record, dict) and "key" in record:
                yield record


def identity(config: StudyConfig, facts: dict[str, Any], device: str) -> dict[str, Any]:
    """What decides on every trial's memory and speed beside its own configuration."""
    from importlib.metadata import version

    targets = [config.model.target, config.loss or "", config.data.target]
    libraries = ["torch", *(["transformers"] if config.model.target == "hf" else [])]
    frontier = config.stage_of(Frontier)
    return {
        "device": device,
        "python": platform.python_version(),
        "libraries": {library: version(library) for library in libraries},
        "allocator": os.environ.get("PYTORCH_CUDA_ALLOC_CONF") or os.environ.get("PYTORCH_ALLOC_CONF"),
        "isolation": config.isolation,
        "max_step_seconds": frontier and frontier.max_step_seconds,
        "facts": {key: facts.get(key) for key in ("num_parameters", "num_train_samples")},
        "source": source_digest(["trainers:", *targets]),
    }


def source_digest(targets: list[str]) -> str:
    """Of all modules of the packages that these import paths lie in, and of those beside a module that is in none."""
    packages = sorted({target.partition(":")[0].partition(".")[0] for target in targets if ":" in target})
    digest = hashlib.sha256()
    for file in (file for package in packages for file in _sources(package)):
        digest.update(file.read_bytes())
    return digest.hexdigest()


def _sources(package: str) -> list[Path]:
    found = importlib.util.find_spec(package)
    if found is None or found.origin is None:
        return []
    files = (file for folder in found.submodule_search_locations or () for file in Path(folder).rglob("*.py"))
    beside = Path(found.origin).parent.glob("*.py") if not found.submodule_search_locations else ()
    return sorted(file for file in (*files, *beside) if file.is_file())
