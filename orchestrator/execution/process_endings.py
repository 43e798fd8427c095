"""How a process has ended, told to one that is not its parent: Ray starts the ranks, and keeps to itself what became of them.

A pidfd names one process, whatever its number is given to later. Linux 6.15 and later tell through it how the process ended, once its
parent has waited for it. That may take seconds: if the parent is gone as well, whoever takes its place need not be quick. Until then
/proc tells.
"""

from __future__ import annotations

import fcntl
import os
import select
import struct
from pathlib import Path

from batchscout.orchestrator.study.storage.lease import boot, numbered_in

_PIDFD_GET_INFO = 0xC040FF0B
_EXIT = 1 << 3
"""Asks for the exit status, and says that it is there; of `struct pidfd_info`, whose first field it is."""
_INFO_BYTES, _STATUS_AT = 64, 60
_STATUS_OF_STAT = 52 - 4
"""Of /proc/PID/stat the 52nd field has the wait status (proc_pid_stat(5)), and the third is the first after the name."""


def pid_namespace() -> str:
    """Return a name that is the same for two processes if one's process ids mean the same to the other; empty where the kernel has none."""
    return f"{boot()} {numbered_in()}" if boot() and numbered_in() else ""


def open_process(process_id: int) -> int | None:
    """Return a pidfd of the process; None if it is gone, or if it may not be watched."""
    try:
        return os.pidfd_open(process_id)
    except OSError:
        return None


def has_ended(pidfd: int) -> bool:
    return wait_for_end(pidfd, 0)


def wait_for_end(pidfd: int, seconds: float) -> bool:
    """Wait at most so long; False if the process still runs."""
    poll = select.poll()  # `select` takes no descriptor above 1023, and a driver may have many
    poll.register(pidfd, select.POLLIN)
    return bool(poll.poll(1000 * seconds))


def was_waited_for(pidfd: int) -> bool:
    """True if the process has ended and its parent knows how: nothing more is to be told of it."""
    return _number(pidfd) is None


def exit_code(pidfd: int) -> int | None:
    """Return how the process ended, as `subprocess` does: its exit status, or less than 0 for a signal.

    None while it runs, and where the kernel is too old to tell.
    """
    number = _number(pidfd)
    status = None if number is None else _status_of_zombie(number)
    status = _status_after_waiting(pidfd) if status is None else status
    return None if status is None else os.waitstatus_to_exitcode(status)


def _number(pidfd: int) -> int | None:
    """Return the number of the process; None once its parent has waited for it."""
    lines = Path(f"/proc/self/fdinfo/{pidfd}").read_text().splitlines()
    number = next(int(line.removeprefix("Pid:")) for line in lines if line.startswith("Pid:"))
    return number if number > 0 else None


def _status_of_zombie(number: int) -> int | None:
    """Return the wait status of a process for which its parent has not yet waited; None if it runs, if it is gone, and if it is 0,
    which Linux also says to those who may not know."""
    try:
        state, *fields = Path(f"/proc/{number}/stat").read_text().rpartition(") ")[2].split()
    except OSError:
        return None
    return int(fields[_STATUS_OF_STAT]) or None if state == "Z" else None


def _status_after_waiting(pidfd: int) -> int | None:
    """Return the wait status of a process for which its parent has waited; None before, and where the kernel is too old."""
    info = bytearray(_INFO_BYTES)
    struct.pack_into("Q", info, 0, _EXIT)
    try:
        fcntl.ioctl(pidfd, _PIDFD_GET_INFO, info)
    except OSError:
        return None
    is_told = struct.unpack_from("Q", info)[0] & _EXIT
    return struct.unpack_from("i", info, _STATUS_AT)[0] if is_told else None
