"""Where a machine keeps its copies of a study that is in an object store: in batchscout's cache, a folder for each driver's generation."""

from __future__ import annotations

import hashlib
import shutil
from pathlib import Path, PurePosixPath
from typing import Literal

from batchscout.orchestrator.study.storage.place import ObjectStore
from batchscout.trainers.data.cache import cache_directory


def copies_of(store: ObjectStore, whose: Literal["driver", "ranks"]) -> Path:
    """Return where this machine keeps them. Ranks have their own on a cluster, whose machines are not all the driver's."""
    address = str(store).partition("?")[0].rstrip("/")
    digest = hashlib.sha256(str(store).encode()).hexdigest()[:12]
    return cache_directory() / "runs" / f"{PurePosixPath(address).name}-{digest}{'-ranks' if whose == 'ranks' else ''}"


def discard_earlier_copies(copy: Path) -> None:
    """Remove the copies of earlier drivers beside this one: what counts of them is in the store."""
    for other in copy.parent.iterdir():
        if other.name < copy.name:
            shutil.rmtree(other, ignore_errors=True)
