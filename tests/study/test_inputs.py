"""The user's code and data as a driver finds them: a change is seen, and named."""

from __future__ import annotations

from pathlib import Path

import pytest

from orchestrator.study.inputs import inputs_of
from tests.support.lane_player import study_of


def test_every_file_of_the_users_code_is_known_by_what_it_holds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(tmp_path))
    package = tmp_path / "inputs_package"
    (package / "inner").mkdir(parents=True)
    for name in ("__init__.py", "model.py", "inner/layers.py"):
        (package / name).write_text("")
    config = study_of(model={"target": "inputs_package.model:Model"})
    before = inputs_of(config)
    assert sorted(before) == [f"inputs_package/{name}" for name in ("__init__.py", "inner/layers.py", "model.py")]
    (package / "inner" / "layers.py").write_text("width = 2\n")
    after = inputs_of(config)
    assert [name for name in before if before[name] != after[name]] == ["inputs_package/inner/layers.py"]
    (package / "model.py").touch()
    assert inputs_of(config) == after, "to save a file as it is changes nothing"


def test_files_of_data_are_known_by_their_keys(tmp_path: Path) -> None:
    (text := tmp_path / "train.txt").write_text("a")
    kwargs = {"train": str(text), "seq_len": 8, "files": [str(text), "no such file"], "x" * 300: "y" * 10_000}
    config = study_of(data={"target": "text", "kwargs": kwargs})
    before = inputs_of(config)
    assert sorted(before) == ["data.kwargs.files.0", "data.kwargs.train"]
    text.write_text("ab")
    assert inputs_of(config).keys() == before.keys()
    assert inputs_of(config) != before


def test_a_study_of_built_in_parts_has_none() -> None:
    assert inputs_of(study_of()) == {}
