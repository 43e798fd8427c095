"""The cache of packed text on disk: where it is, how an entry is named, and how it is built only once."""

from __future__ import annotations

import hashlib
import os
import shutil
import uuid
from collections.abc import Callable, Iterable
from pathlib import Path

from trainers.files import naming_the_disk


def cache_directory() -> Path:
    """Return $BATCHSCOUT_CACHE, or else batchscout's folder in the user's cache."""
    if own := os.environ.get("BATCHSCOUT_CACHE"):
        return Path(own)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "batchscout"


def cached(key: str, build: Callable[[Path], None]) -> Path:
    """Return the folder of this key, built first if it is not there.

    It is built aside and renamed when it is whole: nobody reads half of one, and of two builders the first wins.
    """
    entry = cache_directory() / "data" / key
    if entry.exists():
        return entry
    aside = entry.with_name(f".{key[:16]}-{uuid.uuid4().hex}")
    aside.mkdir(parents=True)
    try:
        with naming_the_disk(entry):
            build(aside)
        os.rename(aside, entry)
    except OSError:
        if not entry.exists():
            raise
    finally:
        shutil.rmtree(aside, ignore_errors=True)
    return entry


def hash_of(parts: Iterable[bytes]) -> str:
    digest = hashlib.sha256()
    for part in parts:
        digest.update(f"{len(part)} ".encode())
        digest.update(part)
    return digest.hexdigest()


def hash_of_file(path: Path) -> bytes:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").digest()
