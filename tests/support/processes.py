"""What the kernel tells of running processes."""

from __future__ import annotations

import contextlib
import ipaddress
import os
import platform
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import AnyStr

ROOT = Path(__file__).parents[2]
LISTENING = "0A"
HANGS_AFTER_SECONDS = 200.0
"""What a test waits for that is to come at once. It costs nothing: only what hangs takes so long, and on a busy machine nothing else
does. pytest ends the test itself after a little more."""
WAITS = "import sys; sys.stdin.read()"
"""What a child does until its pipe is closed."""


def descendants(pid: int) -> list[int]:
    """The processes that a process has started, those that these have started, and so on."""
    try:
        tasks = [*Path(f"/proc/{pid}/task").glob("*/children")]
    except OSError:  # it has just ended
        return []
    children = [int(child) for task in tasks for child in read(task).split()]
    return [*children, *(below for child in children for below in descendants(child))]


def descended_from(folder: Path) -> list[int]:
    """The living processes that have inherited DESCENDS_FROM with this folder, whoever is their parent now."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # it has ended
            if f"DESCENDS_FROM={folder}\0".encode() in (process / "environ").read_bytes():
                found.append(int(process.name))
    return found


def servers_among(pids: list[int], name: str) -> list[int]:
    """Those that are the server of Ray's with this name. A raylet forks, and for a moment its child has its words."""
    named = [pid for pid in pids if read(Path(f"/proc/{pid}/cmdline")).split("\0")[0].endswith(f"/{name}")]
    return [pid for pid in named if _parent(pid) not in (None, *named)]


def _parent(pid: int) -> int | None:
    fields = read(Path(f"/proc/{pid}/stat")).rpartition(")")[2].split()
    return int(fields[1]) if fields else None


def kill_node_of(rank: int) -> float:
    """End the raylet that has started this process, and whatever else it has; return when."""
    raylet = int(Path(f"/proc/{rank}/stat").read_text().rpartition(")")[2].split()[1])
    struck = time.time()
    kill(raylet, *descendants(raylet))
    return struck


def kill(*pids: int) -> None:
    """End those of them that have not ended."""
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def read(file: Path) -> str:
    """Empty of a process that has ended."""
    try:
        return file.read_text()
    except OSError:
        return ""


def listens_beyond_loopback(pids: list[int]) -> list[str]:
    """The sockets of these processes that other machines can connect to: process, address and port."""
    owners = {inode: pid for pid in pids for inode in _sockets(pid)}
    found = list[str]()
    for table in ("tcp", "tcp6"):
        for line in Path("/proc/net", table).read_text().splitlines()[1:]:
            _, local, _, state, *_, inode = line.split()[:10]
            address, port = local.split(":")
            if state == LISTENING and inode in owners and not _is_loopback(address):
                title = read(Path(f"/proc/{owners[inode]}/cmdline")).split("\0")[0]
                found.append(f"{title} ({owners[inode]}): {address}:{int(port, 16)}")
    return found


def _sockets(pid: int) -> list[str]:
    links = list[str]()
    for descriptor in Path(f"/proc/{pid}/fd").glob("*"):
        try:
            links.append(str(descriptor.readlink()))
        except OSError:
            continue
    return [link.removeprefix("socket:[").removesuffix("]") for link in links if link.startswith("socket:[")]


def _is_loopback(words: str) -> bool:
    """True if an address of /proc/net/tcp or tcp6, 32-bit words of reversed bytes, is one of loopback."""
    raw = b"".join(bytes.fromhex(words[i : i + 8])[::-1] for i in range(0, len(words), 8))
    address = ipaddress.ip_address(raw)
    mapped = getattr(address, "ipv4_mapped", None)
    return (mapped or address).is_loopback


def kernel_tells() -> bool:
    """True if it is new enough to tell how another's child ended."""
    major, minor = re.findall(r"\d+", platform.release())[:2]
    return (int(major), int(minor)) >= (6, 15)


def without_rays_settings() -> dict[str, str]:
    """Return this process's environment without what a study in it has had Ray set: a token that the cluster does not have, for one."""
    return {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}


def of_a_driver_on(address: str) -> dict[str, str]:
    """The environment in which a driver takes an address of loopback for what it is: Ray takes it for that of the machine in its network,
    unless it is told that there is none. No node starts so."""
    return {"RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0"} if address.startswith("127.") else {}


def python(*words: str, cwd: Path | None = None, **environment: str) -> subprocess.CompletedProcess[str]:
    """Python with these arguments in a process of its own, which has this clone's code wherever it is started."""
    settings = os.environ | {"PYTHONPATH": str(ROOT)} | environment
    command = [sys.executable, *words]
    return subprocess.run(command, cwd=cwd, env=settings, capture_output=True, text=True, timeout=HANGS_AFTER_SECONDS)


def apart(folder: Path, rays: Path, *words: str) -> str:
    """What Python with these arguments prints in a folder. rays: where Ray's files and the cache are."""
    settings = without_rays_settings() | {"PYTHONPATH": str(ROOT)}
    settings |= {"RAY_TMPDIR": str(rays), "BATCHSCOUT_CACHE": str(rays / "cache")}
    done = subprocess.run([sys.executable, *words], cwd=folder, env=settings, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:] + done.stdout[-2000:]
    return done.stdout


def next_line(process: subprocess.Popen[AnyStr]) -> AnyStr:
    """What it says next."""
    assert process.stdout is not None
    return process.stdout.readline()


def answer(process: subprocess.Popen[str], words: str) -> str:
    """What it says when it is told this line."""
    assert process.stdin is not None
    process.stdin.write(f"{words}\n")
    process.stdin.flush()
    return next_line(process).strip()


def until(condition: Callable[[], bool], what: str, seconds: float = 30) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"not within {seconds:g} s: {what}"
        time.sleep(0.1)
