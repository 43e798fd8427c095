"""What tells whether a process sees the run directory. It imports little: a node that is asked starts a process for it."""

from __future__ import annotations

import time
import uuid
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

from batchscout.orchestrator.study.storage.place import ObjectStore
from batchscout.trainers.files import StorageLost, written_whole

# How long storage in a network may take until one node sees what another has written.
SECONDS_TO_SEE = 5.0


@dataclass(frozen=True)
class Marker:
    """A file in the run directory with a random word, which only who sees that directory can read."""

    path: str
    word: str

    def is_read(self) -> bool:
        try:
            return Path(self.path).read_text() == self.word
        except OSError:  # absent, or a directory above it that may not be entered
            return False


@dataclass(frozen=True)
class StoreMarker:
    """A study's file in its object store, which only who may read there can read."""

    store: ObjectStore

    def is_read(self) -> bool:
        try:
            return self.store.read("study.yaml") is not None
        except StorageLost:  # no network, no credentials, or other ones
            return False


RunMarker: TypeAlias = Marker | StoreMarker


def is_seen(marker: RunMarker, seconds: float = SECONDS_TO_SEE) -> bool:
    """True if this process reads what the marker names, at once or within so many seconds."""
    deadline = time.monotonic() + seconds
    while not marker.is_read():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.1)
    return True


def mark(folder: Path) -> Marker:
    """Write a marker in a folder of the run directory's that is gone once the study is over."""
    marker = Marker(str(folder / "seen_by_all"), uuid.uuid4().hex)
    with written_whole(Path(marker.path)) as file:
        file.write(marker.word.encode())
    return marker
