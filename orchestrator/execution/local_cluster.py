"""A study's own Ray cluster on this machine: where its files are, who may reach them and it, and whether it lives."""

from __future__ import annotations

import contextlib
import functools
import os
import secrets
import shutil
import signal
import stat
import subprocess
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

from batchscout.orchestrator.execution import process_endings
from batchscout.orchestrator.units import ending_text
from batchscout.trainers.files import own_file, quoted

# Sessions whose logs are kept when another begins. One takes a few MiB.
NUM_KEPT_SESSIONS = 10
SECONDS_BETWEEN_LOOKS = 0.5
# How long a killed process may take to be gone; one that waits for its storage may not go at all.
SECONDS_TO_DIE = 5.0
# A process that is about to be killed may start another one meanwhile.
LOOKS_FOR_WHAT_IS_LEFT = 2
# How long a signal to all processes of a study may take to reach the driver, too: then nothing was lost by itself.
SECONDS_FOR_A_SIGNAL = 1.0
# The kernel's bound on the path of a socket, less what Ray adds below its folder.
LONGEST_FOLDER = 107 - len("/session_2026-01-01_00-00-00_000000_1234567/sockets/plasma_store")


def protect_local_cluster() -> None:
    """Give the local cluster that is about to start a token of its own, where the user has none.

    Without one Ray 2.60 writes ~/.ray/auth_token, and every later `ray start` on this host then demands it of its
    workers and clients. Only the token is set: RAY_AUTH_MODE is Ray's to set, which ignores it once imported.
    """
    chosen = {"RAY_AUTH_MODE", "RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"} & os.environ.keys()
    if not chosen and not (Path.home() / ".ray" / "auth_token").exists():
        os.environ["RAY_AUTH_TOKEN"] = own_token()


@functools.cache
def own_token() -> str:
    """Return the token of this process's local clusters."""
    return secrets.token_hex(32)


def private_folder() -> Path:
    """Return this user's folder for Ray's sessions, which nobody else can enter, without those of long ago.

    Ray opens every folder that it makes to all users of the machine, for reading and writing. So its folders lie in
    one that they cannot enter. Raises ValueError where that belongs to somebody else, and StorageLost where it cannot
    be made.
    """
    folder = _folder()
    ours = folder.parent
    with own_file(ours):
        with contextlib.suppress(FileExistsError):
            ours.mkdir(mode=0o700)
        found = ours.lstat()
    if not ours.is_dir() or ours.is_symlink() or found.st_uid != os.getuid() or found.st_mode & 0o077:
        raise ValueError(
            f"{quoted(ours)} is open to other users of this machine, and Ray would keep logs and sockets of the study there; "
            f"remove it (rm -r {quoted(ours)}), or name another folder in RAY_TMPDIR"
        )
    with own_file(folder):
        folder.mkdir(exist_ok=True)
        _forget_old_sessions(folder)
    return folder


def _folder() -> Path:
    """Return where the sessions lie: below /tmp if the folder for temporary files has too long a name for the names of
    Ray's sockets."""
    own = f"batchscout-{os.getuid()}/ray"
    chosen = os.environ.get("RAY_TMPDIR") or tempfile.gettempdir()
    return Path(chosen if len(f"{chosen}/{own}") <= LONGEST_FOLDER else "/tmp", own)


def _forget_old_sessions(folder: Path) -> None:
    """Remove the sessions that have ended, except the latest ones, which somebody may want to look into."""
    commands = _commands()
    gone = (session for session in _sessions(folder) if not Path("/proc", str(_driver_of(session))).exists())
    for session in sorted(session for session in gone if session.name not in commands)[:-NUM_KEPT_SESSIONS]:
        shutil.rmtree(session, ignore_errors=True)  # another study may be at it, too


def _commands() -> str:
    """Return the commands of all processes. Ray's servers name their session, which on another node than its first has the number of a process
    there."""
    said = list[str]()
    for process in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):  # it has ended meanwhile
            said.append(process.read_text(errors="replace"))
    return "\n".join(said)


def _sessions(folder: Path) -> Iterator[Path]:
    """Yield the sessions, whose names sort by time and end with their driver's process id."""
    return (path for path in folder.glob("session_*_*_*_*") if path.name.rpartition("_")[2].isdigit())


def logs_told() -> str:
    """Return, in words, where the servers that this driver has started last have their logs; empty where it has started none."""
    own = sorted(session for session in _sessions(_folder()) if _driver_of(session) == os.getpid())
    return f"Ray's logs are in {quoted(own[-1] / 'logs')}" if own else ""


def _driver_of(session: Path) -> int:
    return int(session.name.rpartition("_")[2])


def ended(servers: Mapping[str, subprocess.Popen[bytes]]) -> str | None:
    """Return which of the servers have ended that the cluster cannot do without, and how; None while they all live."""
    codes = {name: code for name, server in servers.items() if (code := server.poll()) is not None}
    told = " and ".join(f"Ray's {name} {ending_text(code)}" for name, code in codes.items())
    by_themselves = any(code > 0 for code in codes.values())  # a signal comes from somebody else
    return (f"{told} ({logs_told()})" if by_themselves else told) or None


@contextlib.contextmanager
def watched(look: Callable[[], str | None], lost: Callable[[str], None]) -> Iterator[None]:
    """Call `lost`, in another thread, with what `look` returns as soon as that is something.

    A driver waits for a cluster that is gone for a minute, wherever it is at that moment, and then Ray ends it.
    """
    is_over = threading.Event()

    def watch() -> None:
        while not is_over.wait(SECONDS_BETWEEN_LOOKS):
            loss = look()
            if loss and not is_over.wait(SECONDS_FOR_A_SIGNAL):
                return lost(loss)

    thread = threading.Thread(target=watch, daemon=True)
    thread.start()
    try:
        yield
    finally:
        is_over.set()
        thread.join()


def end_what_ray_started() -> None:
    """End every process of this driver's clusters that is still there.

    Without a gcs the raylet's agents, and workers that have just been started, outlive it by a minute.
    """
    folders = tuple(f"{session}/" for session in _sessions(_folder()) if _driver_of(session) == os.getpid())
    for _ in range(LOOKS_FOR_WHAT_IS_LEFT):
        for process_id in _writers(folders) if folders else ():
            _kill(process_id)


def _writers(folders: tuple[str, ...]) -> Iterator[int]:
    """Yield the other processes that hold a file below these folders open for writing.

    All that Ray starts does so from its first moment: it inherits a log. A worker's title names no session, and its
    parent is lost with the raylet. Who only reads a log does not belong to Ray.
    """
    for process in Path("/proc").glob("[0-9]*"):
        if int(process.name) != os.getpid() and any(_written(process, folders)):
            yield int(process.name)


def _written(process: Path, folders: tuple[str, ...]) -> Iterator[Path]:
    with contextlib.suppress(OSError):  # it has ended, or it is another user's
        for descriptor in (process / "fd").iterdir():
            mode = descriptor.lstat().st_mode  # of the link: what the descriptor may do
            if mode & stat.S_IWUSR and os.readlink(descriptor).startswith(folders):
                yield descriptor


def _kill(process_id: int) -> None:
    """Kill the process, and wait until it has let go of its files."""
    pidfd = process_endings.open_process(process_id)
    if pidfd is None:
        return
    with contextlib.suppress(ProcessLookupError):
        signal.pidfd_send_signal(pidfd, signal.SIGKILL)
    process_endings.wait_for_end(pidfd, SECONDS_TO_DIE)
    os.close(pidfd)
