"""Lines of JSON that tell whether they are as they were written: a journal's, and those of a run's own files. Loads no
torch."""

from __future__ import annotations

import contextlib
import zlib
from collections.abc import Sequence
from pathlib import Path

from batchscout.trainers.errors import first_of
from batchscout.trainers.files import own_file, quoted
from batchscout.trainers.notices import NoticeKind, give_notice

CHECKSUM_KEY = b',"crc32":"'
MOST_NUMBERS = 5
"""So many damaged lines are named by their numbers, and the rest by how many they are."""


def line_of(body: bytes) -> bytes:
    """Return a JSON object as a line of a file, whose last key is the checksum of all before it."""
    return body[:-1] + CHECKSUM_KEY + b'%08x"}\n' % zlib.crc32(body)


def body_of(line: bytes) -> bytes | None:
    """Return a line's own JSON; None if the line has no checksum, or one that is not that of its contents."""
    body, _, checksum = line.rpartition(CHECKSUM_KEY)
    body += b"}"
    return body if checksum == b'%08x"}\n' % zlib.crc32(body) else None


def body_of_last(line: bytes) -> bytes | None:
    """The same of a line that may lack its end, as the last one of a file may."""
    return body_of(line.removesuffix(b"\n") + b"\n")


def lines_in(path: Path) -> list[bytes]:
    """Return the lines of a file of ours, each with its end; none where it does not exist. Raises StorageLost where it
    cannot be read."""
    with own_file(path, "read"), contextlib.suppress(FileNotFoundError), path.open("rb") as file:
        return list(file)
    return []


def tell_left_out(path: Path, numbers: Sequence[int], what: str) -> None:
    """Give a notice of the lines that a reader has left out, if there are any. what: what they told."""
    if numbers:
        some = f"line{'s' * (len(numbers) > 1)} {first_of(numbers, MOST_NUMBERS)}"
        text = (
            f"{some} of {quoted(path)} cannot be read as written, so that the report lacks {what}. "
            "Every result stands; restore the file from a copy if you need the figure"
        )
        give_notice(NoticeKind.DAMAGED_CURVE, text)
