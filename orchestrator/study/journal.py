"""journal.jsonl: one JSON object a line with its checksum, appended and fsynced, the only truth. Everything else is its
replay.

One writer at a time: the file is locked while a study runs, so a second run in the same directory is refused.
"""

from __future__ import annotations

import contextlib
import fcntl
import io
import os
from pathlib import Path
from typing import Self

from orchestrator.study.events import Event, TrialEvent, parser
from orchestrator.study.lines import Line, line_of, read_lines
from orchestrator.study.state import Halted, Study
from trainers.files import StorageLost, naming_the_disk


class Journal:
    """The journal opened for writing, and the study as it stands."""

    def __init__(self, path: Path, name: str) -> None:
        """Lock the file and replay it. Raises ValueError where another process writes it, or where a line in its middle
        is torn."""
        self.path = path
        self._file = path.open("a+b", buffering=0)
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            self._file.close()
            raise ValueError(
                f"another process is running the study in {path.parent}; wait for it, end it, or choose another --dir"
            ) from None
        try:
            self.study = Study(name)
            self._whole_bytes = _apply_all(path, self.study)
        except ValueError:
            self._file.close()
            raise
        self._file.truncate(self._whole_bytes)
        self._lost: Halted | None = None

    def append(self, event: Event) -> None:
        """Write the event to disk, then apply it to the study. Raises Halted if the disk refuses, and at every later
        call."""
        self.raise_if_lost()
        body = event.model_dump_json().encode()
        line = line_of(body)
        try:
            with naming_the_disk(self.path):
                _write_all(self._file, line)
                os.fsync(self._file.fileno())
        except StorageLost as error:
            self._lost = Halted(str(error))
            with contextlib.suppress(OSError):  # if this fails too, the next writer cuts the torn line off
                self._file.truncate(self._whole_bytes)
            raise self._lost from error
        self._whole_bytes += len(line)
        # The study gets what a replay will read: a value that JSON cannot hold must not be known here either.
        self.study.apply(parser.validate_json(body))

    def raise_if_lost(self) -> None:
        """Raise Halted if the file could not be written before: whatever is not in it has not happened."""
        if self._lost is not None:
            raise self._lost

    def close(self) -> None:
        self._file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


def is_locked(path: Path) -> bool:
    """True if a process has the journal open for writing now."""
    if not path.exists():
        return False
    with path.open("rb") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
    return False


def replay(path: Path, name: str) -> Study:
    """Return the study that the journal tells of, for readers; a last line that is still being written is left out."""
    study = Study(name)
    _apply_all(path, study)
    return study


def _apply_all(path: Path, study: Study) -> int:
    """Apply every whole line to the study, and return the bytes that they take."""
    end = 0
    for line in read_lines(path):
        _apply(line, study, path)
        end = line.end
    return end


def _apply(line: Line, study: Study, path: Path) -> None:
    """Apply a line. Raises ValueError where it tells of a trial that the study does not have."""
    event = line.event
    if isinstance(event, TrialEvent) and event.id not in study.trials:
        raise ValueError(
            f"line {line.number} of {path} tells of the trial '{event.id}', which no line before it proposes; "
            "restore the file from a copy"
        )
    study.apply(event)


def _write_all(file: io.RawIOBase, data: bytes) -> None:
    """Write all of the data: a disk that fills up takes a part of it before it refuses."""
    while data:
        data = data[file.write(data) or 0 :]
