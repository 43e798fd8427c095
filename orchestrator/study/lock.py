"""One driver at a time: the note beside a journal, which says who writes it and is locked by that process.

The lock is the kernel's, and belongs to one process (fcntl): it goes when that process ends, however it ends, and no fork
of it has it, whether Python forked or a library did. A process loses such a lock when it closes the file anywhere, so
nothing but this module opens a note. Where a file system has no locks, the note itself is the lock: only one process
can create it, and it stays where that process was killed.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import io
import json
import os
import socket
import struct
import time
import uuid
import weakref
from dataclasses import asdict, dataclass
from pathlib import Path

from trainers.files import own_file, quoted

# What a file system without locks says: NFS without its lock service, Lustre and FUSE as many mount them.
_NO_LOCKS = {errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOLCK, errno.EINVAL}
# `struct flock` of <fcntl.h>: type, whence, start, length, process.
_FLOCK = "hhqqi4x"


@dataclass(frozen=True)
class Holder:
    """The process that holds a lock."""

    host: str
    pid: int
    since: float
    """In seconds since 1970."""

    def __str__(self) -> str:
        since = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(self.since))
        return f"process {self.pid} on {self.host}, since {since}"

    def is_gone(self) -> bool:
        """True if it ran on this host and has ended. Of another host nobody can say."""
        return self.host == socket.gethostname() and not _is_alive(self.pid)


class JournalLock:
    """The lock on a journal, which this process holds until `release`."""

    def __init__(self, path: Path) -> None:
        """Lock the journal, which must exist. Raises ValueError, naming who holds the lock, where another process does."""
        self.note = note_of(path)
        before = _held_here(self.note)
        if before is not None:
            raise ValueError(_refusal(before.holder, path.parent))
        self.holder = Holder(socket.gethostname(), os.getpid(), time.time())
        with own_file(self.note):
            self._file = _lock(self.note, self.holder) if _has_locks(path) else _create(self.note, self.holder)
        _held.add(self)

    def is_at(self, note: Path) -> bool:
        """True if it is the lock that other processes find there. No longer, where the note was removed or replaced."""
        return leads_to(note, self._file)

    def release(self) -> None:
        """Let another process have the lock. A fork of this one has nothing to release."""
        _held.discard(self)
        with contextlib.suppress(OSError):  # a note that stays names a process that is gone
            if os.getpid() == self.holder.pid and self.is_at(self.note):
                self.note.unlink()
        self._file.close()


_held: weakref.WeakSet[JournalLock] = weakref.WeakSet()
"""The locks of this process, and of those that it is a fork of."""


def is_locked(path: Path) -> bool:
    """True if a process has the journal open for writing now."""
    note = note_of(path)
    if _held_here(note) is not None:
        return True
    try:
        with note.open("rb") as file:
            return _is_taken(file)
    except FileNotFoundError:
        return False
    except OSError as error:
        if error.errno not in _NO_LOCKS:
            raise
    holder = _holder_of(note)
    return holder is not None and not holder.is_gone()


def note_of(path: Path) -> Path:
    """Return where the note lies that says who holds a journal's lock."""
    return path.with_suffix(".lock")


def _held_here(note: Path) -> JournalLock | None:
    """Return the lock if this process holds it, which the kernel would give it again, and take if it opened the note."""
    mine = (lock for lock in _held if lock.holder.pid == os.getpid())
    return next((lock for lock in mine if lock.is_at(note)), None)


def _lock(note: Path, me: Holder) -> io.FileIO:
    """Return the note, open and locked, with `me` in it. Raises ValueError where another process has it."""
    while True:
        with contextlib.ExitStack() as on_error:
            file = on_error.enter_context(note.open("a+b", buffering=0))
            try:
                fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise ValueError(_refusal(_holder_of(note), note.parent)) from None
            if leads_to(note, file):  # else whoever had the lock has removed the note meanwhile
                file.truncate(0)
                file.write(_text_of(me))
                on_error.pop_all()
                return file


def leads_to(path: Path, file: io.FileIO) -> bool:
    """True if the open file is the one that the path names now."""
    try:
        return os.path.samestat(path.stat(), os.fstat(file.fileno()))
    except (FileNotFoundError, NotADirectoryError):
        return False


def _has_locks(path: Path) -> bool:
    """True if the file system of this file has locks."""
    try:
        with path.open("rb") as file:
            _is_taken(file)
    except OSError as error:
        if error.errno not in _NO_LOCKS:
            raise
        return False
    return True


def _is_taken(file: io.IOBase) -> bool:
    """True if another process has locked the file; nobody is kept out by asking."""
    asked = struct.pack(_FLOCK, fcntl.F_RDLCK, os.SEEK_SET, 0, 0, 0)
    return struct.unpack(_FLOCK, fcntl.fcntl(file, fcntl.F_GETLK, asked))[0] != fcntl.F_UNLCK


def _create(note: Path, me: Holder) -> io.FileIO:
    """Create the note, which only one process can, and return it. Raises ValueError where another process has."""
    before = _holder_of(note)
    # A container that is started again has the name and the numbers that it had before.
    if before is not None and (before.is_gone() or (before.host, before.pid) == (me.host, me.pid)):
        _remove(note, before)
    try:
        file = note.open("xb", buffering=0)
    except FileExistsError:
        remedy = f"; if that process is no more, remove {quoted(note)} and run again"
        raise ValueError(_refusal(_holder_of(note), note.parent) + remedy) from None
    file.write(_text_of(me))
    return file


def _remove(note: Path, before: Holder) -> None:
    """Remove the note of a process that is gone, unless another process has just done so and written its own."""
    aside = note.with_name(f".{note.name}.{uuid.uuid4().hex[:8]}")
    with contextlib.suppress(FileNotFoundError):
        os.rename(note, aside)
        if _holder_of(aside) == before:
            aside.unlink()
        else:
            os.rename(aside, note)


def _refusal(holder: Holder | None, run_dir: Path) -> str:
    who = f"another process ({holder})" if holder else "another process"
    return f"{who} is running the study in {quoted(run_dir)}; wait for it, end it, or choose another --dir"


def _holder_of(note: Path) -> Holder | None:
    """Return whom the note names; None if there is no note, or if it is being written."""
    try:
        return Holder(**json.loads(note.read_text()))
    except (OSError, ValueError, TypeError):
        return None


def _text_of(holder: Holder) -> bytes:
    return json.dumps(asdict(holder)).encode() + b"\n"


def _is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True
