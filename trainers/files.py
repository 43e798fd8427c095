"""Files that are whole or absent, whatever dies while they are written."""

from __future__ import annotations

import contextlib
import errno
import os
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import IO

PARTIAL = ".partial"
# Errors that are the disk's and not the writer's: full, over quota, past a limit, gone, or read-only since an error.
_OF_THE_DISK = {
    errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.EROFS, errno.ESTALE, errno.ENODEV, errno.ENXIO,
}  # fmt: skip


class StorageLost(Exception):
    """A file could not be written, and that is the disk's doing; what was there before is still there."""


@contextlib.contextmanager
def naming_the_disk(path: Path) -> Iterator[None]:
    """Raise an error of the disk, also one that a library has wrapped in its own, as a StorageLost that names the
    file."""
    try:
        yield
    except Exception as error:
        of_the_disk = next(
            (one for one in _chain(error) if isinstance(one, OSError) and one.errno in _OF_THE_DISK), None
        )
        if of_the_disk is None:
            raise
        raise StorageLost(f"{path} could not be written: {of_the_disk.strerror}") from error


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__


@contextlib.contextmanager
def written_whole(path: Path) -> Iterator[IO[bytes]]:
    """Open a file that becomes `path` when the block ends, or nothing where the block raises. Its directory is made.

    Until then it has a name that nobody else uses: two who write the same path never meet in one file.
    Content and name are both synced to the disk: after a crash a file that was only renamed may be empty.
    Raises StorageLost where the disk is full or gone.
    """
    with naming_the_disk(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        partial = path.with_name(f".{path.name}.{uuid.uuid4().hex[:8]}{PARTIAL}")
        try:
            with partial.open("wb") as file:
                yield file
                file.flush()
                os.fsync(file.fileno())
            partial.replace(path)
        finally:
            partial.unlink(missing_ok=True)
        sync(path.parent)


def sync(path: Path) -> None:
    """Sync a file to the disk, whoever wrote it, or a directory: the names in it."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
