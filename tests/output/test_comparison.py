"""Two studies beside each other: what was different, and did the answer change."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from batchscout.orchestrator.output.comparison import (
    Side,
    agreement,
    compared,
    keys_of,
    labels,
    print_comparison,
    read_sides,
)
from batchscout.orchestrator.output.recommendation import Recommendation
from batchscout.orchestrator.output.report.comparison import comparison
from batchscout.orchestrator.stages.train import trained
from batchscout.orchestrator.study.events import FactsRead
from batchscout.orchestrator.study.facts import Facts
from batchscout.orchestrator.study.state import Study
from batchscout.orchestrator.study.storage.place import run_place_of
from batchscout.trainers.config import Schedule
from tests.support.example_study import example_config, example_recommendation, example_study, tell
from tests.support.outcome import GOLDEN, RECORDED

QUICKSTART = GOLDEN / "quickstart"


def side(label: str, recommendation: Recommendation | None = None, facts: Facts | None = None, **keys: Any) -> Side:
    config = example_config(**keys)
    study = example_study(config)
    if facts:
        tell(study, FactsRead(facts=facts))
    return Side(label, config, study, recommendation)


def test_two_studies_that_recommend_the_same_say_so() -> None:
    one, other = (side(label, example_recommendation()) for label in ("a", "b"))
    assert agreement(one, other) == "Both recommend the same."
    assert "The study files: no difference." in "".join(comparison(one, other))


def test_what_the_answer_changed_to_is_said_with_both_numbers() -> None:
    changed = replace(example_recommendation(), learning_rate=1.2e-3)
    said = agreement(side("a", example_recommendation()), side("b", changed))
    assert said == "The answer differs: the effective batch stays 32, the learning rate goes from 0.0006 to 0.0012."


def test_what_the_machine_makes_of_the_same_setting_is_no_other_answer() -> None:
    """Two studies of one file train a batch on as many samples as its measured speed allows, and a median of draws is no other rate."""
    one = example_recommendation()
    longer = replace(one, sample_budget=one.sample_budget + 96, warmup_samples=one.warmup_samples + 32)
    again = replace(longer, learning_rate=1.002 * one.learning_rate)
    for other in (longer, again):
        found = compared(side("a", one), side("b", other))
        assert (found.same_answer, found.agreement) == (True, "Both recommend the same.")
        assert {"sample_budget", "warmup_samples"} <= {difference.key for difference in found.answers}
    on_purpose = compared(side("a", one), side("b", longer, sample_budget=2**20))
    assert on_purpose.agreement.endswith("; what differs is warmup_samples, sample_budget.")
    elsewhere = agreement(side("a", one), side("b", replace(again, precision="float32")))
    assert "the learning rate stays 0.0006; what differs is precision." in elsewhere


def test_probabilities_are_told_as_everywhere_else() -> None:
    one, other = (replace(example_recommendation(), p_best=p) for p in (0.953422, 0.99999))
    (row,) = (found for found in compared(side("a", one), side("b", other)).answers if found.key == "p_best")
    assert row.texts == ("0.95", ">0.99")


def test_another_optimizer_or_schedule_is_another_answer() -> None:
    same = example_recommendation()
    for changed, key in (
        (replace(same, optimizer=same.optimizer.model_copy(update={"weight_decay": 0.3})), "optimizer.weight_decay"),
        (replace(same, schedule=Schedule(type="cosine")), "schedule.type"),
        (replace(same, peft={"r": 8}), "peft"),
        (replace(same, parallel="fsdp"), "parallel"),
    ):
        found = compared(side("a", same), side("b", changed))
        assert (found.same_answer, key in {one.key for one in found.answers}) == (False, True)
        assert f"; what differs is {key}" in found.agreement


def test_a_change_that_neither_study_could_decide_is_no_finding() -> None:
    open_ = {"undecided_between": (32, 64)}
    one = replace(example_recommendation(), **open_)
    other = replace(one, effective_batch_size=64)
    assert "Neither study could tell these two batches apart" in agreement(side("a", one), side("b", other))
    decided = replace(other, undecided_between=())
    assert "Neither" not in agreement(side("a", one), side("b", decided))


def test_learning_rates_that_neither_study_could_tell_apart_are_no_finding() -> None:
    recorded, _ = read_sides(RECORDED, QUICKSTART)
    assert recorded.recommendation is not None
    findings = trained(recorded.study)
    best = findings.of_batch(recorded.recommendation.effective_batch_size) if findings else None
    assert best is not None
    for rate, is_open in ((best.learning_rate_low, True), (2 * best.learning_rate_high, False)):
        other = replace(recorded, recommendation=replace(recorded.recommendation, learning_rate=rate))
        assert ("tell these two learning rates apart" in agreement(recorded, other)) is is_open


def test_a_study_without_an_answer_is_named() -> None:
    assert "no recommendation in b" in agreement(side("a", example_recommendation()), side("b"))


def test_every_key_and_every_fact_that_differs_has_a_row_and_no_other() -> None:
    here, there = Facts(device="one machine", num_parameters=10), Facts(device="another", num_parameters=10)
    one = side("a", example_recommendation(), here)
    other = side("b", example_recommendation(), there, precision="float32", stages=[{"type": "frontier", "rounds": 7}])
    page = "".join(comparison(one, other))
    for text in ("precision", "float32", "stages.frontier.rounds", ">7<", "one machine", "another"):
        assert text in page
    assert "sample_budget" not in page.partition('id="changes"')[2]


def test_keys_are_told_by_their_paths() -> None:
    keys = keys_of(example_config())
    assert keys["precision"] == "bfloat16"
    assert keys["model.kwargs.num_layers"] == 6
    assert "stages.train.max_runs" in keys


@pytest.mark.parametrize(
    ("first", "second", "named"),
    [
        ("runs/a", "runs/b", ("a", "b")),
        ("old/run", "new/run", ("old/run", "new/run")),
        ("run", "x/run", None),
        ("s3://b/runs/a/?region=r", "s3://b/runs/b", ("a", "b")),
        ("s3://b/runs/a", "gs://c/runs/a", ("b/runs/a", "c/runs/a")),
        ("s3://b/runs/a", "runs/a", None),
    ],
)
def test_run_directories_are_named_by_what_tells_them_apart(
    first: str, second: str, named: tuple[str, str] | None
) -> None:
    found = labels(run_place_of(first), run_place_of(second))
    assert found[0] != found[1]
    assert named is None or found == named


def test_copies_of_what_a_store_has_are_known_by_their_places_there(tmp_path: Path) -> None:
    copies = [shutil.copytree(QUICKSTART, tmp_path / name) for name in ("x1", "x2")]
    one, other = (run_place_of(f"s3://b/runs/{name}") for name in ("a", "b"))
    assert [one.label for one in read_sides(copies[0], copies[1], (one, other))] == ["a", "b"]
    with pytest.raises(ValueError, match="s3://b/runs/a is given twice"):
        read_sides(copies[0], copies[1], (one, one))


def test_a_loss_far_above_all_others_does_not_flatten_them(tmp_path: Path) -> None:
    recorded, again = read_sides(QUICKSTART, shutil.copytree(QUICKSTART, tmp_path / "again"))
    assert "above" not in "".join(comparison(recorded, again)).split('id="losses"')[1].split("</section>")[0]
    assert recorded.recommendation is not None
    trial = recorded.study.trials[recorded.recommendation.evidence.trial]
    history = ({**trial.history[0], "val_loss": 1e3}, *trial.history[1:] * 3)
    recorded.study.trials[trial.id] = replace(trial, history=history)
    assert "1 evaluation above" in "".join(comparison(recorded, again))


def test_studies_that_have_not_begun_compare() -> None:
    config = example_config()
    sides = [Side(label, config, Study(config.name), None) for label in ("a", "b")]
    assert "no recommendation in a and b" in "".join(comparison(*sides))


def test_programs_are_told_both_values_of_what_differs_and_nothing_else() -> None:
    one = side("a", example_recommendation())
    other = side("b", replace(example_recommendation(), learning_rate=1.2e-3), precision="float32")
    told = compared(one, other).to_json()
    assert told["studies"] == ["a", "b"]
    assert told["same_answer"] is False
    assert told["answers"] == {"learning_rate": [6e-4, 1.2e-3]}
    assert told["study_files"] == {"precision": ["bfloat16", "float32"]}
    assert compared(one, side("b")).to_json()["same_answer"] is None


@pytest.mark.parametrize("columns", [50, 80, 120])
def test_a_terminal_is_told_what_the_page_says_within_its_width(
    columns: int, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    one = side("first", example_recommendation())
    other = side("second", replace(example_recommendation(), learning_rate=1.2e-3), seeds=[0, 1])
    both = compared(one, other)
    print_comparison(both)
    out = capsys.readouterr().out
    assert all(len(line.rstrip()) <= columns for line in out.splitlines())
    words = " ".join(out.split())
    assert both.agreement in words
    for difference in (*both.answers, *both.study_files):
        assert all(text in words for text in (difference.key, *difference.texts))
    assert "the machine and the data: no difference" in words
