"""The cache of packed text on disk: where it is, how an entry is named, and how it is built only once."""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import shutil
import time
import uuid
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO

from batchscout.trainers.files import (
    StorageLost,
    is_there,
    make_private_directory,
    naming_the_disk,
    own_file,
    quoted,
    sync,
)
from batchscout.trainers.notices import NoticeKind, give_notice


def cache_directory() -> Path:
    """Return $BATCHSCOUT_CACHE, or else batchscout's folder in the user's cache."""
    if own := os.environ.get("BATCHSCOUT_CACHE"):
        return Path(own)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "batchscout"


SECONDS_BETWEEN_LOOKS = 0.05
"""How often a process looks whether another has built what it waits for."""
CHECKSUMS = "checksums.json"
"""The file of an entry that holds the digests of the others, by their names."""


def cached(key: str, build: Callable[[Path], None]) -> Path:
    """Return the folder of this key, built first if it is not there or not as it was built; a notice says the latter.

    To tell, a process reads the whole entry once, and again when a file of it has another size or time. It is built aside
    and takes its place when it is whole and on the disk: nobody reads half of one. One process of a machine builds it, and the others,
    such as the ranks beside it, wait for that. Raises StorageLost where the storage refuses.
    """
    entry = cache_directory() / "data" / key
    is_absent = not is_there(entry)
    fault = None if is_absent else _fault_since_last_look(entry)
    if is_absent or fault is not None:
        with alone(entry) as has_waited:
            if (is_absent or has_waited) and is_there(entry):  # another process has built it meanwhile
                fault = _fault_since_last_look(entry)
            _build_or_mend(entry, build, fault)
    return entry


def _build_or_mend(entry: Path, build: Callable[[Path], None], fault: str | None) -> None:
    """Build the entry where it is absent, and again where it has a fault."""
    if not is_there(entry):
        with naming_the_disk(entry), _built(entry, build) as aside:
            _put(aside, entry)
    elif fault is not None:
        with naming_the_disk(entry), _built(entry, build) as aside:
            before = _replace(aside, entry)
        text = (
            f"the tokens in the data cache were not as they were written ({fault}) and were made again: {quoted(entry)}"
        )
        if before is not None:
            text += f"; the files there could not be replaced and lie in {quoted(before)}, which you may remove"
        give_notice(NoticeKind.REBUILT_DATA, text)


@contextmanager
def alone(entry: Path) -> Iterator[bool]:
    """Let one process of this machine at a time through, and yield whether it has waited for another.

    The process locks a file beside the entry, in which its number stands, and the lock ends with it: one that is killed keeps nobody
    waiting. Where such a file or lock is not possible, all go through: each builds aside, and the first to finish wins.
    """
    lock = entry.with_name(f".{entry.name[:16]}.lock")
    try:
        make_private_directory(cache_directory())
        lock.parent.mkdir(parents=True, exist_ok=True)
        file = lock.open("a+b", buffering=0)
    except OSError:  # whoever builds meets it again, and names what it was
        yield False
        return
    with file:
        has_waited = _wait_for_lock(file)
        with suppress(OSError):  # the number is for people
            file.truncate(0)
            file.write(f"{os.getpid()}\n".encode())
        try:
            yield has_waited
        finally:
            with suppress(OSError):  # a file that stays is locked by nobody
                lock.unlink()


def _wait_for_lock(file: IO[bytes]) -> bool:
    """Lock the file once no other process has it locked, and return whether one had. Where the file system has no locks, none has."""
    has_waited = False
    while True:
        try:
            fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return has_waited
        except BlockingIOError:
            has_waited = True
            time.sleep(SECONDS_BETWEEN_LOOKS)
        except OSError:
            return has_waited


@contextmanager
def _built(entry: Path, build: Callable[[Path], None]) -> Iterator[Path]:
    """A folder beside the entry that holds on the disk what the entry is to hold, for as long as the block takes."""
    aside = entry.with_name(f".{entry.name[:16]}-{uuid.uuid4().hex}")
    try:
        with own_file(aside):
            make_private_directory(cache_directory())
            aside.mkdir(parents=True)
    except StorageLost as error:  # its own place is in a home that few have named
        raise StorageLost(f"{error} (BATCHSCOUT_CACHE may name another folder for the cache)") from error
    try:
        with naming_the_disk(aside):
            build(aside)
        with own_file(aside):
            _seal(aside)
        yield aside
        sync(entry.parent)
    finally:
        shutil.rmtree(aside, ignore_errors=True)


def _seal(folder: Path) -> None:
    """Add the digests, and sync all to the disk: after a crash a file that was only renamed may be empty."""
    digests = {path.name: hash_of_file(path).hex() for path in sorted(folder.iterdir())}
    (folder / CHECKSUMS).write_text(json.dumps(digests))
    for path in (*folder.iterdir(), folder):
        sync(path)


def _replace(aside: Path, entry: Path) -> Path | None:
    """Put what was built in the place of an entry. Return where the old one lies now; None where its files could be
    replaced, and are gone.

    The digests come last. Whoever has the old files open keeps them, and whoever reads the entry meanwhile finds it damaged and builds
    the same once more.
    """
    names = sorted((path.name for path in aside.iterdir()), key=lambda name: name == CHECKSUMS)
    try:
        for name in names:
            (aside / name).replace(entry / name)
        sync(entry)
        return None
    except OSError:  # a bad sector or another user's folder; where a folder cannot be moved either, that is raised
        before = aside.with_name(f"{aside.name}-before")
        entry.rename(before)
        for name in names:
            if not is_there(aside / name):  # it was put into the entry before another one could not be
                (before / name).replace(aside / name)
        _put(aside, entry)
        return before


def _put(aside: Path, entry: Path) -> None:
    try:
        aside.rename(entry)
    except OSError:
        if not entry.exists():  # otherwise another builder was first
            raise


_found_whole: dict[Path, tuple[object, ...]] = {}
"""How the files looked of each entry that this process has read and found as it was built."""


def _fault_since_last_look(entry: Path) -> str | None:
    """Return in what an entry is not as it was built. A lane opens the same data for every trial, and it may be large."""
    try:
        looks = tuple(sorted((path.name, path.stat().st_size, path.stat().st_mtime_ns) for path in entry.iterdir()))
        if _found_whole.get(entry) == looks:
            return None
        changed = _changed(entry)
    except FileNotFoundError as error:
        return f"it has no {Path(error.filename).name}"
    except (ValueError, TypeError):
        return f"its {CHECKSUMS} is damaged"
    except OSError as error:
        return f"it cannot be read: {error.strerror}"
    if changed:
        return f"{', '.join(changed)} changed"
    _found_whole[entry] = looks
    return None


def _changed(entry: Path) -> list[str]:
    """Return the files of an entry that are not as they were built."""
    digests: dict[str, str] = dict(json.loads((entry / CHECKSUMS).read_bytes()))
    return [name for name, digest in digests.items() if hash_of_file(entry / name).hex() != digest]


def hash_of(parts: Iterable[bytes]) -> str:
    digest = hashlib.sha256()
    for part in parts:
        digest.update(f"{len(part)} ".encode())
        digest.update(part)
    return digest.hexdigest()


def hash_of_file(path: Path) -> bytes:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").digest()
