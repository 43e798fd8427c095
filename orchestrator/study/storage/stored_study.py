"""A study whose run directory is in an object store: its journal there, and the copy on this machine that a driver works in.

An object cannot be appended to, so the journal is a folder of numbered objects for each driver, named by the driver's generation:
`journal/000003/00000000.jsonl` holds all lines that there were when it began, each later one a line more, and is never written again.
Readers take the last generation alone. What a driver that was followed still writes lies in its own, and is read by nobody.
"""

from __future__ import annotations

import shutil
from collections import defaultdict
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path, PurePosixPath

from batchscout.orchestrator.study.storage.copies import copies_of
from batchscout.orchestrator.study.storage.lease import LEASE_SECONDS, Holder, generation_name
from batchscout.orchestrator.study.storage.object_lease import ObjectLease
from batchscout.orchestrator.study.storage.place import ObjectStore
from batchscout.orchestrator.study.storage.stored_trials import (
    TRIALS,
    StoredTrials,
    below_of,
    is_no_checkpoint,
    is_no_open_log,
)
from batchscout.trainers.files import exists, make_private_directory, own_file, quoted, written_whole

SEGMENT_DIGITS = 8
REQUESTS_AT_ONCE = 16
RESULTS = ("report.html", "recommendation.json")


class StoredStudy:
    """A study in an object store, which this process holds until `close`, and its copy here, which is the store's as it was then."""

    def __init__(
        self, store: ObjectStore, lease_seconds: float = LEASE_SECONDS, *, runs_trials_here: bool = True
    ) -> None:
        """Take the study and fetch it. runs_trials_here: true if all trials run in this copy; else machines of a cluster run them, each in
        its own, and this one has no checkpoints. Raises ValueError where another process has it, or where the store cannot be used."""
        store.refuse_unusable()
        self.store = store
        self.lease = ObjectLease(store, Holder.here(), lease_seconds)
        self.trials = StoredTrials(store, None if runs_trials_here else self.lease.number)
        try:
            self.run_dir = _copy_of(store, self.lease.number, begins=store.read("study.yaml") is None)
            _fetch_file(store, "study.yaml", self.run_dir)
            _write(self.run_dir / "journal.jsonl", stored_journal(store))
            if runs_trials_here:
                store.fetch(self.run_dir / TRIALS, TRIALS)
            self.fetch_what_others_ran()
        except BaseException:
            self.lease.release()
            raise
        self._num_segments = 0

    def begin(self, lines: bytes) -> None:
        """Write all lines that there are as the first segment of this driver's generation, and remove those before it."""
        self.append(lines)
        for name in self.store.stored("journal"):
            if PurePosixPath(name).parent.name < generation_name(self.lease.number):
                self.store.remove(name)

    def append(self, line: bytes) -> None:
        """Write the journal's next line. Raises StorageLost where the store refuses."""
        self.store.write(_segment(self.lease.number, self._num_segments), line)
        self._num_segments += 1

    def loss(self, *, ask: bool) -> str | None:
        """Return in words that another process has followed this one; None where none has, as far as is known without asking the store,
        unless it is asked. Raises StorageLost where it does not answer."""
        return None if self.lease.is_held(ask=ask) else self.lease.loss()

    def publish_study(self) -> None:
        self.store.upload(self.run_dir / "study.yaml", "study.yaml")

    def publish_results(self) -> None:
        publish_results(self.store, self.run_dir)

    def fetch_what_others_ran(self, trial_id: str | None = None) -> None:
        """Have here what ranks on a cluster's machines have kept of a trial, or of all, but for checkpoints."""
        if self.trials.generation is not None:
            below = TRIALS if trial_id is None else below_of(trial_id)
            self.store.fetch(self.run_dir / below, below, is_no_checkpoint)

    def add_trials(self) -> None:
        """Have there what trials that run in this copy have left: what ranks that crashed or were ended could not write there."""
        if self.trials.generation is None and exists(self.run_dir / TRIALS):
            self.store.add(self.run_dir / TRIALS, TRIALS, self._is_finished)

    def _is_finished(self, name: str) -> bool:
        """True unless it is a log that a rank had open for the stack of a crash, and none came."""
        if is_no_open_log(name):
            return True
        try:
            return (self.run_dir / name).stat().st_size > 0
        except FileNotFoundError:  # a rank has just removed it
            return False

    def add_logs(self, logs: Iterable[Path]) -> None:
        """Write these files of trials, which lie in this copy."""
        for log in logs:
            self.store.upload(log, log.relative_to(self.run_dir).as_posix())

    def discard(self, is_discarded: Callable[[PurePosixPath], bool]) -> None:
        """Remove what the trials have saved, by its path below them: `<trial id>/checkpoints/...`."""
        for name in self.store.stored(TRIALS):
            if is_discarded(PurePosixPath(name).relative_to(TRIALS)):
                self.store.remove(name)

    def told(self, text: str) -> str:
        """Return a message with the place that the user named, in place of the copy's."""
        return text.replace(str(self.run_dir), str(self.store))

    def close(self) -> None:
        self.lease.release()


def publish_results(store: ObjectStore, run_dir: Path) -> None:
    """Write report and recommendation there, as far as they are here."""
    for name in RESULTS:
        if exists(run_dir / name):
            store.upload(run_dir / name, name)


def stored_journal(store: ObjectStore) -> bytes:
    """Return the lines of the last driver's generation, which begins with those of all before it; none where no study has begun.
    Raises ValueError where an object between others is missing."""
    segments = defaultdict[str, list[str]](list)
    for name in sorted(store.stored("journal")):
        segments[PurePosixPath(name).parent.name].append(name)
    begun = [number for number, names in segments.items() if names[0] == _segment(int(number), 0)]
    if not begun:
        return b""
    names, number = segments[max(begun)], int(max(begun))
    for index, name in enumerate(names):
        if name != _segment(number, index):
            raise ValueError(
                f"{quoted(store.at(_segment(number, index)))} is missing from the journal; restore it from a copy"
            )
    with ThreadPoolExecutor(REQUESTS_AT_ONCE) as pool:
        pieces = list(pool.map(store.read, names))
    whole = [piece for piece in pieces if piece is not None]
    # A driver that has just begun removes what it has taken over: then that is read.
    return b"".join(whole) if len(whole) == len(pieces) else stored_journal(store)


def _segment(generation: int, index: int) -> str:
    return f"journal/{generation_name(generation)}/{index:0{SEGMENT_DIGITS}d}.jsonl"


def read_copy(store: ObjectStore, folder: Path) -> None:
    """Fetch into an empty folder what tells of a study: all but its checkpoints. Raises ValueError where the store cannot be used."""
    store.refuse_unusable()
    for name in ("study.yaml", *RESULTS):
        _fetch_file(store, name, folder)
    if lines := stored_journal(store):
        _write(folder / "journal.jsonl", lines)
    store.fetch(folder / TRIALS, TRIALS, is_no_checkpoint)


def _fetch_file(store: ObjectStore, name: str, folder: Path) -> None:
    content = store.read(name)
    if content is not None:
        _write(folder / name, content)
        return
    with own_file(folder / name, "removed"):
        (folder / name).unlink(missing_ok=True)


def _write(path: Path, content: bytes) -> None:
    with written_whole(path) as file:
        file.write(content)


def _copy_of(store: ObjectStore, generation: int, *, begins: bool) -> Path:
    """Return the folder of this machine in which this driver works. An earlier driver's is taken over by its new name: should that one
    wake up, it finds its own no more. begins: true where the store has no study, and so what is here is of one that was removed there."""
    copies = copies_of(store, "driver")
    copy = copies / generation_name(generation)
    with own_file(copies):
        make_private_directory(copies)
        others = sorted(other for other in copies.iterdir() if begins or other != copy)
        if others and not begins and not exists(copy):
            others.pop().rename(copy)
        for other in others:
            shutil.rmtree(other, ignore_errors=True)
        copy.mkdir(mode=0o700, exist_ok=True)
        (copy / "journal.lock").unlink(missing_ok=True)  # the store's lease holds, whoever has this one locked
        shutil.rmtree(copy / ".lease", ignore_errors=True)
    return copy
