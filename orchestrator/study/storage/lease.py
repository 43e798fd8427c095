"""A lease on a study: for a while at a time its driver is the only one, on whatever machine, and says again and again that it lives.

Locks tell what happens on one machine. On storage that several share, many tell nothing of the others, and a process that was
suspended or cut off does not know that another has followed it. So a driver takes the next *generation*, which only one can
have, and asks before each line that it writes whether that is still the last one.

A generation is a file in the folder `.lease`, named by its number, in which its holder stands; the time of its last change, by the
storage's own clock, says when that holder was last seen. Whoever takes the next one removes those before it.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import json
import os
import socket
import threading
import time
import uuid
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from batchscout.trainers.files import PARTIAL, exists, own_file, quoted

LEASE_SECONDS = 60.0
"""How long a driver may be silent before another may follow it."""
# So often a holder says that it lives, in the time of its lease; and who has been silent for such a share of it may be gone.
TIMES_IN_A_LEASE, SILENT_SHARE = 6, 1 / 3
NUM_DIGITS = 6


@functools.cache
def boot() -> str:
    """Return a name for this machine since it was started; empty where the kernel has none."""
    with contextlib.suppress(OSError):
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return ""


@functools.cache
def numbered_in() -> str:
    """Return a name for the namespace of this process's number; empty where the kernel has none."""
    with contextlib.suppress(OSError):
        return os.readlink("/proc/self/ns/pid")
    return ""


@dataclass(frozen=True)
class Holder:
    """The process that holds a study."""

    host: str
    pid: int
    since: float
    """In seconds since 1970."""
    boot: str = ""
    """Names the kernel that it runs on, since that was started; empty where nobody knows."""
    numbered_in: str = ""
    """Names the processes among which its number is its own, those of its container; empty where nobody knows."""

    def __str__(self) -> str:
        since = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(self.since))
        return f"process {self.pid} on {self.host}, since {since}"

    @classmethod
    def here(cls) -> Holder:
        return cls(socket.gethostname(), os.getpid(), time.time(), boot(), numbered_in())

    @classmethod
    def told(cls, fields: Mapping[str, Any]) -> Holder:
        """Return the holder that a lease tells of. Raises KeyError."""
        numbered_in = fields.get("numbered_in", "")
        return cls(fields["host"], fields["pid"], fields["since"], fields["boot"], numbered_in)

    def is_gone(self) -> bool:
        """True if it ran on this host and has ended. Of another host nobody can say, nor of another container of this one, which may have
        the same name."""
        is_here = self.host == socket.gethostname() and self.boot in ("", boot())
        return is_here and self.numbered_in in ("", numbered_in()) and not _is_alive(self.pid)


def _is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


class RunsOut(ValueError):
    """Another driver holds the study, and has been silent for so long that it may be gone: then its lease runs out by itself."""

    def __init__(self, message: str, seconds_left: float) -> None:
        super().__init__(message)
        self.seconds_left = seconds_left


@dataclass(frozen=True)
class Term:
    """A generation as it was found, and by whom it is held."""

    number: int
    holder: Holder | None = None
    """None: it is being written, or cannot be read."""
    seconds: float = LEASE_SECONDS
    """How long its holder may be silent."""
    silent_seconds: float = 0.0
    """For how long its holder has not been heard of."""
    is_released: bool = False
    silent_number: int = 0
    """The last generation, up to this one, that was taken though the holder before it may have lived."""

    @property
    def has_run_out(self) -> bool:
        return self.silent_seconds > self.seconds

    @property
    def who(self) -> str | None:
        """Its holder for people; None where nobody knows."""
        return self.holder and f"another process ({self.holder}, last seen {max(0.0, self.silent_seconds):.0f} s ago)"


def refused(term: Term, where: Path | str) -> ValueError:
    """Return that a study is held, by whom, and what to do."""
    left = max(0.0, term.seconds - term.silent_seconds)
    said = f"{refusal(term.who, where)}; if it is no more, its lease runs out in {left:.0f} s by itself"
    return RunsOut(said, left) if term.silent_seconds > SILENT_SHARE * term.seconds else ValueError(said)


def refusal(who: str | None, where: Path | str) -> str:
    return (
        f"{who or 'another process'} is running the study in {quoted(where)}; wait for it, end it, or choose another "
        "--dir"
    )


def taken_over(holder: Holder | None, where: Path | str, seconds: float) -> str:
    """Return for the user of a driver that was silent for longer than its lease that another has followed it."""
    who = f"another process ({holder})" if holder else "another process"
    return (
        f"{who} has taken over the study in {quoted(where)}, since this one was not heard from for longer than its lease of "
        f"{seconds:g} s, as if it had been suspended or cut off from its storage. Nothing is lost: the other one goes on "
        "from what this one wrote. Leave it to that, or end it and run the same command again"
    )


class Lease:
    """The last generation of a study, which this process holds until `release`, or until another has followed it."""

    def __init__(self, run_dir: Path, me: Holder, seconds: float, *, others_here_are_gone: bool) -> None:
        """Take the next generation. Raises ValueError, naming the holder, where another process has the last one.

        others_here_are_gone: true if no other process of this kernel can hold the study, as locks tell.
        """
        self._run_dir, self._seconds = run_dir, seconds
        self._folder = run_dir / ".lease"
        with own_file(self._folder):
            self._folder.mkdir(exist_ok=True)  # as open as the run directory: whoever may read a study asks who runs it
            self.number, self.has_followed_a_silent_one = self._take(me, others_here_are_gone)
        self._stopped = threading.Event()
        threading.Thread(target=self._keep, name="lease", daemon=True).start()

    def _take(self, me: Holder, others_here_are_gone: bool) -> tuple[int, bool]:
        """Return the generation, and whether the one before ran out while its holder may live."""
        while True:
            before = last_term(self._folder, now_there(self._folder))
            is_free = before.is_released or is_gone(before.holder, me, others_here_are_gone=others_here_are_gone)
            if not is_free and not before.has_run_out:
                raise refused(before, self._run_dir)
            number = before.number + 1
            told = asdict(me) | {"seconds": self._seconds, "silent": before.silent_number if is_free else number}
            self._told = told | {"word": uuid.uuid4().hex, "released": False}
            self._text = text_of(self._told)
            with contextlib.suppress(FileExistsError):  # then another was first, and is looked at
                self._create(number)
                return number, not is_free

    def _create(self, number: int) -> None:
        path = self._path(number)
        with path.open("xb", buffering=0) as file:
            try:
                if file.write(self._text) != len(self._text):
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))
            except OSError:
                path.unlink()
                raise
        for earlier in _numbers(self._folder):
            if earlier < number:
                self._path(earlier).unlink(missing_ok=True)

    def _path(self, number: int) -> Path:
        return self._folder / generation_name(number)

    def is_held(self) -> bool:
        """True if this process still has it. Asks the storage. Raises OSError where it does not answer."""
        return self.is_at(self._run_dir) and not exists(self._path(self.number + 1))

    def is_followed(self) -> bool:
        """True if this process was silent and another has followed it. Asks the storage. Raises OSError where it does not answer."""
        return not self.is_held() and last_term(self._folder, time.time()).silent_number > self.number

    def is_at(self, run_dir: Path) -> bool:
        """True if it is the lease that other processes find in this directory."""
        try:  # opened anew: storage in a network then tells what it has, and not what it had
            return (run_dir / ".lease" / self._path(self.number).name).read_bytes() == self._text
        except (FileNotFoundError, NotADirectoryError):
            return False

    def loss(self) -> str:
        """Return in words that another process has followed."""
        return taken_over(last_term(self._folder, time.time()).holder, self._run_dir, self._seconds)

    def _keep(self) -> None:
        """Say again and again that this process lives, until another has followed it."""
        while not self._stopped.wait(self._seconds / TIMES_IN_A_LEASE):
            with contextlib.suppress(OSError):  # storage that is away comes back, or another driver follows
                if not self.is_held():
                    return
                self._write(self._text)

    def _write(self, text: bytes) -> None:
        """Write over what stands there: the file's time is then that of the storage."""
        file = os.open(self._path(self.number), os.O_WRONLY)
        try:
            os.pwrite(file, text, 0)
            os.ftruncate(file, len(text))
        finally:
            os.close(file)

    def release(self) -> None:
        """Let another process have the study at once. Its number stays, so that the next one is higher."""
        self._stopped.set()
        with contextlib.suppress(OSError):  # a lease that stays runs out
            if self.is_held():
                self._write(text_of(self._told | {"released": True}))


def is_gone(holder: Holder | None, me: Holder, *, others_here_are_gone: bool) -> bool:
    """True if it is known that a holder has ended, and is not only silent."""
    if holder is None:
        return False
    is_numbered_as_we_are = holder.boot in ("", me.boot) and holder.numbered_in in ("", me.numbered_in)
    had_our_number = is_numbered_as_we_are and (holder.host, holder.pid) == (me.host, me.pid)
    is_on_this_kernel = holder.boot != "" and holder.boot == boot()
    return had_our_number or holder.is_gone() or (others_here_are_gone and is_on_this_kernel)


def last_term(folder: Path, now: float) -> Term:
    """Return the last generation; one of number 0, which nobody holds, where there was none yet."""
    number = max(_numbers(folder), default=0)
    if number == 0:
        return Term(0, is_released=True)
    path = folder / generation_name(number)
    try:
        text, silent = path.read_bytes(), now - path.stat().st_mtime
    except FileNotFoundError:  # whoever has followed has just removed it
        return last_term(folder, now)
    try:
        told = json.loads(text)
        return Term(number, Holder.told(told), told["seconds"], silent, told["released"], told["silent"])
    except (ValueError, TypeError, KeyError):
        return Term(number, silent_seconds=silent)


def generation_name(number: int) -> str:
    return f"{number:0{NUM_DIGITS}d}"


def text_of(told: Mapping[str, object]) -> bytes:
    return json.dumps(told).encode() + b"\n"


def _numbers(folder: Path) -> list[int]:
    try:
        return [int(name) for name in os.listdir(folder) if name.isdecimal()]
    except FileNotFoundError:
        return []


def now_there(folder: Path) -> float:
    """Return the time by the clock that gives files of this folder their times."""
    probe = folder / f".now.{uuid.uuid4().hex[:8]}{PARTIAL}"
    try:
        probe.write_bytes(b"now")
        return probe.stat().st_mtime
    finally:
        probe.unlink(missing_ok=True)
