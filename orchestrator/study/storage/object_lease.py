"""A lease on a study whose run directory is in an object store, as `lease.py` has it for folders.

A store cannot create an object that only one process can have (not through pyarrow), and tells what was written before to
whoever asks afterwards. So who wants the next generation writes an object for it and then lists them: whoever finds another's there
steps back. Of two that write at once both may step back, and never both stay.
"""

from __future__ import annotations

import contextlib
import json
import threading
import time
import uuid
from dataclasses import asdict
from pathlib import PurePosixPath

from batchscout.orchestrator.study.storage.lease import (
    NUM_DIGITS,
    TIMES_IN_A_LEASE,
    Holder,
    Term,
    generation_name,
    is_gone,
    refused,
    taken_over,
)
from batchscout.orchestrator.study.storage.place import ObjectStore
from batchscout.trainers.files import StorageLost

FOLDER = "lease"
# A store tells times in whole seconds.
SECONDS_OF_A_STORES_CLOCK = 2.0


class ObjectLease:
    """The last generation of a study in a store, which this process holds until `release`, or until another has followed it."""

    def __init__(self, store: ObjectStore, me: Holder, seconds: float) -> None:
        """Take the next generation. Raises ValueError, naming the holder, where another process has the last one."""
        self._store, self._seconds = store, seconds
        now = _now_of(store)  # first: what is asked afterwards may take long, and its holder lives meanwhile
        before = last_stored_term(store, now)
        if before is not None and not _is_free(before, me):
            raise refused(before, str(store))
        self.number = before.number + 1 if before is not None else 1
        self._name = f"{generation_name(self.number)}-{uuid.uuid4().hex[:12]}"
        self._told = asdict(me) | {"seconds": seconds, "released": False}
        self._lock = threading.Lock()
        self._say(self._told)
        others = [name for name in _names(store) if name != self._name]
        if any(number_of(name) >= self.number for name in others):
            store.remove(f"{FOLDER}/{self._name}")
            raise ValueError(
                f"another process has just begun to run the study in {store}; wait for it, end it, or choose another --dir"
            )
        for name in others:
            store.remove(f"{FOLDER}/{name}")
        self._stopped = threading.Event()
        threading.Thread(target=self._keep, name="object lease", daemon=True).start()

    def _say(self, told: dict[str, object]) -> None:
        """Write that this process lives. From before that on, nobody follows it for the time of the lease."""
        began = _uptime()
        self._store.write(f"{FOLDER}/{self._name}", json.dumps(told).encode())
        self._certain_until = began + self._seconds

    def is_held(self, *, ask: bool) -> bool:
        """True if nobody has followed this process. Within the time of its lease nobody should have, so that the store need not be asked;
        but a machine that was halted as a whole does not know of it. Raises StorageLost where the store does not answer."""
        return (not ask and _uptime() < self._certain_until) or _names(self._store)[-1:] == [self._name]

    def loss(self) -> str:
        """Return in words that another process has followed."""
        with contextlib.suppress(StorageLost):
            if (last := last_stored_term(self._store, time.time())) is not None:
                return taken_over(last.holder, str(self._store), self._seconds)
        return taken_over(None, str(self._store), self._seconds)

    def _keep(self) -> None:
        """Say again and again that this process lives, until another has followed it."""
        while not self._stopped.wait(self._seconds / TIMES_IN_A_LEASE):
            with contextlib.suppress(StorageLost):  # a store that is away comes back, or another driver follows
                if not self.is_held(ask=True):
                    return
                with self._lock:
                    if not self._stopped.is_set():
                        self._say(self._told)

    def release(self) -> None:
        """Let another process have the study at once. Its object stays, so that the next number is higher."""
        with self._lock:
            if self._stopped.is_set():
                return
            self._stopped.set()
            with contextlib.suppress(StorageLost):  # a lease that stays runs out
                if self.is_held(ask=True):
                    self._store.write(f"{FOLDER}/{self._name}", json.dumps(self._told | {"released": True}).encode())


def last_stored_term(store: ObjectStore, now: float) -> Term | None:
    """Return the last generation, as it stands at this time of the store's clock; None where there was none yet."""
    objects = store.stored(FOLDER)
    name = max((name for name in objects if "now-" not in name), default=None)
    if name is None:
        return None
    told = store.read(name)
    if told is None:  # whoever has followed has just removed it
        return last_stored_term(store, now)
    number, fields = number_of(PurePosixPath(name).name), json.loads(told)
    seconds = fields["seconds"] + SECONDS_OF_A_STORES_CLOCK
    return Term(number, Holder.told(fields), seconds, now - objects[name].time, fields["released"])


def is_stored_study_run(store: ObjectStore) -> bool:
    """True if a process was heard of there lately that is not known to have ended."""
    last = last_stored_term(store, time.time())
    return last is not None and not _is_free(last, Holder.here())


def _is_free(term: Term, me: Holder) -> bool:
    return term.is_released or term.has_run_out or is_gone(term.holder, me, others_here_are_gone=False)


def _names(store: ObjectStore) -> list[str]:
    """Return the names of the generations, the last one last."""
    return sorted(PurePosixPath(name).name for name in store.stored(FOLDER) if "now-" not in name)


def number_of(name: str) -> int:
    return int(name[:NUM_DIGITS])


def _now_of(store: ObjectStore) -> float:
    """Return the time by the store's clock."""
    name = f"{FOLDER}/now-{uuid.uuid4().hex[:12]}"
    store.write(name, b"now")
    try:
        return store.stored(FOLDER)[name].time
    finally:
        store.remove(name)


def _uptime() -> float:
    """Return the seconds since this machine was started, those of its sleep among them."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)
