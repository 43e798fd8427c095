"""The data files that a study names, as a driver finds them: a change is seen, and named."""

from __future__ import annotations

from pathlib import Path

from batchscout.orchestrator.study.inputs import data_files_of
from tests.support.lane_player import study_of


def test_files_of_data_are_known_by_their_keys(tmp_path: Path) -> None:
    (text := tmp_path / "train.txt").write_text("a")
    kwargs = {"train": str(text), "seq_len": 8, "files": [str(text), "no such file"], "x" * 300: "y" * 10_000}
    config = study_of(data={"target": "text", "kwargs": kwargs})
    before = data_files_of(config)
    assert sorted(before) == ["data.kwargs.files.0", "data.kwargs.train"]
    text.write_text("ab")
    assert data_files_of(config).keys() == before.keys()
    assert data_files_of(config) != before


def test_a_study_of_built_in_parts_has_none() -> None:
    assert data_files_of(study_of()) == {}
