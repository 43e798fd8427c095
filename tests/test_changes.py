"""What a driver finds changed of a study's code and data, before anything runs."""

from __future__ import annotations

import contextlib
import json
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from batchscout.orchestrator import preflight
from batchscout.orchestrator.changes import (
    changes_of,
    changes_of_what_is_over,
    made_of,
    measured_elsewhere,
    refuse_or_keep,
    without_what_it_writes,
)
from batchscout.orchestrator.config.keys import StudyConfig
from batchscout.orchestrator.config.trial import base_trial
from batchscout.orchestrator.study.causes import Cause
from batchscout.orchestrator.study.events import Ended, Evaluated, FactsRead, RunBegan, Started, proposed
from batchscout.orchestrator.study.facts import Facts
from batchscout.orchestrator.study.journal import Journal
from batchscout.orchestrator.study.trial import Proposal, TrialState
from batchscout.trainers.before.digests import MODEL, WEIGHTS, digest_of_model, digests_of_data, steady
from batchscout.trainers.before.first_pass import first_pass
from batchscout.trainers.notices import Notice, NoticeKind, heard_by
from tests.support.studies import grid, tiny_study


def samples(number: int, count: int = 32) -> list[dict[str, Any]]:
    empty = torch.zeros(8, dtype=torch.long)
    return [{"input_ids": torch.full((8,), (i + number) % 97), "targets": empty} for i in range(count)]


def data(*, length: int = 32, **_: object) -> tuple[Any, Any]:
    """Other samples in every process, though the same for good in one: as a shuffle at import without a seed."""
    random.seed(str.__hash__("another in every process"))
    return random.sample(samples(0, 200), length), samples(0)


def test_another_torch_or_other_threads_than_those_that_measured_are_told() -> None:
    """On a CPU lanes share the cores: with four of them a rank has a quarter of the threads."""
    before = Facts(versions={"torch": "2.11.0"}, device="AMD EPYC, 16 threads, 1000 bytes")
    assert list(measured_elsewhere(before, "2.11.0", "AMD EPYC, 16 threads, 999 bytes")) == []
    (threads,) = measured_elsewhere(before, "2.11.0", "AMD EPYC, 4 threads, 1000 bytes")
    assert "measured on AMD EPYC, 16 threads, and later ones on AMD EPYC, 4 threads" in threads
    assert "run the study with another --dir" in threads
    (version,) = measured_elsewhere(before, "2.13.0", "AMD EPYC, 16 threads, 1000 bytes")
    assert "with torch 2.11.0, and later ones with torch 2.13.0" in version
    assert list(measured_elsewhere(Facts(), "2.13.0", "")) == [], "of what is not known nothing is told"


def begin(journal: Journal, facts: Facts, config: StudyConfig) -> None:
    """Two trials: the first has been measured, the second failed."""
    journal.append(RunBegan(token="first"))
    journal.append(FactsRead(facts=facts))
    for name in ("grid-a", "grid-b"):
        journal.append(proposed(Proposal(name, "grid", base_trial(config, None), candidate=name)))
        journal.append(Started(id=name))
    journal.append(Evaluated(id="grid-a", metrics={"samples_seen": 4.0, "val_loss": 1.0}))
    journal.append(
        Ended(id="grid-b", state=TrialState.FAILED, reason="boom", cause=Cause.FAILED, metrics={}, seconds=1.0)
    )


def in_files(folder: Path, **texts: str) -> StudyConfig:
    for name, text in texts.items():
        (folder / f"{name}.txt").write_text(text)
    kwargs = {name: str(folder / f"{name}.txt") for name in texts}
    return of_data(**kwargs)


def of_data(*, target: str = f"{__name__}:data", **kwargs: Any) -> StudyConfig:
    kwargs_of_model = {"vocab_size": 97, "seq_len": 8, "num_layers": 1, "num_heads": 2, "hidden_dim": 16}
    model = {"target": "gpt", "kwargs": kwargs_of_model}
    return tiny_study(model=model, data={"target": target, "kwargs": kwargs}, stages=grid(micro_batch_size=[4]))


def facts_of(config: StudyConfig, contents: dict[str, str]) -> Facts:
    return replace(made_of(config), contents=contents)


def test_other_data_are_refused_and_kept_where_the_user_says_so(tmp_path: Path) -> None:
    then, now = (digests_of_data(samples(number), samples(0)) for number in (0, 1))
    config = in_files(tmp_path, table="a" * 10)
    with Journal(tmp_path / "journal.jsonl", config.name) as journal:
        begin(journal, facts_of(config, steady(then, then)), config)
        assert changes_of(config, journal.study.facts, then).names == []
        (tmp_path / "table.txt").touch()
        assert changes_of(config, journal.study.facts, then).names == [], "it holds what it held"
        in_files(tmp_path, table="b" * 10)
        changes = changes_of(config, journal.study.facts, now)
        assert changes.data == ["data.kwargs.table", "training data"]
        said = r"^data\.kwargs\.table, training data have changed since .*--keep-finished .*, and to try again what failed$"
        with pytest.raises(ValueError, match=said):
            refuse_or_keep(journal, changes, keep_finished=False)
        assert NoticeKind.KEPT_TRIALS not in [notice.kind for notice in journal.study.notices.get(None, [])]
        refuse_or_keep(journal, changes, keep_finished=True)
        assert [notice.kind for notice in journal.study.notices[None]] == [NoticeKind.KEPT_TRIALS]


@pytest.mark.slow
def test_data_that_are_others_in_every_process_are_told_of_and_known_by_their_number() -> None:
    """Though they are the same whenever one process loads them."""
    config, heard = of_data(), list[Notice]()
    with heard_by(heard.append):
        facts = preflight.check_new_study(config, is_local=True, compiles=False, say=print)
    (notice,) = heard
    assert (notice.kind, "the training data differ in every process" in notice.text) == (NoticeKind.UNSTEADY_DATA, True)
    assert facts.contents
    assert sorted(facts.contents) == ["the number of training samples", "validation data", MODEL]
    now = preflight.contents_of(config, print)
    assert changes_of(config, facts, now).names == []
    fewer = of_data(length=31)
    assert changes_of(config, facts, preflight.contents_of(fewer, print)).data == ["the number of training samples"]


class FromASettingsFile(nn.Module):
    """Its width and its dropout are in no code; what it draws is another number each time."""

    def __init__(self, path: str) -> None:
        super().__init__()
        settings = json.loads(Path(path).read_text())
        self.layer = nn.Linear(4, settings["width"])
        self._scale, self.dropout = nn.Parameter(torch.randn(settings["width"])), nn.Dropout(settings["dropout"])


@pytest.mark.parametrize(
    ("other", "is_other"), [({"width": 8}, True), ({"dropout": 0.5}, True), ({"note": "?"}, False)]
)
def test_a_model_that_a_file_of_settings_makes_otherwise_is_refused_as_other_code_is(
    tmp_path: Path, other: dict[str, Any], is_other: bool
) -> None:
    file, settings = tmp_path / "settings.json", {"width": 4, "dropout": 0.1}
    file.write_text(json.dumps(settings))
    then = digest_of_model(FromASettingsFile(str(file)))
    config = of_data(target="tests.support.tiny:data")
    with Journal(tmp_path / "journal.jsonl", config.name) as journal:
        begin(journal, facts_of(config, steady(then, digest_of_model(FromASettingsFile(str(file))))), config)
        file.write_text(json.dumps(settings | other))
        changes = changes_of(config, journal.study.facts, digest_of_model(FromASettingsFile(str(file))))
        assert (changes.code, changes.data) == ([MODEL] if is_other else [], [])
        with pytest.raises(ValueError, match=f"^{MODEL} has changed") if is_other else contextlib.nullcontext():
            refuse_or_keep(journal, changes, keep_finished=False)


def test_a_model_that_is_another_in_every_process_is_known_by_the_number_of_its_weights() -> None:
    there, here, larger = ({MODEL: digest, WEIGHTS: count} for digest, count in (("a", "4"), ("b", "4"), ("c", "8")))
    facts = facts_of(config := of_data(), steady(here, there))
    assert [changes_of(config, facts, now).code for now in (there, larger)] == [[], [WEIGHTS]]


def test_the_first_pass_finds_the_same_data_and_the_same_model_alike() -> None:
    config = tiny_study(stages=grid(micro_batch_size=[4]))
    found = first_pass(base_trial(config, None), 30.0)
    assert found.digests == preflight.contents_of(config, print)


def test_a_file_that_the_study_writes_or_that_was_not_there_is_no_input(tmp_path: Path) -> None:
    config = in_files(tmp_path, table="a", log="")
    began_with = made_of(config)
    (tmp_path / "log.txt").write_text("a model was made\n")
    facts = without_what_it_writes(began_with, config)
    assert list(facts.inputs or {}) == ["data.kwargs.table"]
    (tmp_path / "log.txt").write_text("another model was made\n")
    later = of_data(table=str(tmp_path / "table.txt"), log=str(tmp_path / "log.txt"), end=str(tmp_path / "log.txt"))
    assert changes_of(later, facts, {}).names == []


@pytest.mark.parametrize("gone", ["data", "file"])
def test_of_a_study_that_is_over_it_is_said_what_is_not_there_any_more(tmp_path: Path, gone: str) -> None:
    config = in_files(tmp_path, table="a")
    there = facts_of(config, preflight.contents_of(config, print))
    said: list[str] = []
    assert changes_of_what_is_over(config, there, said.append).names == said == []
    if gone == "data":
        config = of_data(target="absent_module:data")
    else:
        (tmp_path / "table.txt").unlink()
    assert changes_of_what_is_over(config, there, said.append).names == []
    (told,) = said
    assert told.startswith("not compared with what the study began with: ")
    assert {"data": "absent_module", "file": "there is no data.kwargs.table any more"}[gone] in told
