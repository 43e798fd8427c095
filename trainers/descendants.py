"""The processes that a process has started, and those that they have started: a user's code may start some and end none. Loads no torch."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator
from pathlib import Path

_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER, _PR_GET_CHILD_SUBREAPER = 1, 36, 37
# Processes that are about to be killed may start others meanwhile; one that waits for its storage may not go at all.
MOST_LOOKS, SECONDS_BETWEEN_LOOKS = 100, 0.02
# Helpers that end by themselves when the last process ends that uses them, and put away what that has left in shared memory.
_TIDY_UP = ("multiprocessing.resource_tracker", "torch_shm_manager", "wandb-core")


def end_with(parent: int) -> bool:
    """Have this process killed as soon as the one that has started it ends; return False if it has ended by now."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    return os.getppid() == parent


def adopt_orphans(whether: bool = True) -> None:
    """Have every descendant whose parent ends become a child of this process, until it ends itself."""
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, int(whether), 0, 0, 0)


def adopts_orphans() -> bool:
    answer = ctypes.c_int()
    ctypes.CDLL(None).prctl(_PR_GET_CHILD_SUBREAPER, ctypes.byref(answer), 0, 0, 0)
    return bool(answer)


@contextlib.contextmanager
def ending_what_is_started() -> Iterator[None]:
    """Kill on leaving what this thread has started within the block, and what that has started, orphans, too. In a notebook there are others:
    what was there before stays, and so does what other threads have started."""
    did_adopt, before = adopts_orphans(), {number for number, _ in _children()[os.getpid()]}
    adopt_orphans()
    try:
        yield
    finally:
        end_descendants(spared := lambda: before | _started_by_other_threads())
        for number in {number for number, _ in _children()[os.getpid()]} - spared():
            with contextlib.suppress(ChildProcessError):  # whoever started it has waited for it
                os.waitpid(number, os.WNOHANG)
        adopt_orphans(did_adopt)


def end_descendants(spared: Callable[[], Collection[int]] = frozenset) -> None:
    """Kill what this process has started, and what that has started. Those whose parent has ended before are found where this process adopts
    them. spared: children that are left, with all that these have started."""
    for _ in range(MOST_LOOKS):
        living = [number for number in _descendants(os.getpid(), spared()) if not _tidies_up(number)]
        if not living:
            return
        for number in living:
            # It has ended meanwhile, or has another user's rights.
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(number, signal.SIGKILL)
        time.sleep(SECONDS_BETWEEN_LOOKS)


def _descendants(process_id: int, spared: Collection[int]) -> list[int]:
    """Return those that live."""
    children, found, left = _children(), list[int](), [process_id]
    while left:
        below = [child for child in children[left.pop()] if child[0] not in spared]
        left += [number for number, _ in below]
        found += [number for number, lives in below if lives]
    return found


def _children() -> dict[int, list[tuple[int, bool]]]:
    """Return the children of every process, each with whether it lives."""
    children = defaultdict[int, list[tuple[int, bool]]](list)
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):  # it has ended meanwhile
            state, parent, *_ = stat.read_text(errors="replace").rpartition(")")[2].split()
            children[int(parent)].append((int(stat.parent.name), state not in "ZX"))
    return children


def _started_by_other_threads() -> set[int]:
    """Return the children of this process that others of its threads have started. Orphans that it adopts become the main thread's."""
    found = set[int]()
    for thread in Path("/proc/self/task").iterdir():
        with contextlib.suppress(OSError):  # it has ended meanwhile
            if int(thread.name) != threading.get_native_id():
                found |= set(map(int, (thread / "children").read_text().split()))
    return found


def _tidies_up(number: int) -> bool:
    try:
        command = Path(f"/proc/{number}/cmdline").read_text(errors="replace")
    except OSError:
        return False
    return any(name in command for name in _TIDY_UP)
