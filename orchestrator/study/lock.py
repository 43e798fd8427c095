"""One driver at a time: the lock on a journal, and the note beside it that says who holds it.

The lock is the kernel's (flock), which goes with its process however that ends. Where a file system has none, the note
itself is the lock: only one process can create it, and it stays where that process was killed.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import io
import json
import os
import socket
import time
import uuid
import weakref
from dataclasses import asdict, dataclass
from pathlib import Path

from trainers.files import own_file, quoted

# What flock says on a file system that has no locks: NFS without its lock service, Lustre and FUSE as many mount them.
_NO_FLOCK = {errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOLCK, errno.EINVAL}


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
    """A journal's lock, which this process holds until `release`."""

    def __init__(self, journal: io.FileIO, path: Path) -> None:
        """Lock the open journal. Raises ValueError, naming who holds it, where another process does."""
        self._journal, self._note, self._pid = journal, note_of(path), os.getpid()
        me = Holder(socket.gethostname(), self._pid, time.time())
        with own_file(self._note):
            if _flock(journal, fcntl.LOCK_EX, path):
                self._note.write_text(_text_of(me))
            else:
                _create(self._note, me)
        _held.add(self)

    def release(self) -> None:
        """Let another process have the lock. A fork of this one has nothing to release."""
        if os.getpid() == self._pid:
            with contextlib.suppress(OSError):  # a note that stays names a process that is gone
                self._note.unlink(missing_ok=True)
        self.let_go()

    def let_go(self) -> None:
        """Close this process's own copy of the file: the lock goes with the last copy."""
        _held.discard(self)
        self._journal.close()


_held: weakref.WeakSet[JournalLock] = weakref.WeakSet()


def _let_go_in_a_fork() -> None:
    """Close what a fork inherits: a helper that user code has forked would keep the lock when its driver is gone."""
    for lock in [*_held]:
        lock.let_go()


os.register_at_fork(after_in_child=_let_go_in_a_fork)


def is_locked(path: Path) -> bool:
    """True if a process has the journal open for writing now."""
    if not path.exists():
        return False
    with path.open("rb") as file:
        try:
            has_flock = _flock(file, fcntl.LOCK_SH, path)
        except ValueError:
            return True
    holder = None if has_flock else _holder(note_of(path))
    return holder is not None and not holder.is_gone()


def note_of(path: Path) -> Path:
    """Return where the note lies that says who holds a journal's lock."""
    return path.with_suffix(".lock")


def _flock(file: io.IOBase, kind: int, path: Path) -> bool:
    """Lock the file, and return False where its file system has no locks. Raises ValueError where another process has
    it."""
    try:
        fcntl.flock(file.fileno(), kind | fcntl.LOCK_NB)
    except BlockingIOError:
        raise ValueError(_refusal(_holder(note_of(path)), path.parent)) from None
    except OSError as error:
        if error.errno not in _NO_FLOCK:
            raise
        return False
    return True


def _create(note: Path, me: Holder) -> None:
    """Create the note, which only one process can. Raises ValueError where another process has."""
    before = _holder(note)
    # A container that is started again has the name and the numbers that it had before.
    if before is not None and (before.is_gone() or (before.host, before.pid) == (me.host, me.pid)):
        _remove(note, before)
    try:
        descriptor = os.open(note, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
    except FileExistsError:
        remedy = f"; if that process is no more, remove {quoted(note)} and run again"
        raise ValueError(_refusal(_holder(note), note.parent) + remedy) from None
    with os.fdopen(descriptor, "w") as file:
        file.write(_text_of(me))


def _remove(note: Path, before: Holder) -> None:
    """Remove the note of a process that is gone, unless another process has just done so and written its own."""
    aside = note.with_name(f".{note.name}.{uuid.uuid4().hex[:8]}")
    with contextlib.suppress(FileNotFoundError):
        os.rename(note, aside)
        if _holder(aside) == before:
            aside.unlink()
        else:
            os.rename(aside, note)


def _refusal(holder: Holder | None, run_dir: Path) -> str:
    who = f"another process ({holder})" if holder else "another process"
    gone = ", which has ended and left behind a process that has the lock" if holder and holder.is_gone() else ""
    where = quoted(run_dir)
    return f"{who}{gone} is running the study in {where}; wait for it, end it, or choose another --dir"


def _holder(note: Path) -> Holder | None:
    """Return whom the note names; None if there is no note, or if it is being written."""
    try:
        return Holder(**json.loads(note.read_text()))
    except (OSError, ValueError, TypeError):
        return None


def _text_of(holder: Holder) -> str:
    return json.dumps(asdict(holder)) + "\n"


def _is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True
