"""Files of tensors that tell whether they are as they were written.

`torch.load` checks no checksum: of 300 files with one bit flipped 297 load, with other contents. So the CRC-32 of all
that was written stands in the last bytes of the file, where torch does not look.
"""

from __future__ import annotations

import errno
import os
import re
import struct
import zipfile
import zlib
from pathlib import Path
from typing import IO, Any

import torch

from batchscout.trainers.files import naming_the_disk, written_whole

_LAST_BYTES = b"\ncrc32 %08x\n"
_NUM_LAST_BYTES = len(_LAST_BYTES % 0)
_BYTES_AT_ONCE = 1 << 20
# Reading raises one of these where a file is no archive of torch's, or a damaged one.
_NO_ARCHIVE = (zipfile.BadZipFile, RuntimeError, EOFError, ValueError, struct.error)


class Damaged(Exception):
    """A file's contents are not those that were written; the message says how that shows."""


def save_tensors(path: Path, tensors: dict[str, Any]) -> None:
    """Write the file with its checksum, whole or not at all."""
    with written_whole(path) as file:
        counted = _Counted(file)
        torch.save(tensors, counted)  # pyright: ignore[reportArgumentType]  (it calls write and nothing else)
        file.write(_LAST_BYTES % counted.crc32)


class _Counted:
    """A file that is written front to back, with the checksum of what was written."""

    def __init__(self, file: IO[bytes]) -> None:
        self._file, self.crc32 = file, 0

    def write(self, data: bytes) -> int:
        self.crc32 = zlib.crc32(data, self.crc32)
        return self._file.write(data)

    def flush(self) -> None:
        self._file.flush()


def load_tensors(path: Path, *, mmap: bool = False) -> dict[str, Any]:
    """Return what the file holds, on the host. Raises Damaged, and StorageLost where it cannot be read, which is no
    damage; neither is running out of memory, which is raised as it is."""
    with naming_the_disk(path, "read"):
        check_tensors(path)
        return torch.load(path, weights_only=True, map_location="cpu", mmap=mmap)


def check_tensors(path: Path) -> None:
    """Raise Damaged where the file is not as it was written. It is read once for that."""
    with path.open("rb") as file:
        num_bytes = max(0, os.fstat(file.fileno()).st_size - _NUM_LAST_BYTES)
        crc32 = _crc32(file, num_bytes)
        last = re.fullmatch(rb"\ncrc32 ([0-9a-f]{8})\n", file.read())
    if last is None:
        _check_archive(path)
    elif int(last[1], 16) != crc32:
        raise Damaged(f"its checksum is {crc32:08x}, and it was written with {last[1].decode()}")


def _crc32(file: IO[bytes], num_bytes: int) -> int:
    crc32 = 0
    while num_bytes and (data := file.read(min(num_bytes, _BYTES_AT_ONCE))):
        crc32 = zlib.crc32(data, crc32)
        num_bytes -= len(data)
    return crc32


def _check_archive(path: Path) -> None:
    """Check the checksums of the archive's records. A file that was cut short has no others."""
    try:
        with zipfile.ZipFile(path) as archive:
            record = archive.testzip()
    except _NO_ARCHIVE as error:
        raise Damaged(str(error) or "it ends too early") from error
    except OSError as error:
        if error.errno != errno.EINVAL:  # an archive that points in front of its beginning
            raise
        raise Damaged("it is no archive") from error
    if record is not None:
        raise Damaged(f"the checksum of its record {record} is wrong")
