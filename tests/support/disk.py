"""A file system of its own, whose power can be cut. Takes root, and a kernel that lets it."""

from __future__ import annotations

import fcntl
import os
import struct
import subprocess
import time
from pathlib import Path

# linux/ext4.h: EXT4_IOC_SHUTDOWN, and its flag that nothing is written any more.
SHUT_DOWN, WITHOUT_A_FLUSH = 0x8004587D, 2
NUM_BYTES = 128 << 20
SECONDS_TO_LET_GO = 60.0


class NotHere(Exception):
    """This machine does not let a test do that; the message says why."""


class Disk:
    """An ext4 in a file, mounted below the folder."""

    def __init__(self, folder: Path) -> None:
        """Raises NotHere where none can be made."""
        if os.geteuid() != 0:
            raise NotHere("only root can make a file system")
        self.image, self.root = folder / "image", folder / "disk"
        self.root.mkdir()
        with self.image.open("wb") as file:
            file.truncate(NUM_BYTES)
        _call("mkfs.ext4", "-q", self.image)
        self.mount()

    def mount(self) -> None:
        _call("mount", "-o", "loop", self.image, self.root)

    def lose_power(self) -> None:
        """Cut it, and switch it on again, as if nobody had a file open there."""
        self.cut_power()
        self.unmount()
        self.mount()

    def cut_power(self) -> None:
        """Lose what no fsync has asked for; the names, which another file's fsync writes with its own, are there."""
        with (self.root / "another").open("w") as another:
            os.fsync(another.fileno())
            fcntl.ioctl(another.fileno(), SHUT_DOWN, struct.pack("I", WITHOUT_A_FLUSH))

    def unmount(self) -> None:
        """Wait until nobody has a file open there: whoever mounts it before that gets it as it was, without power."""
        subprocess.run(["umount", "--lazy", self.root], check=True)
        deadline = time.monotonic() + SECONDS_TO_LET_GO
        while _said("losetup", "--associated", self.image):
            assert time.monotonic() < deadline, f"a process still has a file open on {self.root}"
            time.sleep(0.05)


def _call(*command: str | Path) -> None:
    try:
        done = subprocess.run(command, capture_output=True, text=True)
    except FileNotFoundError as error:
        raise NotHere(f"this machine has no {command[0]}") from error
    if done.returncode:
        raise NotHere(f"this machine lets nobody do {command[0]}: {done.stderr.strip()}")


def _said(*command: str | Path) -> str:
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
