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
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from pydantic import JsonValue, ValidationError

from orchestrator.study.events import FORMAT_VERSION, Event, TrialEvent, parser
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


@dataclass(frozen=True)
class Line:
    """A whole line of a journal."""

    number: int
    """From 1."""
    event: Event
    end: int
    """The bytes of the file up to its end."""


def read_lines(path: Path) -> Iterator[Line]:
    """Yield every whole line; none where there is no file.

    A crash may tear the last line, which is left out. Raises ValueError, with the line's number, for a torn line
    elsewhere, and for a line that a later version of this program wrote.
    """
    if not path.exists():
        return
    end = 0
    with path.open("rb") as file:
        for number, text in enumerate(file, start=1):
            if not text.endswith(b"\n"):  # it was torn, or is being written now
                return
            event = _event_of(text, f"line {number} of {path}")
            if event is None:
                _refuse_lines_after(number, file, path)
                return
            end += len(text)
            yield Line(number, event, end)


def _refuse_lines_after(number: int, file: Iterable[bytes], path: Path) -> None:
    """Raise ValueError if more lines follow the one that holds no event: a crash tears the last line alone."""
    num_more = sum(1 for _ in file)
    if num_more:
        raise ValueError(
            f"line {number} of {path} is damaged, and {num_more} more follow it; "
            "restore the file from a copy, or remove that line if you know what it said"
        )


CHECKSUM_KEY = b',"crc32":"'


def _line_of(body: bytes) -> bytes:
    """Return an event's own JSON as a line of the file, whose last key is the checksum of all before it."""
    return body[:-1] + CHECKSUM_KEY + b'%08x"}\n' % zlib.crc32(body)


def _body_of(line: bytes) -> bytes | None:
    """Return the event's own JSON; None if the line has no checksum, or one that is not that of its contents."""
    body, _, checksum = line.rpartition(CHECKSUM_KEY)
    body += b"}"
    return body if checksum == b'%08x"}\n' % zlib.crc32(body) else None


def _event_of(line: bytes, where: str) -> Event | None:
    """Return the event of a line; None if the line is damaged. Raises ValueError for what a later version wrote."""
    body = _body_of(line)
    if body is None:
        # What has a checksum is no line of version 0, and its version cannot be trusted where the checksum is wrong.
        return None if CHECKSUM_KEY in line else _event_without_checksum(line, where)
    try:
        return parser.validate_json(body)
    except ValidationError as error:
        raise ValueError(_not_readable(json.loads(body), error, where)) from error


def _event_without_checksum(line: bytes, where: str) -> Event | None:
    """Return the event of a line of version 0; None if it is damaged. Raises ValueError for a line of a later format."""
    try:
        record = json.loads(line)
    except ValueError:  # not JSON, or not even text
        return None
    if not isinstance(record, dict) or not isinstance(record.get("kind"), str):
        return None
    if _is_of_later_format(record):
        raise ValueError(_later_format(record, where))
    if "version" in record:  # every line with a version has a checksum, which this one has lost
        return None
    try:
        return parser.validate_python(upgraded(record))
    except (ValueError, LookupError, TypeError, AttributeError):  # a changed value that had no type may fail anywhere
        return None


def _not_readable(record: dict[str, JsonValue], error: ValidationError, where: str) -> str:
    """Return why a line cannot be read that is just as it was written."""
    if _is_of_later_format(record):
        return _later_format(record, where)
    fault = error.errors()[0]
    if fault["type"] == "union_tag_invalid":
        return (
            f"{where} is of the kind '{record.get('kind')}', which this batchscout does not know; go on with the "
            "version that wrote it, or a later one"
        )
    place = ".".join(map(str, fault["loc"][1:]))  # after the kind
    return (
        f"{where} is no event that this batchscout can read ({place}: {fault['msg']}, and it is {fault['input']!r:.100}); "
        "go on with the version that wrote it, or restore the file from a copy"
    )


def _is_of_later_format(record: dict[str, JsonValue]) -> bool:
    version = record.get("version")
    return isinstance(version, int) and version > FORMAT_VERSION


def _later_format(record: dict[str, JsonValue], where: str) -> str:
    return (
        f"{where} has journal format {record['version']}, and this batchscout reads up to {FORMAT_VERSION}; go on with "
        "the version that wrote it, or a later one"
    )


def _write_all(file: io.RawIOBase, data: bytes) -> None:
    """Write all of the data: a disk that fills up takes a part of it before it refuses."""
    while data:
        data = data[file.write(data) or 0 :]
