"""A stranger's script leaves everything as it was: its files, its trackers and this process.

Python tells of nearly all that changes files by its audit events, before it happens. Libraries that write files without Python tell of them by
wrappers, for as long as a script is watched. Other programs tell nothing: those that may change something are not started. Loads no torch.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import json
import os
import re
import shlex
import signal
import stat
import sys
import tempfile
import threading
import urllib.parse
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

from batchscout.trainers.files import quoted
from batchscout.trainers.having import having
from batchscout.trainers.sources.watch.on_import import on_import
from batchscout.trainers.sources.watch.programs import (
    COMPILER,
    COMPILES,
    STARTS,
    is_harmless,
    programs_in,
    what_it_starts,
)

_WRITES = os.O_WRONLY | os.O_CREAT | os.O_TRUNC
_CACHES = (
    "XDG_CACHE_HOME", "HF_HOME", "HF_HUB_CACHE", "HF_DATASETS_CACHE", "TORCH_HOME", "TORCH_EXTENSIONS_DIR", "TRITON_CACHE_DIR",
    "TORCHINDUCTOR_CACHE_DIR", "CUDA_CACHE_PATH", "MPLCONFIGDIR", "NUMBA_CACHE_DIR", "BATCHSCOUT_CACHE",
)  # fmt: skip
# Each as its own documentation has it. Neptune's two clients have only `offline` in common. git refreshes its index even for `git status`.
_TRACKERS_OFF = {
    "WANDB_MODE": "disabled", "WANDB_SILENT": "true", "COMET_AUTO_LOG_DISABLE": "1", "CLEARML_OFFLINE_MODE": "1", "NEPTUNE_MODE": "offline",
    "SWANLAB_MODE": "disabled", "MLFLOW_ALLOW_FILE_STORE": "true", "HF_HUB_DISABLE_TELEMETRY": "1", "GIT_OPTIONAL_LOCKS": "0",
}  # fmt: skip
# What writes or reads files without Python, by the module that has it: the first argument that is a path is the file.
_UNHEARD = {
    "torch": (
        "_C.PyTorchFileWriter", "_C.ScriptModule.save", "_C.ScriptModule._save_for_mobile", "_C.ScriptFunction.save",
        "_C._autograd._ProfilerResult.save",
    ),
    "safetensors": ("serialize_file",),
    "safetensors.torch": ("serialize_file",),
    "safetensors.numpy": ("serialize_file",),
    "tokenizers": ("Tokenizer.save",),
    "pyarrow": ("memory_map",),
}  # fmt: skip


class WatchStopped(BaseException):
    """Raised out of the very call that would have changed something. No script catches it by `except Exception`."""


class Change(NamedTuple):
    """What a call is about to do to one path."""

    path: Any
    """As the call was given it: text, bytes, a PathLike or a descriptor."""
    tried: str = ""
    """What it does to something that is already there; empty where it refuses to, or leaves that as it is."""
    makes: bool = False
    """Something is there afterwards if nothing was before."""
    follows: bool = True
    """A link is followed to what it leads to."""
    folder: Any = None
    """The descriptor of the folder that a relative path starts from; None and -1: the current one."""


# What each audit event tells of, with the places of the path and of its folder among the event's arguments.
_CHANGES = {
    "os.remove": [Change(0, "delete", follows=False, folder=1)],
    "os.rmdir": [Change(0, "delete", follows=False, folder=1)],
    "shutil.rmtree": [Change(0, "delete", follows=False, folder=1)],
    "os.rename": [
        Change(0, "move", follows=False, folder=2),
        Change(1, "replace", makes=True, follows=False, folder=3),
    ],
    "os.mkdir": [Change(0, makes=True, follows=False, folder=2)],
    "os.link": [Change(1, makes=True, follows=False, folder=3)],
    "os.symlink": [Change(1, makes=True, follows=False, folder=2)],
    "os.truncate": [Change(0, "cut")],
    "os.chmod": [Change(0, "change the permissions of", folder=2)],
    "os.chown": [Change(0, "change the owner of", folder=3)],
    "os.utime": [Change(0, "change the time of", folder=3)],
    "os.setxattr": [Change(0, "change the attributes of")],
    "os.removexattr": [Change(0, "change the attributes of")],
}
_EVENTS = {"open", "sqlite3.connect", "os.system", *STARTS, *_CHANGES}


def what_it_changes(event: str, args: Sequence[Any]) -> list[Change]:
    """Return what an audit event tells of changes to files; what opens a file for reading changes none."""
    if event == "open":
        return [] if isinstance(args[0], int) else _opened(args[0], args[2])
    if event == "sqlite3.connect":
        return _database(os.fsdecode(args[0]))
    return [
        change._replace(path=args[change.path], folder=None if change.folder is None else args[change.folder])
        for change in _CHANGES.get(event, [])
    ]


def _opened(path: Any, flags: int) -> list[Change]:
    if flags & os.O_EXCL and flags & os.O_CREAT:
        return [Change(path, makes=True, follows=False)]
    if flags & (os.O_WRONLY | os.O_RDWR | os.O_TRUNC):
        tried = "overwrite" if flags & os.O_TRUNC else "append to" if flags & os.O_APPEND else "write into"
        return [Change(path, tried, makes=bool(flags & os.O_CREAT))]
    return [Change(path, makes=True)] if flags & os.O_CREAT else []


def _database(name: str) -> list[Change]:
    """SQLite itself does not tell whether it will write: what is opened for more than reading counts as written."""
    uri = urllib.parse.urlsplit(name) if name.startswith("file:") else None
    path = urllib.parse.unquote(uri.path) if uri else name
    if path in ("", ":memory:") or (uri and re.search(r"mode=(ro|memory)|immutable=1", uri.query)):
        return []
    return [
        Change(path, "write into the database", makes=True),
        *(Change(f"{path}-{of}", makes=True) for of in ("journal", "wal", "shm")),
    ]


def nobodys_places() -> list[Path]:
    """Return the caches and temporary places, in which a script may do what it likes."""
    caches = [os.environ[name] for name in _CACHES if os.environ.get(name)]
    own = [Path.home() / name for name in (".cache", ".triton", ".nv")]
    return [Path(one) for one in (tempfile.gettempdir(), "/tmp", "/var/tmp", "/dev", "/proc", "/sys", *own, *caches)]


class World:
    """Guards the files, the trackers and this process for as long as a script is watched.

    folders: whose files count even inside a temporary place or a cache, beside the current directory. nobodys: places whose files do not;
    None: `nobodys_places`. A script that goes on after it was stopped is stopped again by the next thing that it would write; what it catches
    every time, or raises in a thread or a forked process, is known by `stopped` alone.
    """

    def __init__(self, *folders: Path, nobodys: Sequence[Path] | None = None) -> None:
        self._folders = folders
        self._nobodys = nobodys_places() if nobodys is None else nobodys
        self.removed: tuple[Path, ...] = ()
        """The new files and folders that are gone again; known after the watch."""
        self.kept: tuple[Path, ...] = ()
        """The new files that the next watch needs again, which are still there; known after the watch."""
        self.others = set[int | None]()
        """The threads that were there before: what they write is none of the script's doing."""

    @property
    def stopped(self) -> str | None:
        """Why the script was stopped, in the words of the first attempt of any of its processes; None: it was not."""
        return next(iter(self._ledger.all("stopped")), None)

    def __enter__(self) -> World:
        global _guarded
        assert _guarded is None
        _listen()
        self._pid, self._cwd, self._ledger = os.getpid(), os.getcwd(), _Ledger()
        self.others = {thread.ident for thread in threading.enumerate()} - {threading.get_ident()}
        places = [(one, False) for one in self._nobodys] + [(one, True) for one in (*self._folders, self._cwd)]
        self._counted = {os.path.realpath(place): counts for place, counts in places}
        self._ending = contextlib.ExitStack()
        for part in (_process_as_before(), _trackers_off(), _no_exit_functions(), _heard_libraries()):
            self._ending.enter_context(part)
        _guarded = self
        return self

    def __exit__(self, *_: object) -> None:
        global _guarded
        if os.getpid() != self._pid:
            os._exit(1)  # a process that the script has forked ends here: what comes after a watch is its parent's
        _guarded = None
        self._ending.close()
        self._remove()
        self._ledger.close()

    def heard(self, event: str, args: Sequence[Any]) -> None:
        """Judge what Python tells of. Raises WatchStopped."""
        if event == "open" and (isinstance(args[0], int) or os.path.isdir(args[0])):
            return  # what is open already was judged, and what is written into a folder so is a file without a name
        if command := what_it_starts(event, args):
            self._judge_program(command, os.fsdecode((event == "subprocess.Popen" and args[2]) or ""))
        changes = what_it_changes(event, args)
        paths = [self._judge(change) for change in changes]
        if event == "os.rename":
            self._moved(*paths)
        elif event == "open" and not changes and self._ledger.all("made"):
            self._ledger.add("read", _place(Change(args[0])))

    def _judge_program(self, command: list[str], cwd: str) -> None:
        if _caller().startswith(COMPILES):
            return
        if not is_harmless(command):
            self._stop(
                f"it would start `{shlex.join(command)[:200]}`, and what another program changes cannot be seen; start it by hand before, and "
                "leave that call out"
            )
        for program, *told in programs_in(command):
            if COMPILER.fullmatch(os.path.basename(program)) and "-o" in told[:-1]:
                self._judge(Change(os.path.join(cwd, told[told.index("-o") + 1]), "overwrite", makes=True))

    def _judge(self, change: Change) -> str:
        """Return where the change takes place, if it may. Raises WatchStopped."""
        path = _place(change)
        if not self._counts(path):
            return path
        if reason := self.stopped:
            raise WatchStopped(reason)
        found = _status(path)
        if found is None:
            if change.makes:
                self._ledger.add("made", path)
        elif change.tried and not self._may(change, path, found):
            kind = "folder" if stat.S_ISDIR(found.st_mode) else "file"
            below = os.path.relpath(path, self._cwd) if path.startswith(self._cwd + os.sep) else path
            self._stop(
                f"it would {change.tried} {quoted(below)}, which was there before; name another output folder in its arguments, or move that "
                f"{kind} away"
            )
        return path

    def _may(self, change: Change, path: str, found: os.stat_result) -> bool:
        if not (stat.S_ISREG(found.st_mode) or stat.S_ISDIR(found.st_mode) or stat.S_ISLNK(found.st_mode)):
            return True
        if path.endswith(".lock") and not found.st_size:
            return True  # what locks a cache stays beside it, and is opened again
        # A new name of an old file leads to the old content.
        is_old = change.follows and stat.S_ISREG(found.st_mode) and found.st_nlink > 1
        return path in self._ledger.all("made") and not is_old

    def _stop(self, reason: str) -> None:
        self._ledger.add("stopped", self.stopped or reason)
        raise WatchStopped(self.stopped)

    def _counts(self, path: str) -> bool:
        """Return whether what is at a path is anybody's concern: the nearest place that it lies in tells."""
        if path.endswith(".pyc") or "__pycache__" in path.split(os.sep):
            return False
        near = next((place for place in (path, *map(str, Path(path).parents)) if place in self._counted), None)
        return near is None or self._counted[near]

    def _moved(self, source: str, target: str) -> None:
        """What comes with a folder that the script moves, of what it may change, is new at its new place, too."""
        if not self._counts(target):
            return
        below = [os.path.join(at, name) for at, folders, files in os.walk(source) for name in (*folders, *files)]
        for old in (source, *below):
            new = target + old[len(source) :]
            if old in self._ledger.all("made") or not self._counts(old):
                self._ledger.add("made", new)
            if old in self._ledger.all("read"):
                self._ledger.add("read", new)

    def _remove(self) -> None:
        """Remove what is new, the deepest first, but for inputs of the next watch: what the script has read back, and the files beside one in a
        new folder, since a half-filled folder would be filled again (an archive, what was unpacked from it, its checksums)."""
        made = {path: found for path in self._ledger.all("made") if (found := _status(path))}
        files = {path for path, found in made.items() if not stat.S_ISDIR(found.st_mode)}
        read = files & self._ledger.all("read").keys()
        filled = {os.path.dirname(path) for path in read} & made.keys()
        kept = {path for path in files if path in read or os.path.dirname(path) in filled}
        for path in sorted(made.keys() - kept, key=lambda path: -path.count(os.sep)):
            with contextlib.suppress(OSError):  # a folder with something in it that is kept or of somebody else
                (os.unlink if path in files else os.rmdir)(path)
                self.removed += (Path(path),)
        self.kept = tuple(map(Path, sorted(kept)))


class _Ledger:
    """What this process and those forked from it have done, in memory that they share: lines in the order in which they happened."""

    def __init__(self) -> None:
        self._file, self._read_up_to = os.memfd_create("batchscout"), 0
        self._entries: dict[str, dict[str, None]] = {}
        self._is_open = True

    def add(self, kind: str, entry: str) -> None:
        if entry not in self.all(kind):
            os.write(self._file, json.dumps([kind, entry]).encode() + b"\n")

    def all(self, kind: str) -> dict[str, None]:
        """Return the entries of a kind, the first one first."""
        if self._is_open and (size := os.fstat(self._file).st_size) > self._read_up_to:
            for line in os.pread(self._file, size - self._read_up_to, self._read_up_to).splitlines():
                of, entry = json.loads(line)
                self._entries.setdefault(of, {})[entry] = None
            self._read_up_to = size
        return self._entries.get(kind, {})

    def close(self) -> None:
        self.all("stopped")
        self._is_open = False
        os.close(self._file)


def _place(change: Change) -> str:
    """Return where a change takes place, without links."""
    if isinstance(change.path, int):
        return os.path.realpath(f"/proc/self/fd/{change.path}")
    path = os.fsdecode(change.path)
    if isinstance(change.folder, int) and change.folder >= 0:
        path = os.path.join(f"/proc/self/fd/{change.folder}", path)
    above, name = os.path.split(path.rstrip(os.sep))
    if change.follows or name in ("", os.curdir, os.pardir):
        return os.path.realpath(path)
    return os.path.join(os.path.realpath(above), name)


def _status(path: str) -> os.stat_result | None:
    try:
        return os.lstat(path)
    except OSError:
        return None


def _caller() -> str:
    """Return the module that calls what Python's own library is asked for."""
    frame = sys._getframe(1)
    while frame.f_back and (_module(frame) == __name__ or _is_pythons(_module(frame))):
        frame = frame.f_back
    return _module(frame)


def _module(frame: Any) -> str:
    return frame.f_globals.get("__name__") or ""


def _is_pythons(module: str) -> bool:
    return module.partition(".")[0] in sys.stdlib_module_names


_guarded: World | None = None


@functools.cache
def _listen() -> None:
    """Have Python call `_hear` from now on, once in a process: no audit hook can be taken out again."""
    sys.addaudithook(_hear)


def _hear(event: str, args: tuple[Any, ...]) -> None:
    if _guarded is not None and event in _EVENTS and threading.get_ident() not in _guarded.others:
        _guarded.heard(event, args)


@contextlib.contextmanager
def _process_as_before() -> Iterator[None]:
    """Put back the environment, the current directory, sys.argv, sys.path and what signals and an alarm do."""
    environment, cwd = dict(os.environ), os.getcwd()
    argv, path, contents = sys.argv, sys.path, (sys.argv[:], sys.path[:])
    in_main = threading.current_thread() is threading.main_thread()  # no other thread may set a handler
    handlers = {number: signal.getsignal(number) for number in signal.valid_signals()} if in_main else {}
    alarm = signal.getitimer(signal.ITIMER_REAL)
    try:
        yield
    finally:
        for name in os.environ.keys() - environment.keys():
            del os.environ[name]
        os.environ.update(environment)
        os.chdir(cwd)
        sys.argv, sys.path = argv, path
        argv[:], path[:] = contents
        if not any(alarm):
            signal.setitimer(signal.ITIMER_REAL, 0)
        for number, handler in handlers.items():
            if handler is not None and signal.getsignal(number) != handler:  # None: it is none of Python's
                signal.signal(number, handler)


@contextlib.contextmanager
def _trackers_off() -> Iterator[None]:
    """Have trackers send nothing, and those that cannot be turned off write where nobody looks; the environment is put back by others."""
    with tempfile.TemporaryDirectory(prefix="batchscout-", ignore_cleanup_errors=True) as unseen:
        store = Path(unseen, "mlruns").as_uri()
        os.environ.update(_TRACKERS_OFF, MLFLOW_TRACKING_URI=store, MLFLOW_REGISTRY_URI=store, TRACKIO_DIR=unseen)
        yield


def _no_exit_functions() -> contextlib.AbstractContextManager[None]:
    """Have `atexit.register` forget what it is given, but for what Python's own library registers once for the whole process."""
    register = atexit.register

    def forget(function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Callable[..., Any]:
        return register(function, *args, **kwargs) if _is_pythons(_module(sys._getframe(1))) else function

    return having(atexit, "register", forget)


@contextlib.contextmanager
def _heard_libraries() -> Iterator[None]:
    """Have Python tell of files that libraries write or read without it, of those that are loaded and of those that a script loads."""
    with contextlib.ExitStack() as replaced:

        def hear(module: ModuleType) -> None:
            for name in _UNHEARD[module.__name__]:
                *outer, last = name.split(".")
                replaced.enter_context(_told_of(functools.reduce(getattr, outer, module), last))

        with on_import(_UNHEARD, hear):
            yield


@contextlib.contextmanager
def _told_of(owner: Any, name: str) -> Iterator[None]:
    """Have Python tell of the file before a function of a library opens it, until the block ends."""
    original, flags = vars(owner)[name], os.O_RDONLY if name == "memory_map" else _WRITES

    def told(*args: Any, **kwargs: Any) -> Any:
        for path in [one for one in (*args, *kwargs.values()) if isinstance(one, str | bytes | os.PathLike)][:1]:
            sys.audit("open", path, None, flags)
        return function(*args, **kwargs)

    function = getattr(owner, name)
    setattr(owner, name, told)
    try:
        yield
    finally:
        setattr(owner, name, original)
