"""Directories of earlier formats are read, and no run goes on in them."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import yaml

import batchscout
from batchscout.orchestrator.config.stages import Frontier
from batchscout.orchestrator.config.trial import baseline_batch
from batchscout.orchestrator.study.journal import Journal, replay
from batchscout.orchestrator.study.run_directory import load_stored_study, open_run_directory, refuse_other_study
from batchscout.trainers.lines import body_of, line_of
from tests.support.outcome import GOLDEN


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    """A study of format 1 that was killed while a trial ran."""
    return shutil.copytree(GOLDEN / "every_state", tmp_path / "run")


def records_of(journal: Path) -> list[dict[str, Any]]:
    return [json.loads(body_of(line) or b"") for line in journal.read_bytes().splitlines(keepends=True)]


def test_a_study_that_an_earlier_version_began_is_refused_with_both_formats_and_the_remedy(run_dir: Path) -> None:
    before = (run_dir / "journal.jsonl").read_bytes()
    config = batchscout.load(run_dir).config
    said = (
        r"journal\.jsonl has journal format 1, and this batchscout goes on with format 4 alone; .* choose another --dir"
    )
    for begin in (
        lambda: Journal(run_dir / "journal.jsonl", config.name),
        lambda: open_run_directory(config, run_dir),
        lambda: refuse_other_study(config, run_dir),
    ):
        with pytest.raises(ValueError, match=said):
            begin()
    assert (run_dir / "journal.jsonl").read_bytes() == before


def test_modules_of_this_program_are_named_as_they_are_now(run_dir: Path) -> None:
    path = run_dir / "journal.jsonl"
    named = json.dumps(records_of(path)).replace("tests.support.studies:RaisesAfter", "trainers.sources.objects:model")
    path.write_bytes(b"".join(line_of(json.dumps(one).encode()) for one in json.loads(named)))
    targets = {trial.config.model.target for trial in replay(path, "every-state").trials.values()}
    assert targets == {"batchscout.trainers.sources.objects:model"}


def test_trials_with_the_knob_that_is_gone_are_left_out_and_all_others_stand(run_dir: Path) -> None:
    path = run_dir / "journal.jsonl"
    records, was = records_of(path), replay(path, "every-state")
    knob = "optimizer_in_backward"
    (wanted,) = (one for one in records if one["kind"] == "proposed" and one["id"] == "frontier-none-eager-m64")
    told = [one for one in records if one.get("id") == wanted["id"]]
    renamed = [json.loads(json.dumps(one).replace("none-eager-m64", f"none-eager-{knob}-m64")) for one in told]
    renamed[0]["config"] |= {"memory_knobs": [knob]}
    at = records.index(told[-1]) + 1
    path.write_bytes(b"".join(line_of(json.dumps(one).encode()) for one in [*records[:at], *renamed, *records[at:]]))
    tree = yaml.safe_load((run_dir / "study.yaml").read_text())
    assert tree["stages"][0]["type"] == "frontier"
    tree["stages"][0]["memory_knobs"] = [knob]
    (run_dir / "study.yaml").write_text(yaml.safe_dump(tree))
    found = batchscout.load(run_dir)
    assert found.replayed == was
    assert [stage.memory_knobs for stage in found.config.stages if isinstance(stage, Frontier)] == [()]


@pytest.mark.parametrize("split", [{}, {"sample_budget": 80_000}])
def test_a_real_run_that_does_not_say_how_its_batch_is_split_is_none(run_dir: Path, split: dict[str, int]) -> None:
    path = run_dir / "journal.jsonl"
    records = records_of(path)
    concluded = next(one for one in records if one["kind"] == "concluded")
    told = concluded | {"stage": "horizons", "findings": {"samples": 90_000} | split}
    path.write_bytes(b"".join(line_of(json.dumps(one).encode()) for one in [*records, told]))
    found = replay(path, "every-state").conclusions["horizons"]
    assert (found.reason, found.findings) == (concluded["reason"], told["findings"] if split else None)


def test_a_line_of_an_earlier_format_that_says_nonsense_is_named(run_dir: Path) -> None:
    path = run_dir / "journal.jsonl"
    records = records_of(path)
    path.write_bytes(
        b"".join(line_of(json.dumps(one).encode()) for one in [records[0] | {"kind": "dreamt"}, *records[1:]])
    )
    with pytest.raises(ValueError, match=re.escape("line 1 of")):
        replay(path, "s")


def test_a_batch_of_1_of_format_1_was_none_and_one_of_format_2_is_a_batch(run_dir: Path) -> None:
    tree = yaml.safe_load((run_dir / "study.yaml").read_text())
    assert tree["batch"]["micro_batch_size"] == 1
    assert baseline_batch(batchscout.load(run_dir).config) == tree["optimizer"]["reference_batch_size"]
    (run_dir / "journal.jsonl").unlink()
    assert baseline_batch(load_stored_study(run_dir / "study.yaml")) == 1
