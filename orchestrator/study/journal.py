"""journal.jsonl: one JSON object a line with its checksum, appended and fsynced, the only truth. Everything else is its
replay.

One writer at a time: the file is locked while a study runs, so a second run in the same directory is refused.
"""

from __future__ import annotations

import contextlib
import fcntl
import io
import json
import os
import zlib
from pathlib import Path
from typing import Self

from pydantic import ValidationError

from orchestrator.study.events import FORMAT_VERSION, Event, parser
from orchestrator.study.state import Halted, Study
from orchestrator.study.version0 import upgraded
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
            events, whole = read_events(path)
        except ValueError:
            self._file.close()
            raise
        self._file.truncate(whole)
        self._whole_bytes = whole
        self._lost: Halted | None = None
        self.study = Study(name)
        for event in events:
            self.study.apply(event)

    def append(self, event: Event) -> None:
        """Write the event to disk, then apply it to the study. Raises Halted if the disk refuses, and at every later
        call."""
        self.raise_if_lost()
        body = event.model_dump_json().encode()
        line = _line_of(body)
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
    for event in read_events(path)[0]:
        study.apply(event)
    return study


def _line_of(body: bytes) -> bytes:
    """Return an event's own JSON as a line of the file, whose last key is the checksum of all before it."""
    return body[:-1] + b',"crc32":"%08x"}\n' % zlib.crc32(body)


def _body_of(line: bytes) -> bytes | None:
    """Return the event's own JSON; None if the line has no checksum, or one that is not that of its contents."""
    body, _, checksum = line.rpartition(b',"crc32":"')
    body += b"}"
    return body if checksum == b'%08x"}\n' % zlib.crc32(body) else None


def read_events(path: Path) -> tuple[list[Event], int]:
    """Return (all whole events, the bytes that they take).

    A crash may tear the last line, which is left out. Raises ValueError, with the line's number, for a torn line
    elsewhere, and for a line that a later version of this program wrote.
    """
    events: list[Event] = []
    whole = 0
    lines = path.read_bytes().splitlines(keepends=True) if path.exists() else []
    for number, line in enumerate(lines, start=1):
        event = _parsed(line, number, path) if line.endswith(b"\n") else None
        if event is None and number < len(lines):
            raise ValueError(
                f"line {number} of {path} is damaged, and {len(lines) - number} more follow it; "
                "restore the file from a copy, or remove that line if you know what it said"
            )
        if event is None:
            break
        events.append(event)
        whole += len(line)
    return events, whole


def _parsed(line: bytes, number: int, path: Path) -> Event | None:
    """Return the event of a line; None if the line holds no event."""
    body = _body_of(line)
    if body is not None:
        with contextlib.suppress(ValidationError):
            return parser.validate_json(body)
    return _parsed_from_another_format(line, number, path)


def _parsed_from_another_format(line: bytes, number: int, path: Path) -> Event | None:
    """Return the event of a line of version 0. Raises ValueError for a line of a later format."""
    try:
        record = json.loads(line)
    except ValueError:  # not JSON, or not even text
        return None
    if not isinstance(record, dict) or "kind" not in record:
        return None
    version = record.get("version", 0)
    if version > FORMAT_VERSION:
        raise ValueError(
            f"line {number} of {path} has journal format {version}, and this batchscout reads up to {FORMAT_VERSION}; "
            "go on with the version that wrote it, or a later one"
        )
    with contextlib.suppress(ValidationError, KeyError):
        return parser.validate_python(upgraded(record)) if version == 0 else None
    return None


def _write_all(file: io.RawIOBase, data: bytes) -> None:
    """Write all of the data: a disk that fills up takes a part of it before it refuses."""
    while data:
        data = data[file.write(data) or 0 :]
