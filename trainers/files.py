"""Files that are whole or absent, whatever dies while they are written, and their paths as people paste them."""

from __future__ import annotations

import contextlib
import errno
import os
import shlex
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, Literal

PARTIAL = ".partial"
# Errors that are the disk's and not the writer's: full, over quota, past a limit, gone, busy, or read-only since an
# error.
_OF_THE_DISK = {
    errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.EROFS, errno.ESTALE, errno.ENODEV, errno.ENXIO,
    errno.EBUSY, errno.EREMOTEIO,
}  # fmt: skip
# Errors of storage that is reached over a network, and of other connections.
_OF_A_CONNECTION = {errno.ETIMEDOUT, errno.ENOTCONN, errno.ECONNABORTED, errno.ESHUTDOWN, errno.EHOSTDOWN}
# Errors after which the same call may succeed in a moment.
_PASSING = {errno.EBUSY, errno.EAGAIN}
# How long a file that is busy is waited for.
SECONDS_TO_WAIT = 5.0

Done = Literal["written", "read", "removed"]


class StorageLost(Exception):
    """A file could not be written or read, and that is the storage's doing; what was there before is still there."""


@contextlib.contextmanager
def own_file(path: Path, done: Done = "written") -> Iterator[None]:
    """Raise every OSError as a StorageLost that names the file: for a block that touches nothing but this file of
    ours."""
    with _raised_as_lost(path, done, lambda error: True):
        yield


def is_there(path: Path) -> bool:
    """Return whether this file of ours exists. Raises StorageLost where the storage does not tell."""
    with own_file(path, "read"):
        return exists(path)


def exists(path: Path) -> bool:
    """Return whether something is at this path. Raises OSError where the storage does not tell: from Python 3.14 on `Path.exists` takes
    that for a no, and a study would begin anew where its disk fails."""
    try:
        path.stat()
    except (FileNotFoundError, NotADirectoryError):
        return False
    return True


@contextlib.contextmanager
def naming_the_disk(path: Path, done: Done = "written") -> Iterator[None]:
    """Raise an error of the disk as a StorageLost that names the path: for a block that runs other code, too.

    That is an error which can be nothing but a disk's, or one of any kind that names a file at or below the path.
    """
    with _raised_as_lost(path, done, lambda error: error.errno in _OF_THE_DISK or _names_a_file_below(path, error)):
        yield


def storage_error(error: BaseException) -> OSError | None:
    """Return the error if it is one of storage, local or over a network, or the one that it was raised from; else
    None."""
    one = error if isinstance(error, OSError) else error.__cause__
    return one if isinstance(one, OSError) and one.errno in _OF_THE_DISK | _OF_A_CONNECTION else None


@contextlib.contextmanager
def _raised_as_lost(path: Path, done: Done, is_the_disks: Callable[[OSError], bool]) -> Iterator[None]:
    try:
        yield
    except StorageLost:  # a block within this one has named its file
        raise
    except Exception as error:
        named = next((one for one in _chain(error) if isinstance(one, StorageLost)), None)
        # A library may have wrapped it in its own.
        of_the_disk = next((one for one in _chain(error) if isinstance(one, OSError) and is_the_disks(one)), None)
        if named is not None:
            raise StorageLost(str(named)) from error
        if of_the_disk is None:
            raise
        raise StorageLost(f"{quoted(path)} could not be {done}: {of_the_disk.strerror or of_the_disk}") from error


def _names_a_file_below(path: Path, error: OSError) -> bool:
    names = [name for name in (error.filename, error.filename2) if isinstance(name, str)]
    return any(Path(name).is_relative_to(path) for name in names)


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    while error is not None:
        yield error
        error = error.__cause__ or (None if error.__suppress_context__ else error.__context__)


@contextlib.contextmanager
def written_whole(path: Path) -> Iterator[IO[bytes]]:
    """Open a file that becomes `path` when the block ends, or nothing where the block raises. Its directory is made.

    Until then it has a name that nobody else uses: two who write the same path never meet in one file.
    Content and name are both synced to the disk: after a crash a file that was only renamed may be empty.
    Raises StorageLost where the storage refuses.
    """
    with own_file(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        partial = path.with_name(f".{path.name}.{uuid.uuid4().hex[:8]}{PARTIAL}")
        try:
            with partial.open("wb") as file:
                yield file
                file.flush()
                os.fsync(file.fileno())
            _waiting_while_busy(lambda: partial.replace(path))
        finally:
            with contextlib.suppress(OSError):  # what it would say hides why the file could not be written
                partial.unlink(missing_ok=True)
        sync(path.parent)


def make_private_directory(path: Path) -> None:
    """Make a directory that only its user can enter, whatever the umask allows others; its parents are as the umask says.

    One that is already there stays as it is: whoever has opened it to others meant to.
    """
    path.mkdir(mode=0o700, parents=True, exist_ok=True)


def _waiting_while_busy(act: Callable[[], object]) -> None:
    """Do it, and again for some seconds while the storage says that it is busy: that passes by itself."""
    deadline = time.monotonic() + SECONDS_TO_WAIT
    while True:
        try:
            act()
            return
        except OSError as error:
            if error.errno not in _PASSING or time.monotonic() > deadline:
                raise
        time.sleep(0.1)


def sync(path: Path) -> None:
    """Sync a file to the disk, whoever wrote it, or a directory: the names in it."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def seen_from(directory: Path, path: str) -> Path:
    """Return where a path leads from a directory that need not be there yet; an absolute one leads where it says."""
    return Path(os.path.normpath(directory / path))


def quoted(path: Path | str) -> str:
    """Return the path as it can be pasted into a shell, without control characters; a plain path stays as it is."""
    text = str(path)
    if text.isprintable():
        return shlex.quote(text)
    return "$'" + "".join(map(_in_ansi_c_quotes, text)) + "'"


def _in_ansi_c_quotes(character: str) -> str:
    if character.isprintable() and character not in "'\\":
        return character
    return "".join(f"\\x{byte:02x}" for byte in os.fsencode(character))
