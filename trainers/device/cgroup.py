"""What the kernel tells of this process's control group, v1 or v2: a container's, a job's of Slurm, a systemd unit's.

Files of a group are read where the kernel says that its file system is mounted, and not where it usually is.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

# The file with a limit, the one with what is taken, and the key in memory.stat of file pages that the kernel would drop.
_FILES = (
    ("memory.max", "memory.current", "inactive_file"),
    ("memory.high", "memory.current", "inactive_file"),
    ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
)
# The files that count the processes which the kernel ended for want of memory, as `oom_kill`.
_EVENTS = ("memory.events", "memory.oom_control")


def available_bytes(proc: Path = Path("/proc")) -> int:
    """Return the memory that this process can still take: the least that the host, its group or a group around it has."""
    free = [int(_fields(proc / "meminfo")["MemAvailable:"]) * 1024]
    return min([*free, *(left for group in memory_groups(proc) for left in _free_bytes(group))])


def limit_bytes(proc: Path = Path("/proc")) -> int | None:
    """Return the most memory that this process's group and those around it may ever take, whoever uses it now; None where
    none of them has a limit.

    A limit above what the host has is none: version 1 says so that a group has no limit.
    """
    limits = (limit for group in memory_groups(proc) for limit, _, _ in _limits(group))
    return min((limit for limit in limits if limit < _host_bytes(proc)), default=None)


def whole_bytes(proc: Path = Path("/proc")) -> int:
    """Return the most memory that this process and all others of its group may ever take: that of the host, or its limit."""
    return limit_bytes(proc) or _host_bytes(proc)


def _host_bytes(proc: Path) -> int:
    return int(_fields(proc / "meminfo")["MemTotal:"]) * 1024


def memory_kills(proc: Path = Path("/proc")) -> int:
    """Return how many processes of this process's group, or else of the host, the kernel has ended because memory had
    run out."""
    for group in memory_groups(proc):
        for name in _EVENTS:
            if (kills := _fields(group / name).get("oom_kill")) is not None:
                return int(kills)
    return int(_fields(proc / "vmstat").get("oom_kill", 0))


def cpu_quota(proc: Path = Path("/proc")) -> float | None:
    """Return the least time, in cores, that this process's group, version 2, or one around it has; None where none has a limit."""
    found = list[float]()
    for group in memory_groups(proc):
        if (file := group / "cpu.max").exists():
            quota, period = file.read_text().split()
            found += [int(quota) / int(period)] if quota != "max" else []
    return min(found, default=None)


def usable_cpus() -> int:
    """Return how many cores this process may use: a job's of Slurm, or what taskset has left it, may be fewer than the machine has."""
    allowed = len(os.sched_getaffinity(0))
    return max(1, int(min(allowed, cpu_quota() or allowed)))


def memory_groups(proc: Path = Path("/proc")) -> Iterator[Path]:
    """Yield the folders of this process's memory group and of the groups around it, as far as they can be seen."""
    mounts = [_mount(line) for line in (proc / "self/mountinfo").read_text().splitlines()]
    for line in (proc / "self/cgroup").read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        kind = "cgroup" if "memory" in controllers.split(",") else "cgroup2" if not controllers else None
        for mount in mounts:
            if mount.kind == kind and (kind == "cgroup2" or "memory" in mount.options):
                yield from mount.folders_of(path)


@dataclass(frozen=True)
class _Mount:
    """A mounted file system, of which `root` is what is seen at `folder`."""

    kind: str
    options: list[str]
    root: str
    folder: Path

    def folders_of(self, path: str) -> Iterator[Path]:
        """Yield the folder of a group and those above it. A group outside of what is mounted is not seen: in a container
        the mounted one is its own."""
        is_below = Path(path).is_relative_to(self.root) and ".." not in Path(path).parts
        below = Path(path).relative_to(self.root) if is_below else Path()
        for group in (self.folder / below, *(self.folder / below).parents):
            if group.is_relative_to(self.folder):
                yield group


def _mount(line: str) -> _Mount:
    """Read a line of mountinfo: "31 23 0:28 ROOT FOLDER rw - KIND SOURCE OPTIONS"."""
    before, _, after = line.partition(" - ")
    root, folder = before.split()[3:5]
    kind, _, options = after.split(" ", 2)
    return _Mount(kind, options.split(","), root, Path(folder))


def _free_bytes(group: Path) -> Iterator[int]:
    for limit, taken, droppable in _limits(group):
        dropped = int(_fields(group / "memory.stat").get(droppable, 0))
        yield max(0, limit - int(taken.read_text()) + dropped)


def _limits(group: Path) -> Iterator[tuple[int, Path, str]]:
    """Yield each limit of a group, with the file that says what is taken and the key of what the kernel would drop."""
    for limit, taken, droppable in _FILES:
        if (group / limit).exists() and (group / taken).exists():
            allowed = (group / limit).read_text().strip()
            if allowed != "max":
                yield int(allowed), group / taken, droppable


def _fields(file: Path) -> dict[str, str]:
    """Return the first two words of each line of a file; nothing where there is no such file."""
    lines = file.read_text().splitlines() if file.exists() else []
    return {words[0]: words[1] for line in lines if len(words := line.split()) > 1}
