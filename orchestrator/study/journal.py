"""journal.jsonl: one JSON object a line, appended and fsynced, the only truth. Everything else is its replay.

One writer at a time: the file is locked while a study runs, so a second run in the same directory is refused.
"""

from __future__ import annotations

import contextlib
import fcntl
import io
import json
import math
import os
import time
from pathlib import Path
from typing import Any, Self

from orchestrator.study.state import Halted, Study
from trainers.files import StorageLost, naming_the_disk


class Journal:
    """The journal opened for writing, and the study as it stands."""

    def __init__(self, path: Path, name: str) -> None:
        """Lock and replay. Raises ValueError where another process writes it, or where its middle is torn."""
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
            records, whole = read_records(path)
        except ValueError:
            self._file.close()
            raise
        self._file.truncate(whole)
        self._whole_bytes = whole
        self._lost: Halted | None = None
        self.study = Study(name)
        for record in records:
            self.study.apply(record)

    def append(self, kind: str, **fields: Any) -> None:
        """Make it true: on disk first, then in the study. Raises Halted where it cannot be, and from then on always."""
        self.raise_if_lost()
        record = {"kind": kind, "time": round(time.time(), 3), **_finite(fields)}
        line = json.dumps(record, allow_nan=False) + "\n"
        record = json.loads(line)
        try:
            with naming_the_disk(self.path):
                _write_all(self._file, line.encode())
                os.fsync(self._file.fileno())
        except StorageLost as error:
            self._lost = Halted(str(error))
            with contextlib.suppress(OSError):  # else the next writer cuts the torn line off
                self._file.truncate(self._whole_bytes)
            raise self._lost from error
        self._whole_bytes += len(line.encode())
        self.study.apply(record)

    def raise_if_lost(self) -> None:
        """Halted where the file could not be written before: nothing is true any more that is not in it."""
        if self._lost is not None:
            raise self._lost

    def close(self) -> None:
        self._file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


def is_locked(path: Path) -> bool:
    """Whether a process is writing it now."""
    if not path.exists():
        return False
    with path.open("rb") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
    return False


def replay(path: Path, name: str) -> Study:
    """The study as the journal tells it, for readers; a last line that is still being written is left out."""
    study = Study(name)
    for record in read_records(path)[0]:
        study.apply(record)
    return study


def read_records(path: Path) -> tuple[list[dict[str, Any]], int]:
    """All whole records, and how many bytes they take. A torn last line is where a crash cut off; elsewhere it is an error."""
    records: list[dict[str, Any]] = []
    whole = 0
    lines = path.read_bytes().splitlines(keepends=True) if path.exists() else []
    for number, line in enumerate(lines, start=1):
        try:
            record = json.loads(line) if line.endswith(b"\n") else None
        except ValueError:  # not JSON, or not even text
            record = None
        if not isinstance(record, dict):
            if number < len(lines):
                raise ValueError(
                    f"line {number} of {path} is damaged, and {len(lines) - number} more follow it; "
                    "restore the file from a copy, or remove that line if you know what it said"
                )
            break
        records.append(record)
        whole += len(line)
    return records, whole


def _write_all(file: io.RawIOBase, data: bytes) -> None:
    """A disk that fills up takes a part of it first."""
    while data:
        data = data[file.write(data) or 0 :]


def _finite(value: Any) -> Any:
    """JSON has no NaN and no infinity: null stands for them, and the reason beside it says which it was."""
    if isinstance(value, dict):
        return {str(key): _finite(item) for key, item in value.items()}
    if isinstance(value, (list, tuple, set, frozenset)):
        return [_finite(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value
