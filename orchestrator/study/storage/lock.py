"""One driver at a time: the lock on the note beside a journal, for this machine, and the lease, for all others.

The lock is the kernel's, and belongs to one process (fcntl): it goes when that process ends, however it ends, and no fork
of it has it, whether Python forked or a library did. A process loses such a lock when it closes the file anywhere, so
nothing but this module opens a note. Where a file system has no locks there is no note, and the lease alone holds.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import io
import json
import os
import struct
import time
import weakref
from dataclasses import asdict
from pathlib import Path

from batchscout.orchestrator.study.storage.lease import (
    LEASE_SECONDS,
    Holder,
    Lease,
    is_gone,
    last_term,
    now_there,
    refusal,
    text_of,
)
from batchscout.trainers.files import own_file, quoted

# What a file system without locks says: NFS without its lock service, Lustre and FUSE as many mount them.
_NO_LOCKS = {errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOLCK, errno.EINVAL}
# `struct flock` of <fcntl.h>: type, whence, start, length, process.
_FLOCK = "hhqqi4x"


class JournalLock:
    """The lock on a journal, which this process holds until `release`."""

    def __init__(self, path: Path, lease_seconds: float = LEASE_SECONDS) -> None:
        """Lock the journal, which must exist. Raises ValueError, naming who holds it, where another process does.

        lease_seconds: how long this process may be silent before another may follow it.
        """
        self.note = note_of(path)
        before = _held_here(self.note)
        if before is not None:
            raise ValueError(refusal(f"another process ({before.holder})", path.parent))
        self.holder = Holder.here()
        with own_file(self.note), contextlib.ExitStack() as on_error:
            has_locks = _has_locks(path)
            self._file = _lock(self.note, self.holder) if has_locks else None
            silent = self._silent_one(path.parent) if has_locks and self._file is None else None
            if self._file is not None:
                on_error.callback(self._file.close)
            gone = self._file is not None
            self.lease = Lease(path.parent, self.holder, lease_seconds, others_here_are_gone=gone)
            on_error.callback(self.lease.release)
            if silent is not None:
                self._file = self._in_the_place_of(silent)
            on_error.pop_all()
        _held.add(self)

    def _silent_one(self, run_dir: Path) -> int:
        """Return the process of this machine that has the lock, and whose lease has run out: it is suspended. Raises ValueError where
        it is not, and so runs the study."""
        term, pid = last_term(run_dir / ".lease", now_there(run_dir)), _pid_with_lock(self.note)
        if pid is None:  # it has just ended
            raise ValueError(_refusal_by_note(self.note))
        # Of a process on another machine the kernel tells no number; another of this one is about to take the lease.
        is_another = term.holder is None or (pid > 0 and pid != term.holder.pid)
        if is_another or term.is_released:
            raise ValueError(_refusal_by_note(self.note))
        if not term.has_run_out:
            raise ValueError(refusal(term.who, run_dir))
        return pid

    def _in_the_place_of(self, silent: int) -> io.FileIO:
        """Return the note anew, and locked: the one that was there is locked by a process that was followed."""
        if _pid_with_lock(self.note) == silent:
            self.note.unlink(missing_ok=True)
        file = _lock(self.note, self.holder)
        if file is None:  # another process was first, and so has followed this one
            raise ValueError(_refusal_by_note(self.note))
        return file

    def is_at(self, note: Path) -> bool:
        """True if it is the lock that other processes find there. No longer, where the note was removed or replaced."""
        return self.lease.is_at(note.parent) if self._file is None else leads_to(note, self._file)

    def loss(self) -> str | None:
        """Return in words how another process may have got the study; None where none has. Raises OSError where the storage does
        not answer."""
        return None if self.is_at(self.note) and self.lease.is_held() else _unlocked(self.note)

    def release(self) -> None:
        """Let another process have the lock. A fork of this one has nothing to release."""
        _held.discard(self)
        if os.getpid() == self.holder.pid:
            self.lease.release()
            with contextlib.suppress(OSError):  # a note that stays names a process that is gone
                if self.is_at(self.note):
                    self.note.unlink()
        if self._file is not None:
            self._file.close()


_held: weakref.WeakSet[JournalLock] = weakref.WeakSet()
"""The locks of this process, and of those that it is a fork of."""


def is_locked(path: Path) -> bool:
    """True if a process has the journal open for writing now."""
    note = note_of(path)
    if _held_here(note) is not None:
        return True
    try:
        has_locks = _has_locks(path)
        return (has_locks and _pid_with_lock(note) is not None) or _is_leased(path.parent, has_locks)
    except FileNotFoundError:
        return False


def _is_leased(run_dir: Path, has_locks: bool) -> bool:
    """True if a process was heard of there lately that is not known to have ended."""
    with own_file(run_dir / ".lease", "read"):
        term = last_term(run_dir / ".lease", time.time())
    if term.is_released or term.has_run_out:
        return False
    return term.holder is None or not is_gone(term.holder, Holder.here(), others_here_are_gone=has_locks)


def note_of(path: Path) -> Path:
    """Return where the note lies that says who holds a journal's lock."""
    return path.with_suffix(".lock")


def _held_here(note: Path) -> JournalLock | None:
    """Return the lock if this process holds it, which the kernel would give it again, and take if it opened the note."""
    mine = (lock for lock in _held if lock.holder.pid == os.getpid())
    return next((lock for lock in mine if lock.is_at(note)), None)


def _lock(note: Path, me: Holder) -> io.FileIO | None:
    """Return the note, open and locked, with `me` in it; None where another process has it."""
    while True:
        with contextlib.ExitStack() as on_error:
            file = on_error.enter_context(note.open("a+b", buffering=0))
            try:
                fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                return None
            if leads_to(note, file):  # else whoever had the lock has removed the note meanwhile
                file.truncate(0)
                file.write(text_of(asdict(me)))
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
            _lock_on(file)  # nobody is kept out by asking
    except OSError as error:
        if error.errno not in _NO_LOCKS:
            raise
        return False
    return True


def _lock_on(file: io.IOBase) -> tuple[int, int]:
    """Return (the type of the lock that another process has on the file, the process)."""
    asked = struct.pack(_FLOCK, fcntl.F_RDLCK, os.SEEK_SET, 0, 0, 0)
    kind, _, _, _, pid = struct.unpack(_FLOCK, fcntl.fcntl(file, fcntl.F_GETLK, asked))
    return kind, pid


def _pid_with_lock(note: Path) -> int | None:
    """Return the process that has the note locked, 0 or less where that is on another machine or in another container; None where
    none has. Not to be asked by the process that has it itself."""
    try:
        with note.open("rb") as file:
            kind, pid = _lock_on(file)
    except FileNotFoundError:
        return None
    return None if kind == fcntl.F_UNLCK else pid


def _refusal_by_note(note: Path) -> str:
    holder = _holder_of(note)
    return refusal(f"another process ({holder})" if holder else None, note.parent)


def _unlocked(note: Path) -> str:
    return (
        f"{quoted(note)} was deleted, moved or replaced while the study ran: another process may run the study now. If "
        "none does, run the same command again to go on with it; nothing is lost"
    )


def _holder_of(note: Path) -> Holder | None:
    """Return whom the note names; None if there is no note, or if it is being written."""
    try:
        return Holder(**json.loads(note.read_text()))
    except (OSError, ValueError, TypeError):
        return None
