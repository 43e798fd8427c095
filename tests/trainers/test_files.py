"""Whatever a file system refuses with, it is the storage's doing and never the run's."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from batchscout.trainers import files
from batchscout.trainers.files import PARTIAL, StorageLost, storage_error, written_whole
from batchscout.trainers.loop import train
from tests.support.storage import Call, failing, on_failing_storage
from tests.support.tiny import config, stop_at

# Where a run that evaluates touches its files, and what storage may say there.
FAULTS: list[tuple[Call, str, str]] = [
    *(("rename", ".pt", error) for error in ("EBUSY", "EACCES", "ENOENT", "ETIMEDOUT", "ENOTCONN", "EIO", "ENOSPC")),
    ("open", ".pt", "EACCES"), ("fsync", ".pt", "ETIMEDOUT"), ("write", ".pt", "EACCES"),
    ("open", "steps.jsonl", "ENOTCONN"), ("write", "steps.jsonl", "EDQUOT"), ("fsync", "steps.jsonl", "EBUSY"),
    ("unlink", ".pt", "EACCES"), ("unlink", ".pt", "EPERM"),
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
    for number, (call, path, error) in enumerate(FAULTS):
        name = "checkpoints/000000000004-local.pt" if path == ".pt" else path
        done, why = "removed" if call == "unlink" else "written", os.strerror(getattr(errno, error))
        assert said[number] == f"StorageLost: {tmp_path}/run{number}/{name} could not be {done}: {why}"
    assert after_a_moment == "it noticed nothing"


def told_after_a_fault(folder: str, call: Call, path: str, error: str, cut_by: int = 0) -> list[str]:
    """What a run says that goes on from its checkpoint, which so many bytes were cut from, on failing storage; and then
    on sound storage."""
    trial, told = config(sample_budget=8, rungs=(4,)), list[str]()
    train(trial, stop_at(4), Path(folder))
    (checkpoint,) = (Path(folder) / "checkpoints").iterdir()
    os.truncate(checkpoint, checkpoint.stat().st_size - cut_by)
    try:
        with failing(call, path, error):
            train(trial, lambda report: told.append(report.kind), Path(folder))
    except Exception as failure:
        told.append(f"{type(failure).__name__}: {failure}")
    train(trial, lambda report: told.append(f"{report.kind} {report.samples_seen}"), Path(folder))
    return told


UNREADABLE: list[tuple[Call, str, str]] = [
    ("open", "/000000000004-local.pt", "EIO"), ("list", "", "EACCES"), ("list", "", "EIO"),
]  # fmt: skip
SET_ASIDE = "/set_aside/000000000004-local.pt"
NOT_SET_ASIDE = ("EACCES", "ENOENT")


def told_after_every_fault(folder: str) -> dict[str, list[str]]:
    """By the name of its run. All in one process, since what takes longest is its start."""
    files.SECONDS_TO_WAIT = 0.3
    told = dict[str, list[str]]()
    for number, (call, path, error) in enumerate(UNREADABLE):
        told[f"unreadable{number}"] = told_after_a_fault(
            f"{folder}/unreadable{number}", call, f"/checkpoints{path}", error
        )
    for error in NOT_SET_ASIDE:
        told[error] = told_after_a_fault(f"{folder}/{error}", "rename", SET_ASIDE, error, 100)
    return told


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("runs")


@pytest.fixture(scope="module")
def told(runs: Path) -> dict[str, list[str]]:
    return on_failing_storage(told_after_every_fault, str(runs))


@pytest.mark.slow
@pytest.mark.parametrize("number", range(len(UNREADABLE)))
def test_a_checkpoint_that_cannot_be_read_for_now_is_not_taken_for_a_damaged_one(
    number: int, runs: Path, told: dict[str, list[str]]
) -> None:
    """Neither for one that is not there: the run would begin again."""
    _, path, error = UNREADABLE[number]
    name, why = f"unreadable{number}", os.strerror(getattr(errno, error))
    said = f"StorageLost: {runs}/{name}/checkpoints{path} could not be read: {why}"
    assert told[name] == [said, "milestone 4", "end 8"]


@pytest.mark.slow
@pytest.mark.parametrize("error", NOT_SET_ASIDE)
def test_a_damaged_checkpoint_that_cannot_be_set_aside_is_the_storages_fault(
    error: str, runs: Path, told: dict[str, list[str]]
) -> None:
    """The run ends with a reason that loses no trial, and sets the file aside when it can."""
    place, why = f"{runs}/{error}{SET_ASIDE}", os.strerror(getattr(errno, error))
    assert told[error] == [
        f"StorageLost: {place} could not be written: {why}", "notice 0", "milestone 4", "end 8",
    ]  # fmt: skip
    assert Path(place).exists()


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


def test_a_path_that_storage_tells_nothing_of_is_not_taken_for_an_absent_one(tmp_path: Path) -> None:
    """Python 3.14 took it for one: a study would have begun anew where its disk fails."""
    (tmp_path / "file").touch()
    found = [files.exists(tmp_path / name) for name in ("file", "absent", "file/below", "absent/below")]
    assert found == [True, False, False, False]
    with pytest.raises(StorageLost, match="could not be read: File name too long"):
        files.is_there(tmp_path / (300 * "x"))
