"""Says that the run directory's storage does not answer. A write to a mount whose server is away hangs, and the driver with it: it goes on
when the server is back, and looks dead until then."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator

from batchscout.orchestrator.study.journal import Journal
from batchscout.orchestrator.study.storage.place import SECONDS_TO_COME_BACK
from batchscout.orchestrator.units import seconds_text
from batchscout.trainers.files import quoted

SECONDS_UNTIL_TOLD = 10.0

_IF_A_MOUNT_IS_GONE = (
    "Should it never answer, end this process (kill -9), and run the same command again when it is back"
)
_IF_A_STORE_IS_GONE = f"After {SECONDS_TO_COME_BACK:g} s it stops; run the same command again when the store is back"


@contextlib.contextmanager
def told_if_storage_hangs(
    journal: Journal, say: Callable[[str], object], seconds: float = SECONDS_UNTIL_TOLD
) -> Iterator[None]:
    """Say what the journal waits for, once it has waited so long, and again when that has answered."""
    store = None if journal.published is None else journal.published.store
    where = f"the storage of {quoted(journal.path.parent)}" if store is None else str(store)
    watch = _Watch(where, _IF_A_MOUNT_IS_GONE if store is None else _IF_A_STORE_IS_GONE, say, seconds)
    journal.at_the_disk = watch.waiting
    try:
        yield
    finally:
        journal.at_the_disk = contextlib.nullcontext
        watch.end()


class _Watch:
    """A thread of its own, since the one that waits can say nothing."""

    def __init__(self, what: str, or_else: str, say: Callable[[str], object], seconds: float) -> None:
        self._what, self._or_else, self._say, self._seconds = what, or_else, say, seconds
        self._changing = threading.Lock()
        self._waits_since: float | None = None
        self._is_told = False
        self._is_over = threading.Event()
        threading.Thread(target=self._keep_looking, daemon=True).start()

    @contextlib.contextmanager
    def waiting(self) -> Iterator[None]:
        """Within it this thread reads or writes."""
        began, has_answered = time.monotonic(), False
        with self._changing:
            self._waits_since = began
        try:
            yield
            has_answered = True
        finally:
            with self._changing:
                self._waits_since = None
                if self._is_told and has_answered:
                    self._say(f"{self._what} answers again, after {seconds_text(time.monotonic() - began)}")
                self._is_told = False

    def _keep_looking(self) -> None:
        while not self._is_over.wait(min(1.0, self._seconds)):
            with self._changing:
                waits = self._waits_since is not None and time.monotonic() - self._waits_since >= self._seconds
                if waits and not self._is_told:
                    self._is_told = True
                    self._say(
                        f"{self._what} has not answered for {self._seconds:g} s: the study waits, and goes on when it "
                        f"does; nothing is lost. {self._or_else}"
                    )

    def end(self) -> None:
        self._is_over.set()
