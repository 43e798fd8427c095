"""What was measured on this machine before: a second study does not measure it again.

One file in the cache directory, a JSON object a line, for all studies of this user. A measurement is found again by all
that decides on its outcome: what the trial runs, the source it runs, the model as it was counted and predicted, torch
and the device. It goes by the trial's id, too: the third of five timings is not the first.
"""

from __future__ import annotations

import fcntl
import hashlib
import importlib.util
import json
import platform
import time
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from orchestrator.config import StudyConfig
from orchestrator.study import REUSED, Proposal, Trial, TrialState

# What a trial of a few steps is as fast and as large without.
WITHOUT_EFFECT = {"learning_rate", "warmup_samples", "schedule", "seed", "keep_checkpoints"}
# A trial that failed says nothing of another day.
RESULTS = (TrialState.COMPLETE, TrialState.OUT_OF_MEMORY, TrialState.PRUNED)


@dataclass(frozen=True)
class Measured:
    """How a trial ended, and where."""

    state: TrialState
    reason: str
    metrics: dict[str, float]


class Measurements:
    """What a study may take from earlier ones, and what it leaves for later ones."""

    def __init__(self, file: Path, identity: dict[str, Any], run_dir: str, *, fresh: bool = False) -> None:
        """identity: what all trials of the study share, see `identity`. fresh: take nothing."""
        self._file, self._identity, self._run_dir = file, identity, run_dir
        self._known = {} if fresh else {record["key"]: record for record in _records(file)}

    def find(self, wanted: Proposal) -> Measured | None:
        """How this very trial ended in another study, with that said in its reason."""
        record = self._known.get(self._key(wanted, wanted.expected))
        if record is None:
            return None
        day = time.strftime("%Y-%m-%d", time.localtime(record["time"]))
        reason = "; ".join(filter(None, [record["reason"], f"{REUSED}measured on {day} in {record['run_dir']}"]))
        return Measured(TrialState(record["state"]), reason, record["metrics"])

    def remember(self, trial: Trial) -> None:
        """Leave a trial that ended with a result to later studies."""
        if trial.state not in RESULTS:
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


def _records(file: Path) -> Iterator[dict[str, Any]]:
    """All that can be read: a line that was cut off is measured again."""
    for line in file.read_bytes().splitlines() if file.exists() else ():
        try:
            yield json.loads(line)
        except ValueError:
            continue


def identity(config: StudyConfig, facts: dict[str, Any], device: str) -> dict[str, Any]:
    """What decides on every trial's memory and speed beside its own configuration."""
    from importlib.metadata import version

    targets = [config.model.target, config.loss or "", config.data.target]
    return {
        "device": device,
        "torch": version("torch"),
        "python": platform.python_version(),
        "facts": {key: facts.get(key) for key in ("num_parameters", "num_train_samples")},
        "source": source_digest(["trainers:", *targets]),
    }


def source_digest(targets: list[str]) -> str:
    """Of all modules of the packages that these import paths lie in; a single module is its one file."""
    packages = sorted({target.partition(":")[0].partition(".")[0] for target in targets if ":" in target})
    digest = hashlib.sha256()
    for file in (file for package in packages for file in _sources(package)):
        digest.update(file.read_bytes())
    return digest.hexdigest()


def _sources(package: str) -> list[Path]:
    found = importlib.util.find_spec(package)
    if found is None:
        return []
    folders = [Path(folder) for folder in found.submodule_search_locations or ()]
    return (
        sorted(file for folder in folders for file in folder.rglob("*.py")) if folders else [Path(found.origin or "")]
    )
