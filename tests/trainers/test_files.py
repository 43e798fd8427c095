"""Whatever a file system refuses with, it is the storage's doing and never the run's."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from tests.support.storage import Call, failing, on_failing_storage
from tests.support.tiny import config, stop_at
from trainers import files
from trainers.files import PARTIAL, StorageLost, storage_error, written_whole
from trainers.loop import train

# Where a run that evaluates touches its files, and what storage may say there.
FAULTS: list[tuple[Call, str, str]] = [
    *(("rename", ".pt", error) for error in ("EBUSY", "EACCES", "ENOENT", "ETIMEDOUT", "ENOTCONN", "EIO", "ENOSPC")),
    ("open", ".pt", "EACCES"), ("fsync", ".pt", "ETIMEDOUT"), ("write", ".pt", "EACCES"),
    ("open", "steps.jsonl", "ENOTCONN"), ("write", "steps.jsonl", "EDQUOT"), ("fsync", "steps.jsonl", "EBUSY"),
]  # fmt: skip


def refused_everywhere(folder: str) -> list[str]:
    """What a run said that met each of the faults; and one whose checkpoint cannot be renamed twice, at first."""
    files.SECONDS_TO_WAIT = 0.3
    return [said_by_a_run(Path(folder) / f"run{number}", *fault) for number, fault in enumerate(FAULTS)] + [
        said_by_a_run(Path(folder) / "last", "rename", ".pt", "EBUSY", times=2)
    ]


def said_by_a_run(directory: Path, call: Call, path: str, error: str, times: int | None = None) -> str:
    said = "it noticed nothing"
    try:
        with failing(call, path, error, times):
            train(config(sample_budget=8, evaluations=(4,)), lambda report: None, directory)
    except Exception as other:
        said = f"{type(other).__name__}: {other}"
    return said + "".join(path.name for path in directory.rglob(f"*{PARTIAL}"))


@pytest.mark.slow
def test_whatever_storage_refuses_a_run_with_is_the_storages_and_names_the_file(tmp_path: Path) -> None:
    """A file that is busy for a moment is waited for."""
    *said, after_a_moment = on_failing_storage(refused_everywhere, str(tmp_path))
    for number, (_, path, error) in enumerate(FAULTS):
        name = "checkpoints/000000000004-local.pt" if path == ".pt" else path
        why = os.strerror(getattr(errno, error))
        assert said[number] == f"StorageLost: {tmp_path}/run{number}/{name} could not be written: {why}"
    assert after_a_moment == "it noticed nothing"


def goes_on_after_a_failed_read(folder: str) -> list[str]:
    """What a run says whose checkpoint cannot be read, and then, when it can, from where it goes on."""
    trial, told = config(sample_budget=8, rungs=(4,)), list[str]()
    train(trial, stop_at(4), Path(folder))
    try:
        with failing("open", ".pt", "EIO"):
            train(trial, lambda report: None, Path(folder))
    except StorageLost as error:
        told.append(str(error))
    train(trial, lambda report: told.append(f"{report.kind} {report.samples_seen}"), Path(folder))
    return told


@pytest.mark.slow
def test_a_checkpoint_that_cannot_be_read_for_now_is_not_taken_for_a_damaged_one(tmp_path: Path) -> None:
    said = f"{tmp_path}/checkpoints/000000000004-local.pt could not be read: Input/output error"
    assert on_failing_storage(goes_on_after_a_failed_read, str(tmp_path)) == [said, "milestone 4", "end 8"]


def test_errors_of_the_users_own_files_stay_theirs(tmp_path: Path) -> None:
    """A wrong path or a closed door is a mistake; a disk that fails under the reader is not."""
    with pytest.raises(FileNotFoundError) as absent:
        (tmp_path / "absent").read_text()
    assert storage_error(absent.value) is None
    failed = OSError(errno.EIO, "Input/output error", "data.bin")
    assert storage_error(failed) is failed
    wrapped = RuntimeError("could not read the shard")
    wrapped.__cause__ = failed
    assert storage_error(wrapped) is failed


def test_a_directory_in_the_place_of_a_file_is_named(tmp_path: Path) -> None:
    (tmp_path / "report.html" / "in").mkdir(parents=True)
    said = r"report\.html could not be written: Is a directory"
    with pytest.raises(StorageLost, match=said), written_whole(tmp_path / "report.html") as file:
        file.write(b"x")
    assert [path.name for path in tmp_path.iterdir()] == ["report.html"]
