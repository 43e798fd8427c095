"""journal.jsonl: one JSON object a line with its checksum, appended and fsynced, the only truth. Everything else is its
replay.

One writer at a time: the file is locked while a study runs, so a second run in the same directory is refused.
"""

from __future__ import annotations

import contextlib
import io
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Self

from batchscout.orchestrator.study.events import Event, Retried, TrialEvent, noticed, parser
from batchscout.orchestrator.study.lines import Line, read_lines, refuse_earlier_format
from batchscout.orchestrator.study.state import Halted, Study
from batchscout.orchestrator.study.storage.lease import LEASE_SECONDS
from batchscout.orchestrator.study.storage.lock import JournalLock, leads_to
from batchscout.orchestrator.study.storage.stored_study import StoredStudy
from batchscout.trainers.files import StorageLost, own_file, quoted, written_whole
from batchscout.trainers.lines import line_of
from batchscout.trainers.notices import Notice, heard_by


class Vanished(Halted):
    """The journal, the directory around it, the lock on it or the lease was taken away while the study ran: nothing there is
    this process's to write any more."""


def _without_a_directory() -> Halted | None:
    """Return that this process's current directory is gone, if it is."""
    try:
        os.getcwd()
    except OSError:
        return Halted(
            "the directory that the study was started in was removed while it ran, and its code and relative paths are looked for there"
        )
    return None


def _taken_away(path: Path) -> Vanished:
    file, directory = quoted(path), quoted(path.parent)
    return Vanished(
        f"{file} was deleted, moved or replaced while the study ran, and nothing can be kept there any more; put it "
        f"back from a copy and run the same command again to go on with the study, or remove {directory} and run the "
        "same command to begin anew"
    )


class Journal:
    """The journal opened for writing, and the study as it stands."""

    def __init__(
        self, path: Path, name: str, lease_seconds: float = LEASE_SECONDS, published: StoredStudy | None = None
    ) -> None:
        """Lock the file and replay it. Raises ValueError where another process writes it, or where a line in its middle
        is damaged. lease_seconds: how long this process may be silent before another may follow it. published: where each
        line has to be, too, before it counts as written."""
        self.published = published
        self.path = path
        self.study = Study(name)
        self.at_the_disk: Callable[[], contextlib.AbstractContextManager[None]] = contextlib.nullcontext
        """What is entered while this reads or writes, which may take as long as its storage does not answer."""
        self.met: list[Notice] = []
        """What was amiss with the file: in place of a damaged last line it has this now."""
        self._lost: Halted | None = None
        with own_file(path), contextlib.ExitStack() as on_error:
            open(path, "r+b", buffering=0, opener=_open_or_create).close()
            self._lock = JournalLock(path, lease_seconds)
            on_error.callback(self._lock.release)
            if self._lock.lease.has_followed_a_silent_one:
                _replace_by_copy(path)
            refuse_earlier_format(path)
            self._file = on_error.enter_context(path.open("r+b", buffering=0))
            with heard_by(self.met.append):
                self._whole_bytes = _apply_all(path, self.study)
            if published is not None:
                published.begin(path.read_bytes()[: self._whole_bytes])
            for notice in self.met:  # over the damaged line, which tells of itself again until the notice is on disk
                self._put(noticed(notice))
            self._file.truncate(self._whole_bytes)
            on_error.pop_all()

    def append(self, event: Event) -> None:
        """Write the event to disk, then apply it to the study. Raises Halted if the disk refuses, and at every later
        call."""
        with self.at_the_disk():
            self._raise_if_lost(before_a_line=True)
            try:
                self._put(event)
            except StorageLost as error:
                self._lost = Halted(str(error))
                with contextlib.suppress(OSError):  # if this fails too, the next writer cuts the torn line off
                    self._file.truncate(self._whole_bytes)
                raise self._lost from error

    def _put(self, event: Event) -> None:
        """Write the event to disk, and to where the study is published, then apply it to the study. Raises StorageLost if either
        refuses."""
        body = event.model_dump_json().encode()
        line = line_of(body)
        with own_file(self.path):
            self._file.seek(self._whole_bytes)
            _write_all(self._file, line)
            os.fsync(self._file.fileno())
        if self.published is not None:
            self.published.append(line)
        self._whole_bytes += len(line)
        # The study gets what a replay will read: a value that JSON cannot hold must not be known here either.
        self.study.apply(parser.validate_json(body))

    def raise_if_lost(self) -> None:
        """Raise Halted if the file could not be written before, or is gone: whatever is not in it has not happened."""
        with self.at_the_disk():
            self._raise_if_lost(before_a_line=False)

    def _raise_if_lost(self, *, before_a_line: bool) -> None:
        self._lost = self._lost or self._trouble(before_a_line)
        if self._lost is not None:
            raise self._lost

    def has_vanished(self) -> bool:
        """True if the file or its directory was taken away, so that nothing should be written there any more."""
        return isinstance(self._lost or self._trouble(before_a_line=True), Vanished)

    def _trouble(self, before_a_line: bool) -> Halted | None:
        """Return what is wrong with the path: it must lead to the file that this process writes. before_a_line: true if an object store
        is asked in any case, which takes a request."""
        try:
            if self.published is not None and (loss := self.published.loss(ask=before_a_line)):
                return Vanished(loss)
            if self._lock.lease.is_followed():
                return Vanished(self._lock.lease.loss())
            if not leads_to(self.path, self._file):
                return _taken_away(self.path)
            loss = self._lock.loss()
            return Vanished(loss) if loss else _without_a_directory()
        except StorageLost as error:
            return Halted(str(error))
        except OSError as error:
            return Halted(f"{quoted(self.path)} could not be read: {error.strerror}")

    def close(self) -> None:
        self._lock.release()
        self._file.close()
        if self.published is not None:
            self.published.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


def replay(path: Path, name: str) -> Study:
    """Return the study that the journal tells of, for readers; a last line that is still being written is left out.

    A damaged last line is among the study's notices.
    """
    study, met = Study(name), list[Notice]()
    with heard_by(met.append):
        _apply_all(path, study)
    for notice in met:
        study.apply(noticed(notice))
    return study


def _apply_all(path: Path, study: Study) -> int:
    """Apply every whole line to the study, and return the bytes that they take."""
    end = 0
    for line in applied(path, study):
        end = line.end
    return end


def applied(path: Path, study: Study) -> Iterator[Line]:
    """Apply every whole line to the study, and yield each after that. Raises ValueError where one tells of a trial that
    the study does not have."""
    for line in read_lines(path):
        event = line.event
        if isinstance(event, TrialEvent | Retried) and event.id not in study.trials:
            raise ValueError(
                f"line {line.number} of {quoted(path)} is about the trial '{event.id}', which no line before it proposes; "
                "restore the file from a copy"
            )
        study.apply(event)
        yield line


def _replace_by_copy(path: Path) -> None:
    """Put a copy in the file's place: a process that is suspended between its last look at its lease and a write would write into the
    middle of what follows, and writes so into a file that nobody has."""
    with path.open("rb") as former, written_whole(path) as copy:
        shutil.copyfileobj(former, copy)


def _open_or_create(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_CREAT, 0o666)


def _write_all(file: io.RawIOBase, data: bytes) -> None:
    """Write all of the data: a disk that fills up takes a part of it before it refuses."""
    while data:
        data = data[file.write(data) or 0 :]
