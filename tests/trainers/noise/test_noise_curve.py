"""What is read of a run's snapshots is what they found, whatever becomes of the file."""

from __future__ import annotations

from pathlib import Path

import pytest

from batchscout.trainers.noise.noise_curve import (
    AccumulatedGradient,
    NoiseSnapshot,
    add_to_noise_curve,
    read_noise_curve,
)
from batchscout.trainers.notices import Notice, NoticeKind, heard_by
from tests.support.damage import flipped

ROW = AccumulatedGradient(
    num_micro_batches=2, samples=8, coherence=0.25, coherence_floor=0.04, gradient_norm=1.5, gradient_mean=1e-5,
    gradient_variance=2e-4, gradient_snr=0.2, adam_snr=None, update_ratio=3e-3,
)  # fmt: skip
CURVE = [NoiseSnapshot(samples, 1e-3, 4, 40, 12.0, 6.0, None, 0.25, 0.04, (ROW,)) for samples in (40, 80, 120)]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    for snapshot in CURVE:
        add_to_noise_curve(tmp_path / "noise.jsonl", snapshot)
    return tmp_path / "noise.jsonl"


def told_of(path: Path) -> tuple[list[NoiseSnapshot], list[Notice]]:
    met = list[Notice]()
    with heard_by(met.append):
        return read_noise_curve(path), met


@pytest.mark.slow
def test_no_flipped_bit_makes_another_snapshot_and_each_is_told(path: Path) -> None:
    """A flip in or of a line feed costs two lines, and every other one."""
    assert told_of(path) == (CURVE, [])
    content = path.read_bytes()
    for bit in range(8 * len(content)):
        path.write_bytes(damaged := flipped(content, bit))
        found, met = told_of(path)
        assert [one for one in CURVE if one in found] == found, damaged
        assert len(found) == (2 if damaged.count(b"\n") >= 3 else 1) or damaged[:-1] == content[:-1], damaged
        assert [notice.kind for notice in met] == [NoticeKind.DAMAGED_CURVE] * (found != CURVE), damaged


def test_a_notice_names_file_and_line_and_the_next_snapshot_mends_the_file(path: Path) -> None:
    path.write_bytes(path.read_bytes().replace(b'"samples_seen": 80', b'"samples_seen": 81'))
    found, (notice,) = told_of(path)
    assert found == [CURVE[0], CURVE[2]]
    assert notice.text.startswith(f"line 2 of {path} cannot be read as written, so that the report lacks what")
    with heard_by(lambda notice: None):
        add_to_noise_curve(path, CURVE[2])
    assert told_of(path) == ([CURVE[0], CURVE[2]], [])
