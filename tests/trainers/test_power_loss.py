"""What was written is there after the power went: the file system is shut down without a flush, as by a cut cable."""

from __future__ import annotations

import fcntl
import os
import struct
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from tests.support.tiny import newest_state
from trainers.checkpoint import save_checkpoint
from trainers.config import DataConfig
from trainers.data.samples import load_data

# linux/ext4.h: EXT4_IOC_SHUTDOWN, and its flag that nothing is written any more.
SHUT_DOWN, WITHOUT_A_FLUSH = 0x8004587D, 2


class Disk:
    """A file system of its own, whose power can be cut."""

    def __init__(self, folder: Path) -> None:
        self.image, self.root = folder / "image", folder / "disk"
        self.root.mkdir()
        with self.image.open("wb") as file:
            file.truncate(32 << 20)
        self._call("mkfs.ext4", "-q", self.image)
        self._mount()

    def _call(self, *command: str | Path) -> None:
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode:
            pytest.skip(f"this machine lets nobody do {command[0]}: {done.stderr.strip()}")

    def _mount(self) -> None:
        self._call("mount", "-o", "loop", self.image, self.root)

    def lose_power(self) -> None:
        """Lose what no fsync has asked for; the names, which another file's fsync writes with its own, are there."""
        with (self.root / "another").open("w") as another:
            os.fsync(another.fileno())
            fcntl.ioctl(another.fileno(), SHUT_DOWN, struct.pack("I", WITHOUT_A_FLUSH))
        self.unmount()
        self._mount()

    def unmount(self) -> None:
        subprocess.run(["umount", "--lazy", self.root], check=True)


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Disk]:
    if os.geteuid() != 0:
        pytest.skip("only root can make a file system")
    disk = Disk(tmp_path)
    yield disk
    disk.unmount()


def test_the_disk_loses_what_was_not_synced(disk: Disk) -> None:
    (disk.root / "file").write_text("not synced")
    disk.lose_power()
    assert (disk.root / "file").read_text() == ""


def test_a_checkpoint_is_there(disk: Disk) -> None:
    save_checkpoint(disk.root, "a", 8, {"weights": torch.arange(10_000)}, keep=1)
    disk.lose_power()
    assert torch.equal(newest_state(disk.root)["weights"], torch.arange(10_000))


def test_tokenized_text_is_there_and_is_not_made_again(
    disk: Disk, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("BATCHSCOUT_CACHE", str(disk.root / "cache"))
    text = tmp_path / "train.txt"
    text.write_text("".join(f"line {i}\n" for i in range(1000)))
    kwargs = {"train": str(text), "seq_len": 16, "tokenizer": {"train_bpe": 300}}
    config = DataConfig(target="text", kwargs=kwargs)
    before = load_data(config)[0][3]["targets"]
    files = {path: path.stat().st_mtime_ns for path in (disk.root / "cache").rglob("*")}
    assert len(files) == 7, "the folders data and its entry, and the entry's five files"
    disk.lose_power()
    assert torch.equal(load_data(config)[0][3]["targets"], before)
    assert {path: path.stat().st_mtime_ns for path in (disk.root / "cache").rglob("*")} == files
