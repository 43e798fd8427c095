"""How a process has ended, told to one that is not its parent: Ray starts the ranks, and keeps to itself what became of them.

A pidfd names one process, whatever its number is given to later. Linux 6.15 and later tell through it how the process ended.
"""

from __future__ import annotations

import fcntl
import os
import select
import struct

_PIDFD_GET_INFO = 0xC040FF0B
_EXIT = 1 << 3
"""Asks for the exit status, and says that it is there; of `struct pidfd_info`, whose first field it is."""
_INFO_BYTES, _STATUS_AT = 64, 60


def pid_namespace() -> str:
    """Return a name that is the same for two processes if one's process ids mean the same to the other."""
    with open("/proc/sys/kernel/random/boot_id") as file:
        return f"{file.read().strip()} {os.readlink('/proc/self/ns/pid')}"


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


def exit_code(pidfd: int) -> int | None:
    """Return how the process ended, as `subprocess` does: its exit status, or less than 0 for a signal.

    None while it runs, and where the kernel is too old to tell.
    """
    info = bytearray(_INFO_BYTES)
    struct.pack_into("Q", info, 0, _EXIT)
    try:
        fcntl.ioctl(pidfd, _PIDFD_GET_INFO, info)
    except OSError:
        return None
    is_told = struct.unpack_from("Q", info)[0] & _EXIT
    return os.waitstatus_to_exitcode(struct.unpack_from("i", info, _STATUS_AT)[0]) if is_told else None
