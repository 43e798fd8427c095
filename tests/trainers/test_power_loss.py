"""What was written is there after the power went: the file system is shut down without a flush, as by a cut cable."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from batchscout.trainers.checkpoints.checkpoint import save_checkpoint
from batchscout.trainers.config import DataConfig
from tests.support.disk import Disk, NotHere
from tests.support.map_style import map_style_sets
from tests.support.tiny import newest_state


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Disk]:
    try:
        disk = Disk(tmp_path)
    except NotHere as why:
        pytest.skip(str(why))
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
    before = map_style_sets(config)[0][3]["targets"]
    files = {path: path.stat().st_mtime_ns for path in (disk.root / "cache").rglob("*")}
    assert len(files) == 7, "the folders data and its entry, and the entry's five files"
    disk.lose_power()
    assert torch.equal(map_style_sets(config)[0][3]["targets"], before)
    assert {path: path.stat().st_mtime_ns for path in (disk.root / "cache").rglob("*")} == files
