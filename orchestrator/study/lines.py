"""The lines of a journal: events read back from them, whatever version wrote them."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from pydantic import JsonValue, ValidationError

from batchscout.orchestrator.study.events import FORMAT_VERSION, Event, parser
from batchscout.orchestrator.study.upgrade import upgraded_line
from batchscout.orchestrator.terminal import printable
from batchscout.trainers.files import exists, own_file, quoted
from batchscout.trainers.lines import body_of
from batchscout.trainers.notices import NoticeKind, give_notice

# A notice quotes so much of a damaged line: enough for its kind and the trial that it tells of.
NUM_QUOTED_BYTES = 100


@dataclass(frozen=True)
class Line:
    """A whole line of a journal."""

    number: int
    """From 1."""
    event: Event
    end: int
    """The bytes of the file up to its end."""


def read_lines(path: Path) -> Iterator[Line]:
    """Yield every whole line; none where there is no file.

    A crash may tear the last line, which is left out. So is a last line that is whole and damaged, and a notice is given
    of that: no crash of a process leaves one. A line of an earlier format is read as `upgrade` has it. Raises ValueError, with the line's number, for a torn or damaged line
    elsewhere, and for a line that a later version of this program wrote.
    """
    if not exists(path):
        return
    end = 0
    with own_file(path, "read"), path.open("rb") as file:
        for number, text in enumerate(file, start=1):
            if not text.endswith(b"\n"):  # it was torn, or is being written now
                return
            body = body_of(text)
            if body is None:
                _refuse_lines_after(number, file, path)
                give_notice(NoticeKind.DAMAGED_JOURNAL, _left_out(number, text, path))
                return
            end += len(text)
            event = _event_of(body, _where(number, path))
            if event is not None:
                yield Line(number, event, end)


def format_of(path: Path) -> int:
    """Return the format of a journal; this version's where there is none, or no whole line in it."""
    if not exists(path):
        return FORMAT_VERSION
    with own_file(path, "read"), path.open("rb") as file:
        body = body_of(file.readline())
    return _version_of(json.loads(body)) if body else FORMAT_VERSION


def refuse_earlier_format(path: Path) -> None:
    """Raise ValueError if an earlier version of this program wrote the file, which may be read but not gone on with."""
    version = format_of(path)
    if version < FORMAT_VERSION:
        raise ValueError(
            f"{quoted(path)} has journal format {version}, and this batchscout goes on with format {FORMAT_VERSION} alone; its "
            "report, exports and comparison still work; to run the study, choose another --dir"
        )


def _refuse_lines_after(number: int, file: Iterable[bytes], path: Path) -> None:
    """Raise ValueError if more lines follow the one that holds no event: a crash tears the last line alone."""
    num_more = sum(1 for _ in file)
    if num_more:
        raise ValueError(
            f"{_where(number, path)} is damaged, and {num_more} more follow it; "
            "restore the file from a copy, or remove that line if you know what it said"
        )


def _left_out(number: int, text: bytes, path: Path) -> str:
    said = printable(text.strip()[:NUM_QUOTED_BYTES].decode(errors="replace"))
    return (
        f"{_where(number, path)}, its last one, is not what was written, and is left out: the study goes on as if "
        f"that had not happened yet, and does it again. The line began: {said}"
    )


def _event_of(body: bytes, where: str) -> Event | None:
    """Return the event of a line that is as it was written; None if it tells of what this version has no more. Raises ValueError for
    what a later version wrote."""
    try:
        return parser.validate_json(body)
    except ValidationError as error:
        record, fault = json.loads(body), error
    if _version_of(record) < FORMAT_VERSION:
        record = upgraded_line(record, FORMAT_VERSION)
        if record is None:
            return None
        try:
            return parser.validate_python(record)
        except ValidationError as error:
            fault = error
    raise ValueError(_not_readable(record, fault, where)) from fault


def _where(number: int, path: Path) -> str:
    return f"line {number} of {quoted(path)}"


def _version_of(record: dict[str, JsonValue]) -> int:
    """Return the format of a line; today's where it names none, so that what is amiss with it is said as of any other line."""
    version = record.get("version")
    return version if isinstance(version, int) else FORMAT_VERSION


def _not_readable(record: dict[str, JsonValue], error: ValidationError, where: str) -> str:
    """Return why a line cannot be read that is just as it was written."""
    version = _version_of(record)
    if version > FORMAT_VERSION:
        return (
            f"{where} has journal format {version}, and this batchscout reads up to {FORMAT_VERSION}; go on with the version that "
            "wrote it, or a later one"
        )
    fault = error.errors()[0]
    if fault["type"] == "union_tag_invalid":
        return (
            f"{where} is of the kind '{record.get('kind')}', which this batchscout does not know; go on with the "
            "version that wrote it, or a later one"
        )
    place = ".".join(map(str, fault["loc"][1:]))  # after the kind
    return (
        f"{where} is no event that this batchscout can read ({place}: {fault['msg']}, and it is {fault['input']!r:.100}); "
        "go on with the version that wrote it, or restore the file from a copy"
    )
