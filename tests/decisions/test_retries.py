"""What failed is tried again and ends as if it had never failed; what stood still stands."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from batchscout.orchestrator.config.trial import base_trial
from batchscout.orchestrator.decisions.retries import (
    changed_names,
    events_of,
    kept_text,
    trials_that_count,
    tried_again,
    why_again,
    why_refused,
)
from batchscout.orchestrator.study.causes import Cause
from batchscout.orchestrator.study.events import (
    Concluded,
    Ended,
    Evaluated,
    Event,
    Paused,
    Retried,
    RunBegan,
    StageBegan,
    Started,
    proposed,
)
from batchscout.orchestrator.study.journal import Journal, replay
from batchscout.orchestrator.study.lines import read_lines
from batchscout.orchestrator.study.state import Study
from batchscout.orchestrator.study.trial import Proposal, TrialState
from tests.support.lane_player import Player, World, director_of, know, study_of
from tests.support.worlds import BOOM, FIELD, TIMED, bowl, failing, field_config, field_curves, run_at


def play(path: Path, world: World, config: Any, stages: list[str], found: Any = ()) -> Study:
    """Take the study up, and play what it lacks of these stages, as a driver does."""
    with Journal(path, config.name) as journal:
        if not journal.study.tokens:
            know(journal, found)
        journal.append(RunBegan(token=f"driver{len(journal.study.tokens)}"))
        for stage in stages:
            if stage not in journal.study.conclusions:
                Player(director_of(config, journal, stage), world).play()
            if not journal.study.conclusions[stage].ok:
                break
        return journal.study


def try_again(path: Path, name: str) -> list[Event]:
    with Journal(path, name) as journal:
        events: list[Event] = [*events_of(journal.study, tried_again(journal.study), "mine.py has changed since")]
        for event in events:
            journal.append(event)
    return events


def results(study: Study) -> dict[str, Any]:
    return {t.id: (t.state, t.metrics, t.history, t.rungs) for t in study.trials.values()}


def test_a_study_in_which_all_failed_ends_as_if_nothing_had_once_the_code_is_mended(tmp_path: Path) -> None:
    config = field_config()
    undisturbed = play(tmp_path / "undisturbed.jsonl", field_curves, config, ["grid"])
    path = tmp_path / "journal.jsonl"
    failed = play(path, failing(field_curves, lambda _: True), config, ["grid"])
    assert not failed.conclusions["grid"].ok
    assert {trial.cause for trial in failed.trials.values()} == {Cause.FAILED, Cause.STOPPED}
    try_again(path, config.name)
    assert replay(path, config.name).begins_again
    study = play(path, field_curves, config, ["grid"])
    assert results(study) == results(undisturbed)
    assert study.conclusions == undisturbed.conclusions
    assert replay(path, config.name) == study
    ended = [line.event for line in read_lines(path) if getattr(line.event, "id", None) == run_at(1e-3)]
    assert [event.kind for event in ended if event.kind in ("ended", "retried")] == ["ended", "retried", "ended"]
    tried = [trial for trial in study.trials.values() if trial.earlier_tries]
    assert f"tried again; before it failed: {BOOM}" in tried[0].explanation


def test_only_what_failed_runs_again(tmp_path: Path) -> None:
    config, path = field_config(), tmp_path / "journal.jsonl"
    play(path, failing(field_curves, lambda trial: trial.learning_rate == 2e-3), config, ["grid"])
    before = results(replay(path, config.name))
    again = try_again(path, config.name)
    assert [event.id for event in again if isinstance(event, Retried)] == [run_at(2e-3)]
    study = play(path, field_curves, config, ["grid"])
    assert study.trials[run_at(2e-3)].state is TrialState.COMPLETE
    after = results(study)
    assert {name: found for name, found in after.items() if name != run_at(2e-3)} == {
        name: found for name, found in before.items() if name != run_at(2e-3)
    }


def test_later_stages_are_asked_again_and_what_they_ran_counts_where_they_still_want_it(tmp_path: Path) -> None:
    """The best batch fails at first, so the learning rates are searched at another; then they are searched at the best."""
    config = study_of(
        stages=[{"type": "train", "max_runs": 8, "pruner": {"type": "none"}}, {"type": "learning_rate"}],
    )
    stages, path = ["train", "learning_rate"], tmp_path / "journal.jsonl"
    undisturbed = play(tmp_path / "undisturbed.jsonl", bowl, config, stages, TIMED)
    play(path, failing(bowl, lambda trial: trial.effective_batch_size == 4), config, stages, TIMED)
    misled = replay(path, config.name)
    try_again(path, config.name)
    opened = replay(path, config.name)
    assert set(opened.conclusions) == {"frontier", "throughput"}
    assert opened.withdrawn.keys() == {trial.id for trial in misled.of_stage("learning_rate")}
    study = play(path, bowl, config, stages)
    assert study.conclusions["train"].ok
    assert study.conclusions["learning_rate"].ok
    found, expected = study.conclusions["learning_rate"].findings, undisturbed.conclusions["learning_rate"].findings
    assert isinstance(found, dict)
    assert isinstance(expected, dict)
    assert study.trials[str(found["winner"])].config.effective_batch_size == 4
    stands = [t for t in misled.of_stage("train") if t.state is TrialState.COMPLETE]
    assert stands
    assert all(study.trials[trial.id].metrics == trial.metrics for trial in stands)
    others = [t for t in study.of_stage("learning_rate") if t.config.effective_batch_size != 4]
    assert others == [], "of the same names, and of another batch"
    assert replay(path, config.name) == study
    spent = [line.event.seconds for line in read_lines(path) if isinstance(line.event, Ended | Paused)]
    assert study.lane_seconds == pytest.approx(sum(spent)), "once, also of what nobody wants any more"


def test_a_stage_that_is_asked_again_and_wants_what_it_has_run_concludes_the_same(tmp_path: Path) -> None:
    config = study_of(
        stages=[{"type": "train", "max_runs": 6, "pruner": {"type": "none"}}, {"type": "learning_rate"}],
    )
    stages, path = ["train", "learning_rate"], tmp_path / "journal.jsonl"
    world = failing(bowl, lambda trial: trial.effective_batch_size == 16)
    before = play(path, world, config, stages, TIMED)
    again = try_again(path, config.name)
    study = play(path, world, config, stages)  # which fails as before
    assert results(study) == results(before)
    assert study.conclusions == before.conclusions
    ended = [line.event.id for line in read_lines(path) if isinstance(line.event, Ended)]
    tried = [event.id for event in again if isinstance(event, Retried)]
    assert sorted(ended) == sorted([*before.trials, *tried]), "nothing else ran twice"


def test_a_stage_without_a_result_in_which_no_trial_failed_runs_again_whole(tmp_path: Path) -> None:
    config, path = field_config(), tmp_path / "journal.jsonl"
    study = play(path, field_curves, config, ["grid"])
    assert tried_again(study) == []
    study.conclusions.clear()
    study.apply(Concluded(stage="grid", ok=False, reason="the loss is no sum"))
    assert {trial.id for trial in tried_again(study)} == {run_at(rate) for rate in FIELD}


def test_what_has_not_failed_is_not_touched() -> None:
    study = Study("s")
    study.apply(StageBegan(stage="grid"))
    study.apply(Concluded(stage="grid", ok=True, reason="fine"))
    assert events_of(study, tried_again(study), "why") == []


def test_the_events_of_a_retry_come_twice_and_change_nothing(tmp_path: Path) -> None:
    config, path = field_config(), tmp_path / "journal.jsonl"
    play(path, failing(field_curves, lambda _: True), config, ["grid"])
    again = try_again(path, config.name)
    once = replay(path, config.name)
    twice = replay(path, config.name)
    for event in again:
        twice.apply(event)
    assert once == twice


def test_what_changed_is_named() -> None:
    assert changed_names({"mine.py": "a", "data.kwargs.path": "b"}, {"mine.py": "c", "new.py": "d"}) == [
        "data.kwargs.path", "mine.py", "new.py",
    ]  # fmt: skip
    assert changed_names(None, {"mine.py": "c"}) == []
    assert why_again(["mine.py"]) == "mine.py has changed since"
    assert why_again(["a.py", "b.py", "c.py", "d.py"]) == "a.py, b.py, c.py and 1 more have changed since"
    assert why_again([]) == "you ask for it (--retry-failed)"


# What ended before a change


def test_what_has_ended_is_refused_once_the_code_has_changed_with_the_command_that_keeps_it(tmp_path: Path) -> None:
    config, path = field_config(), tmp_path / "journal.jsonl"
    study = play(path, field_curves, config, ["grid"])
    assert len(trials_that_count(study)) == len(FIELD)
    said = why_refused(study, ["mine.py"], ["training data"])
    assert said == (
        "mine.py, training data have changed since this study began, and trials of old and new code or data do not compare. "
        "Choose another --dir to begin anew, or add --keep-finished to go on with both"
    )
    assert why_refused(study, [], []) is None
    assert kept_text(study, ["mine.py"]) == (
        f"{len(FIELD)} trials had been measured before mine.py changed, and are part of the answer"
    )


def test_data_count_from_the_first_proposal_and_code_from_the_first_evaluation(tmp_path: Path) -> None:
    config, path = field_config(), tmp_path / "journal.jsonl"
    trial = Proposal("grid-a", "grid", base_trial(config, None), candidate="grid-a")
    with Journal(path, config.name) as journal:
        journal.append(RunBegan(token="first"))
        assert why_refused(journal.study, ["mine.py"], ["training data"]) is None
        journal.append(proposed(trial))
        assert why_refused(journal.study, ["mine.py"], []) is None
        assert (why_refused(journal.study, ["mine.py"], ["training data"]) or "").startswith(
            "training data has changed"
        )
        journal.append(Started(id=trial.id))
        journal.append(Evaluated(id=trial.id, metrics={"samples_seen": 4.0, "val_loss": 1.0}))
        assert (why_refused(journal.study, ["mine.py"], []) or "").startswith("mine.py has changed")


def test_where_all_has_failed_nothing_is_refused_and_where_some_has_the_command_tries_that_again(
    tmp_path: Path,
) -> None:
    config = field_config()
    study = play(tmp_path / "all.jsonl", failing(field_curves, lambda _: True), config, ["grid"])
    assert trials_that_count(study) == []
    assert why_refused(study, ["mine.py"], []) is None
    assert why_refused(study, [], ["training data"]) is None, "it begins again with these"
    worst = max(FIELD)
    some = failing(field_curves, lambda trial: trial.learning_rate == worst)
    said = why_refused(play(tmp_path / "some.jsonl", some, config, ["grid"]), ["mine.py"], []) or ""
    assert said.endswith("to go on with both, and to try again what failed")
