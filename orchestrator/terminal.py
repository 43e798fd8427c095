"""What a terminal is shown: text of users, whose control characters could clear the screen or set the title."""

from __future__ import annotations

import atexit
import contextlib
import io
import os
import shutil
import sys
import tempfile
import textwrap
import traceback
import unicodedata
from collections.abc import Iterable, Iterator
from pathlib import Path
from types import TracebackType
from typing import TextIO

from batchscout.orchestrator.units import counted

# Characters that turn the direction of the text around them: what follows would read backwards.
_TURNING = {*map(chr, range(0x202A, 0x202F)), *map(chr, range(0x2066, 0x206A))}


def printable(text: str) -> str:
    """Return the text with its control characters spelled out; lines and tabs stay."""
    if text.isprintable():
        return text
    return "".join(map(_spelled_out, text))


def _spelled_out(character: str) -> str:
    harmless = character in "\n\t" or (unicodedata.category(character) != "Cc" and character not in _TURNING)
    return character if harmless else ascii(character)[1:-1]


def open_closed_streams() -> None:
    """Open /dev/null in place of each standard stream that a shell has closed (`>&-`). The next file that is opened would get its number, and what
    a library prints to that number would be written into the journal."""
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        try:
            os.fstat(number)
        except OSError:
            nowhere = os.open(os.devnull, os.O_RDWR)  # the lowest number that is free
            assert nowhere == number
            os.set_inheritable(number, True)
            setattr(sys, name, open(number, "r" if name == "stdin" else "w", closefd=False))  # noqa: SIM115 - until the end


def leave_full_stdout() -> str:
    """Send stdout to /dev/null where it cannot be written to, as a log on a full disk; return the reason, empty where it can be."""
    try:
        os.write(1, b"\n")
    except OSError as error:
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, 1)
        os.close(nowhere)
        return str(error.strerror)
    return ""


def spell_out_what_cannot_be_printed() -> None:
    """Print characters that a stream's encoding lacks as escapes: an encoding error would hide how a study ended."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")


def draw_no_bars_in_a_log() -> None:
    """Turn off tqdm's progress bars, which libraries draw while they load, where stderr is not a terminal: a log would hold each update."""
    if not sys.stderr.isatty():
        os.environ.setdefault("TQDM_DISABLE", "1")


def show_exception(kind: type[BaseException], error: BaseException, where: TracebackType | None) -> None:
    """Print a traceback to stderr as Python does, with the control characters of its messages spelled out."""
    print(printable("".join(traceback.format_exception(kind, error, where))), end="", file=sys.stderr)


@contextlib.contextmanager
def printed_to_a_file(name: str) -> Iterator[None]:
    """Redirect what users' Python code prints inside this block to a temporary file; say on stderr which one, if anything was printed."""
    stderr = sys.stderr
    file = tempfile.NamedTemporaryFile(  # noqa: SIM115 - a handler of `logging` may write to it as long as the program runs
        "w", prefix=f"batchscout-{name}-", suffix=".txt", delete=False, buffering=1, errors="backslashreplace"
    )
    atexit.register(file.close)
    try:
        with contextlib.redirect_stdout(file), contextlib.redirect_stderr(file):
            yield
    finally:
        path = Path(file.name)
        if lines := path.read_bytes().count(b"\n"):
            print(f"what your code and its libraries printed ({counted(lines, 'line')}) is in {path}", file=stderr)
        else:
            path.unlink()


def wrapped(text: str, stream: TextIO) -> str:
    """Return the text broken between words for a terminal, and as it is for a log."""
    if not stream.isatty():
        return text
    width = shutil.get_terminal_size().columns
    return "\n".join(textwrap.fill(line, width, break_long_words=False) for line in text.splitlines())


def print_lines(lines: Iterable[str]) -> None:
    """Print users' lines, broken between words for a terminal."""
    for line in lines:
        print(wrapped(printable(line), sys.stdout))
