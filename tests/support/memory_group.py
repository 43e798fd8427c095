"""A memory control group for a program, in which the kernel can be made to end a process of one's choice."""

from __future__ import annotations

import contextlib
import errno
import os
import subprocess
import sys
import time
import uuid
from collections.abc import Callable
from pathlib import Path

from batchscout.trainers.device import cgroup
from tests.support.disk import NotHere

# The limit, and what is taken: version 2, and version 1.
FILES = (("memory.max", "memory.current"), ("memory.limit_in_bytes", "memory.usage_in_bytes"))
NO_LIMIT = {"memory.max": "max", "memory.limit_in_bytes": "-1"}
BYTES_AT_ONCE = 8 << 20
# What the kernel adds to a process's share of memory, in thousandths, when it looks for one to end. Ray gives its workers
# FIRST. Less than LAST takes more than root in a container.
LAST, SECOND, FIRST = "0", "800", "1000"
# The kernel ends a process when one of the group asks for memory; those that are struck may all be waiting. The one that
# asks goes SECOND: the kernel may look once more before the limit is lifted.
ASKS_FOR_MEMORY = "import time\nkept = []\nwhile True: kept.append(b'1' * (8 << 20)); time.sleep(0.02)"
SECONDS_TO_EMPTY = 60


class MemoryGroup:
    """A group below this process's own."""

    def __init__(self) -> None:
        """Raises NotHere where none can be made."""
        try:
            self.folder = next(cgroup.memory_groups()) / f"batchscout-faults-{uuid.uuid4().hex[:8]}"
            self.folder.mkdir()
        except (OSError, StopIteration) as error:
            raise NotHere("no control group can be made: it takes root, and a machine that has them") from error
        found = next((pair for pair in FILES if (self.folder / pair[0]).exists()), None)
        if found is None:
            self.folder.rmdir()
            raise NotHere("control groups made here have no limit of memory")
        self.limit, self._taken = (self.folder / name for name in found)

    def enter(self) -> None:
        """Put the process that calls this into the group; what it starts will be there, too."""
        (self.folder / "cgroup.procs").write_text(str(os.getpid()))

    def run_out(self, victim: int, is_gone: Callable[[], bool], seconds: float) -> None:
        """Lower the limit until the kernel ends the victim, before any other process of the group; then lift it again."""
        for pid in (self.folder / "cgroup.procs").read_text().split():
            with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # it has ended
                Path(f"/proc/{pid}/oom_score_adj").write_text(FIRST if int(pid) == victim else LAST)
        deadline = time.monotonic() + seconds
        with subprocess.Popen([sys.executable, "-c", ASKS_FOR_MEMORY], preexec_fn=self.enter) as asking:
            Path(f"/proc/{asking.pid}/oom_score_adj").write_text(SECOND)
            try:
                while not is_gone():
                    assert time.monotonic() < deadline, f"the kernel did not end it within {seconds:g} s"
                    self._lower_limit()
                    time.sleep(0.05)
            finally:
                self.limit.write_text(NO_LIMIT[self.limit.name])
                asking.kill()

    def _lower_limit(self) -> None:
        """Have some of it taken back, and where nothing can be, have whoever asks for more end the victim."""
        for num_bytes in (BYTES_AT_ONCE, 0):
            try:
                self.limit.write_text(str(max(0, int(self._taken.read_text()) - num_bytes)))
                return
            except OSError as error:
                if error.errno != errno.EBUSY:
                    raise

    def remove(self) -> None:
        """When its processes have been killed, for whose end it waits."""
        deadline = time.monotonic() + SECONDS_TO_EMPTY
        while True:
            try:
                return self.folder.rmdir()
            except OSError as error:
                if error.errno != errno.EBUSY or time.monotonic() > deadline:
                    raise
            time.sleep(0.05)
