"""`batchscout explain`: what it says of a trial is what the journal has of it."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import yaml

from batchscout.orchestrator.output.explained import Explanation, kept_at
from batchscout.orchestrator.output.loaded import load
from batchscout.orchestrator.study.causes import Cause
from batchscout.orchestrator.study.events import (
    Ended,
    Evaluated,
    Event,
    FactsRead,
    Interrupted,
    Noticed,
    Retried,
    RunBegan,
    StageBegan,
    Started,
    proposed,
)
from batchscout.orchestrator.study.facts import Facts
from batchscout.orchestrator.study.journal import Journal
from batchscout.orchestrator.study.run_directory import trial_directory
from batchscout.orchestrator.study.storage.place import ObjectStore
from batchscout.orchestrator.study.trial import Proposal, TrialState
from batchscout.trainers.config import DataConfig, ModelConfig, TrialConfig
from batchscout.trainers.notices import NoticeKind
from tests.support.command_line import Typed
from tests.support.outcome import GOLDEN
from tests.support.worlds import field_config

RUNNING = "grid-m64k1-none-eager-lr0.3-s0"


CONFIG = TrialConfig(
    model=ModelConfig(target="gpt"), data=DataConfig(target="python_stdlib"), micro_batch_size=2, world_size=2,
    learning_rate=1e-3, sample_budget=512,
)  # fmt: skip
WANTED = Proposal("one", "grid", CONFIG, "one", "the first of its kind", protected=True)


def explained(folder: Path, *events: Event) -> Explanation:
    """What is told of a trial of a study in which this happened."""
    config = field_config()
    folder.mkdir(exist_ok=True)
    (folder / "study.yaml").write_text(yaml.safe_dump(config.model_dump(mode="json")))
    with Journal(folder / "journal.jsonl", config.name) as journal:
        for event in (
            FactsRead(facts=Facts(), time=100),
            StageBegan(stage="grid", time=100),
            proposed(WANTED),
            *events,
        ):
            journal.append(event)
    return load(folder).explain("one")


def ended(state: TrialState, cause: Cause | None, reason: str, seconds: float, time: float) -> Ended:
    return Ended(id="one", state=state, cause=cause, reason=reason, metrics={}, seconds=seconds, time=time)


def texts(told: Explanation) -> list[str]:
    return [step.text for step in told.history]


def test_a_trial_that_was_paused_and_promoted_is_told_with_the_numbers_of_the_journal() -> None:
    told = load(GOLDEN / "every_state").explain(RUNNING)
    assert texts(told) == [
        "asked for by the stage grid",
        "given a lane",
        "evaluated after 256 samples (rung 256): val loss 4.406",
        "paused at the rung of 256 samples: waiting at 256 samples",
        "continued past the rung of 256 samples: place 1 of 3 at 256 samples; the best 1 go on",
        "given a lane again, and goes on",
    ]
    (rung,) = told.rungs
    assert rung.value == pytest.approx(4.4061, abs=1e-4)
    assert list(rung.others) == sorted(rung.others, key=lambda name: rung.others[name] or 0)
    assert (
        "it is judged together with the other seeds of grid-m64k1-none-eager-lr0.3: grid-m64k1-none-eager-lr0.3-s1"
        in (told.notes)
    )


def test_a_trial_that_was_cut_says_at_which_rung_and_against_whom() -> None:
    told = load(GOLDEN / "quickstart").explain("train-m12k1")
    assert told.question == "Which batch ends best at equal cost?"
    assert told.role == "best goodput"
    assert texts(told)[-1] == "pruned (rung: place 3 of 3 at 512 samples; the best 2 go on)"
    assert [(rung.samples, list(rung.others)[:2]) for rung in told.rungs][1] == (
        512,
        ["train-m4k1", "train-m12k1-unscaled"],
    )
    assert told.cost.samples == 516


def test_what_was_chosen_and_recommended_says_so() -> None:
    told = load(GOLDEN / "quickstart").explain("learning_rate-x2")
    assert told.outcome[:2] == ("the study recommends this run", "the stage learning_rate chose it")
    assert told.outcome[2].startswith("the stage learning_rate concluded: learning rate 0.001 ends at val loss 5.024")


def test_what_another_study_measured_cost_this_one_nothing() -> None:
    told = load(GOLDEN / "every_end").explain("frontier-none-eager-m64")
    assert told.cost.tries == told.cost.samples == 0
    assert texts(told)[-1] == "complete; measured by the study in /home/ml/runs/every_state"


def test_every_try_interruption_and_dead_driver_is_told_and_counted(tmp_path: Path) -> None:
    told = explained(
        tmp_path / "run",
        Started(id="one", time=110),
        RunBegan(token="b", time=115),
        Started(id="one", time=120),
        Interrupted(id="one", reason="its node was drained", seconds=4, time=124),
        Started(id="one", time=130),
        ended(TrialState.FAILED, Cause.FAILED, "KeyError: 'labels'", 6, 136),
        Retried(id="one", reason="its code has changed", time=140),
        Started(id="one", time=141),
        Noticed(id="one", notice=NoticeKind.DAMAGED_CHECKPOINT, reason="a checkpoint was damaged", time=142),
        Evaluated(id="one", metrics={"samples_seen": 256, "val_loss": 3.25}, time=150),
        ended(TrialState.COMPLETE, None, "", 10, 151),
    )
    assert texts(told)[1:] == [
        "given a lane",
        "its driver had ended: another one resumed the study, and it waits again",
        "given a lane again, and goes on",
        "lost its lane through no fault of its own, and waits again: its node was drained",
        "given a lane again, and goes on",
        "failed: KeyError: 'labels'",
        "is tried again, from its beginning: its code has changed",
        "given a lane",
        "notice: a checkpoint was damaged",
        "evaluated after 256 samples: val loss 3.250",
        "complete",
    ]
    assert [step.seconds for step in told.history][1:3] == [10, 15]
    assert (told.cost.tries, told.cost.interruptions, told.cost.samples) == (2, 2, 256)
    assert (told.cost.lane_seconds, told.cost.device_seconds) == (20, 40)
    assert told.cost.share_of_study == 1
    assert told.role == "the first of its kind"
    assert "it is never cut for being slower or worse than others" in told.notes


def test_an_event_that_stands_twice_is_told_once(tmp_path: Path) -> None:
    once = ended(TrialState.FAILED, Cause.FAILED, "it broke", 1, 112)
    told = explained(tmp_path / "run", Started(id="one", time=110), once, once)
    assert texts(told)[-2:] == ["given a lane", "failed: it broke"]


def test_what_a_trial_has_left_is_named_with_its_path(tmp_path: Path) -> None:
    folder = trial_directory(tmp_path / "run", "one")
    folder.mkdir(parents=True)
    for name in ("error-rank0.log", "try1-error-rank0.log", "steps.jsonl", "weights.pt"):
        (folder / name).write_text("x")
    told = explained(tmp_path / "run")
    assert told.files == {
        str(folder / "error-rank0.log"): "a rank's traceback",
        str(folder / "try1-error-rank0.log"): "of an earlier try",
        str(folder / "steps.jsonl"): "loss, gradient norm and learning rate of every step",
    }
    stored = kept_at(told, tmp_path / "run", ObjectStore("s3://b/runs/a"))
    assert list(stored.files) == [
        f"s3://b/runs/a/{path.relative_to(tmp_path / 'run')}" for path in map(Path, told.files)
    ]


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("train-m12k2", "did you mean train-m12k4 or train-m12k1 or train-m32k1? all 38 names: batchscout status "),
        ("zz", "has no trial 'zz'; all 38 names: batchscout status "),
    ],
)
def test_an_unknown_name_is_answered_with_the_nearest(name: str, said: str, typed: Typed) -> None:
    code, out, err = typed("explain", str(GOLDEN / "quickstart"), name)
    assert (code, out) == (2, "")
    assert f"has no trial '{name}'; " in err
    assert said in err


def test_a_study_without_trials_says_when_to_look_again(tmp_path: Path, typed: Typed) -> None:
    shutil.copy(GOLDEN / "quickstart" / "study.yaml", tmp_path)
    (tmp_path / "journal.jsonl").touch()
    code, _, err = typed("explain", str(tmp_path), "one")
    assert code == 2
    assert err.endswith("has no trials yet; look again once batchscout status shows some\n")


@pytest.mark.parametrize("columns", [50, 80, 120])
def test_a_terminal_is_told_all_of_it_within_its_width(
    columns: int, typed: Typed, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    code, out, _ = typed("explain", str(GOLDEN / "every_state"), RUNNING)
    told = load(GOLDEN / "every_state").explain(RUNNING)
    assert code == 0
    assert all(len(line) <= columns for line in out.splitlines())
    words = " ".join(out.split())
    for text in (told.question, told.what, told.result, *told.notes, *texts(told)):
        assert text in words


def test_programs_are_told_the_same(typed: Typed) -> None:
    _, out, _ = typed("explain", str(GOLDEN / "every_state"), RUNNING, "--json")
    found: dict[str, Any] = json.loads(out, parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))
    told = load(GOLDEN / "every_state").explain(RUNNING)
    assert (found["state"], found["result"], found["metrics"]) == ("running", told.result, told.metrics)
    assert [step["text"] for step in found["history"]] == texts(told)
