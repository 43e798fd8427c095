"""The trials of a study in an object store: what they have saved is there before the journal tells of it, so that any machine goes on with
them."""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from batchscout.orchestrator.study.storage.copies import copies_of, discard_earlier_copies
from batchscout.orchestrator.study.storage.lease import generation_name
from batchscout.orchestrator.study.storage.place import ObjectStore, files_by_object
from batchscout.trainers.data.cache import alone
from batchscout.trainers.files import exists, make_private_directory, own_file

TRIALS = "trials"
CHECKPOINTS, CHECKPOINT = "checkpoints", ".pt"


@dataclass(frozen=True)
class StoredTrials:
    """Where the trials of a study are, for whoever runs one of them."""

    store: ObjectStore
    generation: int | None
    """Of the driver, of which every machine of a cluster has a copy to run trials in. None: they run where the driver's own copy is."""

    def directory(self, trial_id: str, of_the_driver: str) -> Path:
        """Return where a trial's files lie on this machine. of_the_driver: where they lie in the driver's copy."""
        return Path(of_the_driver) if self.generation is None else self._copy(self.generation) / TRIALS / trial_id

    def fetch(self, trial_id: str, *, checkpoints_alone: bool) -> None:
        """Have here what the store holds of a trial: no later checkpoint, since the journal knows nothing of it. checkpoints_alone: for
        ranks that read them and write nothing. Raises StorageLost where either refuses."""
        if self.generation is None:
            return
        copy = self._copy(self.generation)
        with own_file(copy):
            make_private_directory(copy)
            discard_earlier_copies(copy)
        folder, below = copy / TRIALS / trial_id, below_of(trial_id)
        with alone(folder):  # the first of this machine's ranks fetches it, and the others find it there
            self.store.fetch(folder, below, is_checkpoint)
            if not checkpoints_alone:
                self.store.fetch(folder, below, is_no_checkpoint, removes=False)

    def leave(self, trial_id: str) -> None:
        """Free the room that a machine of a cluster has for what a trial has saved, all of which the store has: whoever goes on with it fetches
        it, and a study has more trials than such a disk may hold."""
        if self.generation is not None:
            shutil.rmtree(self._copy(self.generation) / TRIALS / trial_id / CHECKPOINTS, ignore_errors=True)

    def publication(self, trial_id: str, folder: Path) -> Publication:
        return Publication(self.store, folder, below_of(trial_id))

    def _copy(self, generation: int) -> Path:
        return copies_of(self.store, "ranks") / generation_name(generation)


class Publication:
    """The files of a trial that a rank writes, in the store. What other drivers' ranks have there stays."""

    def __init__(self, store: ObjectStore, folder: Path, below: str) -> None:
        self._store, self._folder, self._below = store, folder, below
        self._known = set(filter(is_replaced, files_by_object(folder, below))) if exists(folder) else set[str]()

    def update(self) -> None:
        """Write what is new, and remove the checkpoints of this process that a later one here has replaced. Raises StorageLost where the
        store refuses."""
        here = set(filter(is_replaced, self._store.add(self._folder, self._below, is_no_open_log)))
        # One that is gone without a successor was replaced by nothing: somebody clears this disk while the process still runs.
        replaced = {name for name in self._known - here if here and name < max(here)}
        for name in replaced:
            self._store.remove(name)
        self._known = (self._known | here) - replaced

    def add_what_it_tells(self) -> None:
        """Write all but checkpoints: steps, noise, and what the trial failed of."""
        self._store.add(self._folder, self._below, lambda name: is_no_open_log(name) and is_no_checkpoint(name))

    def add(self, name: str) -> None:
        """Write one file, if it is there."""
        if exists(self._folder / name):
            self._store.upload(self._folder / name, f"{self._below}/{name}")


def below_of(trial_id: str) -> str:
    return f"{TRIALS}/{trial_id}"


def is_checkpoint(name: str) -> bool:
    return name.endswith(CHECKPOINT)


def is_no_checkpoint(name: str) -> bool:
    """True for what tells of a trial: steps, noise, logs."""
    return not is_checkpoint(name)


def is_replaced(name: str) -> bool:
    """True for a checkpoint that the trial's next one replaces; those in a directory below are kept for other runs."""
    return is_checkpoint(name) and PurePosixPath(name).parent.name == CHECKPOINTS


def is_no_open_log(name: str) -> bool:
    """False for what a rank has open as long as it runs the trial, for the stack of a crash, and removes if none comes."""
    return not PurePosixPath(name).name.startswith("crash-rank")
