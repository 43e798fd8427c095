"""The processes that a process has started, and those that they have started: a user's code may start some and end none. Loads no torch."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import time
from collections import defaultdict
from pathlib import Path

_PR_SET_CHILD_SUBREAPER, _PR_GET_CHILD_SUBREAPER = 36, 37
# Processes that are about to be killed may start others meanwhile; one that waits for its storage may not go at all.
MOST_LOOKS, SECONDS_BETWEEN_LOOKS = 100, 0.02
# Helpers that end by themselves when the last process ends that uses them, and put away what that has left in shared memory.
_TIDY_UP = ("multiprocessing.resource_tracker", "torch_shm_manager")


def adopt_orphans() -> None:
    """Have every descendant whose parent ends become a child of this process, until it ends itself."""
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def adopts_orphans() -> bool:
    answer = ctypes.c_int()
    ctypes.CDLL(None).prctl(_PR_GET_CHILD_SUBREAPER, ctypes.byref(answer), 0, 0, 0)
    return bool(answer)


def end_descendants() -> None:
    """Kill what this process has started, and what that has started. Those whose parent has ended before are found where this process adopts
    them."""
    for _ in range(MOST_LOOKS):
        living = [number for number in _descendants(os.getpid()) if not _tidies_up(number)]
        if not living:
            return
        for number in living:
            with contextlib.suppress(
                ProcessLookupError, PermissionError
            ):  # it has ended meanwhile, or has another user's rights
                os.kill(number, signal.SIGKILL)
        time.sleep(SECONDS_BETWEEN_LOOKS)


def _descendants(process_id: int) -> list[int]:
    """Return those that live."""
    children, ended = defaultdict[int, list[int]](list), set[int]()
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):  # it has ended meanwhile
            state, parent, *_ = stat.read_text(errors="replace").rpartition(")")[2].split()
            children[int(parent)].append(number := int(stat.parent.name))
            if state in "ZX":
                ended.add(number)
    found, left = list[int](), [process_id]
    while left:
        below = children[left.pop()]
        left += below
        found += [number for number in below if number not in ended]
    return found


def _tidies_up(number: int) -> bool:
    try:
        command = Path(f"/proc/{number}/cmdline").read_text(errors="replace")
    except OSError:
        return False
    return any(name in command for name in _TIDY_UP)
