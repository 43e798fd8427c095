"""Where a run directory is: a folder that this machine sees, or a place in an object store (`s3://`, `gs://`).

What a store says in words only (pyarrow has no types for it) is read here and nowhere else, and told with a remedy.
"""

from __future__ import annotations

import atexit
import contextlib
import contextvars
import datetime
import functools
import os
import re
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, wait
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Concatenate, ParamSpec, TypeAlias, TypeVar

from batchscout.orchestrator.signals import interrupt_has_come
from batchscout.trainers.files import PARTIAL, StorageLost, exists, own_file, quoted, written_whole

if TYPE_CHECKING:
    from pyarrow import NativeFile
    from pyarrow.fs import FileSystem

SCHEMES = ("s3", "gs")
BYTES_AT_ONCE = 8 << 20
# Files up to this size may change and keep it, as a log does; larger ones are checkpoints, whose names tell them apart.
SMALL_BYTES = 1 << 20
# How long a store that has answered before is asked again where it does not: networks and stores have such moments.
SECONDS_TO_COME_BACK, SECONDS_BETWEEN_TRIES = 60.0, 1.0
# How long one request may take, and one after Ctrl-C; what moves many bytes has the time for them, too.
SECONDS_TO_ANSWER, SECONDS_TO_ANSWER_AT_THE_END, SECONDS_BETWEEN_LOOKS = 20.0, 5.0, 0.5
SLOWEST_BYTES_PER_SECOND = 1e6

Result = TypeVar("Result")
Asks = ParamSpec("Asks")


class NoAnswer(StorageLost):
    """A store cannot be reached, or is overloaded: that may pass. A refusal does not."""


_answering = set[str]()
"""The stores that have answered, and have not been given up since."""


def _asked_again(
    ask: Callable[Concatenate[ObjectStore, Asks], Result],
) -> Callable[Concatenate[ObjectStore, Asks], Result]:
    """Have a method ask as `_ask_again` does."""

    @functools.wraps(ask)
    def ask_again(store: ObjectStore, *given: Asks.args, **named: Asks.kwargs) -> Result:
        return _ask_again(store, functools.partial(ask, store, *given, **named))

    return ask_again


def _ask_again(store: ObjectStore, ask: Callable[[], Result], num_bytes: int = 0) -> Result:
    """Ask a store that has answered before again until it answers, or has not for too long. Each request can be made twice: what is
    written is whole or absent. num_bytes: what is moved, if that may be much."""
    deadline = time.monotonic() + SECONDS_TO_COME_BACK
    while True:
        try:
            return _answer(store, ask, num_bytes / SLOWEST_BYTES_PER_SECOND)
        except NoAnswer:
            if store.uri not in _answering or interrupt_has_come():
                raise
            if time.monotonic() >= deadline:
                _answering.discard(store.uri)  # whoever asks next is not to wait for as long
                raise
            time.sleep(SECONDS_BETWEEN_TRIES)


def _answer(store: ObjectStore, ask: Callable[[], Result], seconds_to_move: float) -> Result:
    """Return what is asked. Raises NoAnswer where that takes too long: for a store that keeps a connection and says nothing the library
    waits for minutes, in its own code, in which no handler of a signal runs. So another thread asks, and is left if need be."""
    answer, context = Future[Result](), contextvars.copy_context()

    def run() -> None:
        try:
            answer.set_result(context.run(ask))
        except BaseException as error:
            answer.set_exception(error)

    threading.Thread(target=run, name="store", daemon=True).start()
    waited, seconds = 0.0, SECONDS_TO_ANSWER
    try:
        while not wait([answer], SECONDS_BETWEEN_LOOKS).done:
            waited += SECONDS_BETWEEN_LOOKS  # by looks, not by a clock: a process that was suspended has not waited
            if interrupt_has_come() and seconds == SECONDS_TO_ANSWER:
                waited, seconds = 0.0, SECONDS_TO_ANSWER_AT_THE_END
            if waited > seconds + seconds_to_move:
                raise NoAnswer(f"{quoted(store.uri)} has not answered for {seconds:g} s; {_CHECK_THE_NETWORK}")
        return answer.result()
    except (KeyboardInterrupt, NoAnswer):
        if not answer.done():
            _do_not_wait_at_the_end()
        raise


def _do_not_wait_at_the_end() -> None:
    """Take back what pyarrow does when the program ends: it waits for its requests, one of which nobody waits for any more."""
    from pyarrow import fs

    atexit.unregister(fs.ensure_s3_finalized)


@dataclass(frozen=True)
class Stored:
    """An object, as a listing tells of it."""

    num_bytes: int
    time: float
    """When it was written, by the store's clock, in seconds since 1970."""


@dataclass(frozen=True)
class ObjectStore:
    """A run directory in an object store. What is written is whole or absent, and no object is ever appended to."""

    uri: str

    def __str__(self) -> str:
        return self.uri

    def at(self, name: str) -> str:
        """Return what people are told where an object is."""
        address, question, options = self.uri.partition("?")
        return f"{address.rstrip('/')}/{name}{question}{options}"

    def expect_answers(self) -> None:
        """Ask again where it does not answer: it has just answered another process of the study."""
        _answering.add(self.uri)

    def expect_no_answers(self) -> None:
        """Ask once, until it answers: this process is about to end."""
        _answering.discard(self.uri)

    @_asked_again
    def stored(self, below: str = "") -> dict[str, Stored]:
        """Return the objects below a name by their names, which are their paths below the run directory."""
        from pyarrow.fs import FileSelector, FileType

        with self._asked(below, "listed") as (system, root):
            where = f"{root}/{below}".rstrip("/")
            found = system.get_file_info(FileSelector(where, allow_not_found=True, recursive=True))
        files = [info for info in found if info.type is FileType.File]
        return {info.path[len(root) + 1 :]: Stored(info.size, _seconds(info.mtime)) for info in files}

    @_asked_again
    def read(self, name: str) -> bytes | None:
        """Return what an object holds; None where there is none."""
        try:
            with self._reading(name) as stream:
                return stream.read()
        except FileNotFoundError:
            return None

    @_asked_again
    def write(self, name: str, content: bytes) -> None:
        with self._writing(name) as stream:
            stream.write(content)

    @_asked_again
    def remove(self, name: str) -> None:
        with self._asked(name, "removed") as (system, root), contextlib.suppress(FileNotFoundError):
            system.delete_file(f"{root}/{name}")

    def upload(self, path: Path, name: str) -> None:
        """Write a file of this machine. Raises StorageLost where either refuses."""

        def ask() -> None:
            with own_file(path, "read"), path.open("rb") as file, self._writing(name) as stream:
                while piece := file.read(BYTES_AT_ONCE):
                    stream.write(piece)

        _ask_again(self, ask, _size(path))

    def download(self, name: str, path: Path, num_bytes: int) -> None:
        """Write an object of this size to a file of this machine, which is whole or absent. Raises StorageLost where either refuses."""

        def ask() -> None:
            with self._reading(name) as stream, written_whole(path) as file:
                while piece := stream.read(BYTES_AT_ONCE):
                    file.write(piece)

        _ask_again(self, ask, num_bytes)

    def add(self, folder: Path, below: str, wanted: Callable[[str], bool] = lambda _: True) -> set[str]:
        """Write the new and changed files of a folder below a name, as far as they are wanted by their names, and return the names of all
        of these that it holds. Raises StorageLost where there is no such folder."""
        there = self.stored(below)
        here = {name: path for name, path in files_by_object(folder, below).items() if wanted(name)}
        for name, path in here.items():
            if _may_differ(path, there.get(name)):
                self.upload(path, name)
        return set(here)

    def fetch(
        self, folder: Path, below: str, wanted: Callable[[str], bool] = lambda _: True, *, removes: bool = True
    ) -> None:
        """Make a folder what is below a name, as far as its files are wanted by their names. removes: whether files go that are wanted and
        are not there."""
        there = {name: one for name, one in self.stored(below).items() if wanted(name)}
        if not there and not exists(folder):
            return
        with own_file(folder):
            folder.mkdir(parents=True, exist_ok=True)
        here = {name: path for name, path in files_by_object(folder, below).items() if wanted(name)}
        for name, one in there.items():
            path = folder / name.removeprefix(f"{below}/")
            if name not in here or _may_differ(path, one):
                try:
                    self.download(name, path, one.num_bytes)
                except FileNotFoundError:  # ranks of a killed driver replace theirs by newer ones
                    return self.fetch(folder, below, wanted, removes=removes)
        for name in here.keys() - there.keys() if removes else ():
            with own_file(here[name], "removed"):
                here[name].unlink(missing_ok=True)

    def refuse_unusable(self) -> None:
        """Raise ValueError, with the remedy, where nobody can read there: no such bucket, no access, no network."""
        try:
            bucket, is_there = self._bucket()
        except StorageLost as error:
            raise ValueError(str(error)) from error
        if not is_there:
            raise ValueError(
                f"there is no bucket '{bucket}' for {quoted(self.uri)}; make it, or check the name and its region"
            )

    @_asked_again
    def _bucket(self) -> tuple[str, bool]:
        """Return its name, and whether it is there."""
        from pyarrow.fs import FileType

        with self._asked("", "listed") as (system, root):
            bucket = root.split("/")[0]
            return bucket, system.get_file_info(bucket).type is not FileType.NotFound

    @contextlib.contextmanager
    def _writing(self, name: str) -> Iterator[NativeFile]:
        with self._asked(name, "written") as (system, root), system.open_output_stream(f"{root}/{name}") as stream:
            yield stream

    @contextlib.contextmanager
    def _reading(self, name: str) -> Iterator[NativeFile]:
        with self._asked(name, "read") as (system, root), system.open_input_stream(f"{root}/{name}") as stream:
            yield stream

    @contextlib.contextmanager
    def _asked(self, name: str, done: str) -> Iterator[tuple[FileSystem, str]]:
        """Yield the file system and the path of the run directory in it; raise what goes wrong there as a StorageLost."""
        system, root = _opened(self.uri)
        try:
            yield system, root
        except (FileNotFoundError, StorageLost):
            raise
        except OSError as error:
            where = quoted(self.at(name) if name else self.uri)
            said = f"{where} could not be {done}: {_in_plain_words(str(error))}"
            raise (NoAnswer if re.search(_MAY_PASS, str(error)) else StorageLost)(said) from error
        _answering.add(self.uri)


RunPlace: TypeAlias = Path | ObjectStore


def run_place_of(text: str) -> RunPlace:
    """Return the place that was typed. Raises ValueError where it is a URI of no store that is known, or has no bucket."""
    scheme, colon, rest = text.partition("://")
    if not colon:
        return Path(text)
    if scheme not in SCHEMES:
        raise ValueError(
            f"{scheme}:// is no storage that batchscout knows: a run directory is a folder, or begins with s3:// or gs://"
        )
    named = rest.partition("?")[0].rstrip("/")
    bucket, _, path = named.partition("/")
    if "@" in bucket or ":" in bucket:  # nothing of it is repeated: a secret may have a / in it
        raise ValueError(
            f"the name of a run directory appears in messages and reports, so it has no credentials, and no @ or : in its bucket; set "
            f"AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY instead, and write {scheme}://BUCKET/NAME"
        )
    if not bucket or not path:
        raise ValueError(
            f"'{text}' names no run directory; write {scheme}://BUCKET/NAME, such as {scheme}://my-bucket/runs/one"
        )
    return ObjectStore(text)


def beside(place: RunPlace, name: str) -> str:
    """Return where a file of the run directory is, as it can be pasted into a shell."""
    return quoted(place / name) if isinstance(place, Path) else quoted(place.at(name))


def is_there(place: RunPlace, name: str) -> bool:
    """True if the run directory has this file."""
    return exists(place / name) if isinstance(place, Path) else name in place.stored()


def refuse_file(where: Path) -> None:
    """Raise ValueError where a file was named in place of a run directory: it is likely to be the study file."""
    if os.path.isfile(where):  # unlike Path.is_file no error where storage does not tell: what is read next names it
        raise ValueError(
            f"{quoted(where)} is a file, and what a study has come to is in its run directory; name that (runs/<name of the study>, if --dir "
            "named no other)"
        )


def on_this_machine(place: RunPlace, what: str) -> Path:
    """Return a place that is a folder. Raises ValueError where it is in an object store, which `what` cannot use."""
    if isinstance(place, ObjectStore):
        raise ValueError(f"{what} takes a folder, and {place} is in an object store; give it a folder")
    return place


def files_by_object(folder: Path, below: str) -> Mapping[str, Path]:
    """Return the files of a folder, without those that are half written, by the names of their objects below a name."""
    with own_file(folder, "read"):
        folder.stat()  # of a folder that is not there, `rglob` finds nothing
        files = [path for path in sorted(folder.rglob("*")) if path.is_file() and not path.name.endswith(PARTIAL)]
    return {f"{below}/{path.relative_to(folder)}": path for path in files}


def _may_differ(path: Path, stored: Stored | None) -> bool:
    """True unless a file and an object are alike, as far as their sizes tell; those of small files tell nothing."""
    size = _size(path)
    return stored is None or size != stored.num_bytes or size <= SMALL_BYTES


def _size(path: Path) -> int:
    with own_file(path, "read"):
        return path.stat().st_size


def _seconds(time: datetime.datetime | None) -> float:
    return time.timestamp() if time is not None else 0.0


@functools.cache
def _opened(uri: str) -> tuple[FileSystem, str]:
    """Return the file system of a URI, and the path in it. Raises ValueError where it cannot be read."""
    import pyarrow
    from pyarrow.fs import FileSystem

    # One request for a small object, where there would be three; and an end of the tries of a store that does not answer.
    option = {"s3": "allow_delayed_open=true", "gs": "retry_limit_seconds=30"}[uri.partition("://")[0]]
    address, question, options = uri.partition("?")
    try:
        system, path = FileSystem.from_uri(f"{address.rstrip('/')}?{option}{'&' if question else ''}{options}")
    except (pyarrow.ArrowInvalid, pyarrow.ArrowNotImplementedError) as error:
        raise ValueError(f"{quoted(uri)} cannot be read as a place in an object store: {error}") from error
    except OSError as error:
        raise StorageLost(f"{quoted(uri)} could not be opened: {_in_plain_words(str(error))}") from error
    return system, path


_NO_NETWORK = r"NETWORK_CONNECTION|Could not connect|Couldn't resolve|Could not resolve|UNAVAILABLE|timed? ?out"
_OVERLOADED = r"SLOW_DOWN|THROTTLING|INTERNAL_FAILURE|HTTP status 5\d\d"
_MAY_PASS = f"{_NO_NETWORK}|{_OVERLOADED}"

_CHECK_THE_NETWORK = "check the network, and AWS_ENDPOINT_URL or endpoint_override if it is not AWS's own"

# What a store's error says, and what that means and what to do, in the order in which they are looked for.
_SAYINGS = {
    r"NO_SUCH_BUCKET|bucket does not exist": "there is no such bucket; make it, or check the name and its region",
    r"INVALID_ACCESS_KEY_ID|INVALID_CLIENT_TOKEN|SIGNATURE_DOES_NOT_MATCH|EXPIRED_TOKEN|InvalidAccessKeyId|InvalidToken|ExpiredToken": (
        "the store does not know these credentials; set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, log in with `aws sso login`, or "
        "give the machine a role"
    ),
    r"ACCESS_DENIED|HTTP status 40[13]|Permission denied": (
        "the store denies access with these credentials, or there are none; set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY (for gs:// run "
        "`gcloud auth application-default login`), and see that they may read, write, list and delete there"
    ),
    _NO_NETWORK: f"the store does not answer; {_CHECK_THE_NETWORK}",
    _OVERLOADED: "the store is overloaded, or has a fault of its own; wait until it has recovered",
}  # fmt: skip


def _in_plain_words(said: str) -> str:
    return next((told for saying, told in _SAYINGS.items() if re.search(saying, said)), " ".join(said.split())[:300])
