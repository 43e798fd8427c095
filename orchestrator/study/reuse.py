"""What was measured on this machine before: a second study does not measure it again.

One file in the cache directory, a JSON object with its checksum a line, serves all studies of this user. A measurement is found again by
everything that decides its outcome: the trial's configuration, the source code it runs, the model's counted parameters
and predicted memory, torch and the device. The trial's id counts, too: the third of five timings is not the first.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import platform
import time
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from pydantic import BaseModel, ConfigDict, JsonValue, ValidationError

from batchscout.orchestrator.config.keys import StudyConfig
from batchscout.orchestrator.config.stages import Frontier
from batchscout.orchestrator.study.causes import Cause
from batchscout.orchestrator.study.facts import Facts
from batchscout.orchestrator.study.inputs import import_paths, packages_of, sources_of
from batchscout.orchestrator.study.messages import SAME_MEMORY, FirstLane
from batchscout.orchestrator.study.trial import Metrics, Proposal, Reuse, Trial, TrialState
from batchscout.orchestrator.units import counted
from batchscout.trainers.config import Decides, DevicePeak, fields_that_decide
from batchscout.trainers.criteria import TransformersLoss
from batchscout.trainers.files import exists, make_private_directory, own_file, quoted
from batchscout.trainers.knobs import optimizer_8bit
from batchscout.trainers.lines import body_of, line_of
from batchscout.trainers.notices import NoticeKind, give_notice
from batchscout.trainers.sources.settings import LIBRARIES
from batchscout.trainers.user_code import code_of

_NO_MATTER = fields_that_decide(Decides.LOSS, Decides.NOTHING)


Identity = Mapping[str, JsonValue]
"""What decides the memory and speed of all trials of a study alike; see `identity`."""


class _Record(BaseModel):
    """A line of the file: how a trial ended, in which study, and the digest of everything that decides its outcome."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    key: str
    time: float
    run_dir: str
    began: float | None = None
    """When its study did: one that is removed may be followed by another in its place. None in what an earlier version wrote."""
    may_take_bytes: int | None = None
    """What a rank could take of its GPU: the trial's limit, or what was free where that was less. None on CPUs."""
    id: str
    state: TrialState
    cause: Cause | None
    reason: str
    metrics: Metrics
    disturbed: bool = False
    """True if its study found that something else had the machine: an earlier record with this key does not count."""


@dataclass(frozen=True)
class Measured:
    """How a trial ended in another study."""

    state: TrialState
    cause: Cause | None
    reason: str
    metrics: Metrics
    reused: Reuse


class Measurements:
    """What a study may take from earlier ones, and what it leaves for later ones."""

    def __init__(
        self,
        file: Path,
        identity: Identity,
        run_dir: str,
        *,
        began: float | None = None,
        remeasure: bool = False,
        lane: FirstLane | None = None,
    ) -> None:
        """Read the file. identity: what all trials of the study share, see `identity`. began: when the study did. remeasure: reuse nothing.
        lane: the one that the identity tells of; a trial that ran on another device leaves nothing."""
        self._file, self._identity, self._lane = file, identity, lane or FirstLane()
        self._run_dir, self._began = run_dir, began
        self._known = {} if remeasure else {record.key: record for record in _records(file)}

    def find(self, wanted: Sequence[Proposal]) -> dict[str, Measured]:
        """Return, by trial id, how the trials among these that an earlier study has measured ended there.

        Timings in turns are reused only if one study has measured all of them: last week's cannot be compared with
        today's.
        """
        known = {one.id: record for one in wanted if (record := self._find(one))}
        timings = [one.id for one in wanted if one.round is not None]
        studies = {(record.run_dir, record.began) if (record := known.get(name)) else None for name in timings}
        together = len(studies) <= 1 and None not in studies
        return {
            one.id: _told(known[one.id], one) for one in wanted if one.id in known and (together or one.round is None)
        }

    def _find(self, wanted: Proposal) -> _Record | None:
        if wanted.control:  # which is about the loss, on which nothing here is keyed
            return None
        record = self._known.get(self._key(wanted, wanted.expected.get("predicted_memory_bytes")))
        if record is None or record.disturbed or not _as_much(record.may_take_bytes, self._may_take(wanted)):
            return None
        return record

    def _may_take(self, trial: Proposal) -> int | None:
        """Return what a rank may take of its GPU: whatever others hold of it is not there to be filled."""
        free, limit = self._lane.free_bytes, trial.config.memory_limit_bytes
        return free if free is None or limit is None else min(free, limit)

    def remember(self, trial: Trial) -> None:
        """Leave a trial that ended with a result to later studies."""
        devices = [device for hold in trial.holds if hold.lane for device in hold.lane.devices]
        hardware = self._lane.hardware
        ran_here = hardware is None or all(device.is_like(hardware) for device in devices)
        if ran_here and _is_of_the_trial(trial):
            self._append(trial, disturbed=False)

    def forget(self, trial: Trial) -> None:
        """Have later studies measure a trial again, since something else had the machine while it ran."""
        self._append(trial, disturbed=True)

    def _append(self, trial: Trial, *, disturbed: bool) -> None:
        record = _Record(
            key=self._key(trial.proposal, trial.metrics.get("predicted_memory_bytes")),
            time=time.time(),
            run_dir=self._run_dir,
            began=self._began,
            may_take_bytes=self._may_take(trial.proposal),
            id=trial.id,
            state=trial.state,
            cause=trial.cause,
            reason=trial.reason,
            metrics=trial.metrics,
            disturbed=disturbed,
        )
        try:
            make_private_directory(self._file.parent)
            with self._file.open("a+b") as file:
                fcntl.flock(file, fcntl.LOCK_EX)
                file.write(_start_of_a_line(file) + line_of(record.model_dump_json().encode()))
        except OSError as error:  # this study has it in its journal
            warnings.warn(f"{trial.id} is not kept for later studies: {error}", stacklevel=2)

    def _key(self, trial: Proposal, predicted_memory_bytes: float | None) -> str:
        config = trial.config.model_dump(mode="json", exclude={*_NO_MATTER, "optimizer"})
        config["optimizer"] = trial.config.optimizer.code  # its other numbers change neither
        what = [trial.id, config, predicted_memory_bytes, self._identity]
        return hashlib.sha256(json.dumps(what, sort_keys=True).encode()).hexdigest()


def _as_much(before: int | None, now: int | None) -> bool:
    """True if two figures of a GPU's memory are alike: drivers and displays hold a little more of it one day than another."""
    if before is None or now is None:
        return before is now
    return abs(before - now) <= SAME_MEMORY * max(before, now)


def _told(record: _Record, wanted: Proposal) -> Measured:
    """Return what a record tells the study that takes it."""
    reused = Reuse(time.strftime("%Y-%m-%d", time.localtime(record.time)), record.run_dir)
    metrics = against_peak(record.metrics, wanted.config.device_peaks.get(wanted.config.precision))
    return Measured(record.state, record.cause, record.reason, metrics, reused)


def against_peak(metrics: Metrics, peak: DevicePeak | None) -> Metrics:
    """Return the metrics with the utilisation told against this peak, as a study's own trials tell theirs."""
    before = metrics.get("assumed_peak_flops")
    if peak is None or before is None:
        return metrics
    ratio = before / peak.flops_per_second
    told = {key: value * ratio for key in ("mfu", "hfu") if (value := metrics.get(key)) is not None}
    known = {key: value for key, value in (metrics | told).items() if key not in told or told[key] <= 1}
    return known | {"assumed_peak_flops": peak.flops_per_second}


def _is_of_the_trial(trial: Trial) -> bool:
    """True if the trial would end the same way another day: not a failure, a divergence, or a host that others
    filled."""
    if trial.state is TrialState.PRUNED:
        return trial.cause in (Cause.TOO_SLOW, Cause.THRASHING)
    return trial.state in (TrialState.COMPLETE, TrialState.OUT_OF_MEMORY) and trial.cause is not Cause.HOST_MEMORY


def _start_of_a_line(file: BinaryIO) -> bytes:
    """Return what must be written before a line: a newline if a crash has torn the last one."""
    file.seek(max(file.seek(0, os.SEEK_END) - 1, 0))
    return b"" if file.read() in (b"", b"\n") else b"\n"


def _records(file: Path) -> list[_Record]:
    """Return every record that is as it was written; what a damaged line told is measured again, and a notice says so."""
    with own_file(file, "read"):
        lines = file.read_bytes().splitlines(keepends=True) if exists(file) else []
    found = {number: _record(line) for number, line in enumerate(lines, start=1)}
    damaged = [number for number, record in found.items() if record is None and lines[number - 1].endswith(b"\n")]
    if damaged:
        give_notice(
            NoticeKind.DAMAGED_MEASUREMENT,
            f"{quoted(file)} has {counted(len(damaged), 'damaged line')} of {len(lines)} (the first is line {damaged[0]}): what was "
            "there is ignored, and measured again. Delete what is damaged to end this message",
        )
    return [record for record in found.values() if record is not None]


def _record(line: bytes) -> _Record | None:
    """Return the record of a line; None if it is damaged, or is being written now."""
    try:
        return _Record.model_validate_json(body_of(line) or b"")
    except ValidationError:
        return None


def identity(config: StudyConfig, facts: Facts, lane: FirstLane, cpus_per_rank: int) -> Identity:
    """Return what decides every trial's memory and speed beside its own configuration. lane: where it runs; with how many CPUs, a GPU that
    waits for its data is the faster."""
    optimizer = config.optimizer
    targets = [path for path in import_paths(config) if path and not path.startswith(("torch.", "torchao."))]
    of_transformers = config.model.target == "hf" or isinstance(config.loss, TransformersLoss)
    of_torchao = optimizer.type in ("adamw_8bit", "adamw_4bit") or optimizer.name.startswith("torchao.")
    of_torchao = of_torchao or optimizer_8bit.NAME in config.named_knobs
    of_others = config.model.target == config.data.target  # an object that holds both, see `from`
    libraries = ["torch", *(["transformers"] if of_transformers else []), *(["torchao"] if of_torchao else [])]
    libraries += LIBRARIES if of_others else []
    frontier = config.keys_of(Frontier)
    read = {**(facts.contents or {}), **(facts.inputs or {})}
    network = {"num_nodes": lane.num_nodes} if lane.num_nodes > 1 else {}
    return network | {
        "device": lane.device,
        "cpus_per_rank": cpus_per_rank,
        "python": platform.python_version(),
        "libraries": {library: found for library in libraries if (found := _version(library))},
        "allocator": os.environ.get("PYTORCH_CUDA_ALLOC_CONF") or os.environ.get("PYTORCH_ALLOC_CONF"),
        "isolation": config.isolation,
        "max_step_seconds": frontier and frontier.max_step_seconds,
        "facts": {"num_parameters": facts.num_parameters, "num_train_samples": facts.num_train_samples},
        "data": {name: one for name, one in read.items() if name.endswith(" data") or name.startswith("data.")},
        "source": source_digest(["batchscout.trainers:", *targets]),
    }


def _version(library: str) -> str | None:
    """Return the version that is installed; None where there is none."""
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version(library)
    except PackageNotFoundError:
        return None


def source_digest(targets: Sequence[str | None]) -> str:
    """Return a digest of the source that these import paths lead to.

    It covers every module of their packages; for a module outside any package, every module beside it; and of scripts, and of folders
    that are no packages, what is named there with what it imports.
    """
    digest = hashlib.sha256(json.dumps(code_of(targets)).encode())
    for file in (file for package in packages_of(targets) for file in sources_of(package)):
        digest.update(file.read_bytes())
    return digest.hexdigest()
