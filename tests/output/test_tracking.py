"""W&B offline and TensorBoard, for real: what was logged is read back from the files that they write."""

import json
import re
import struct
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from orchestrator.config.keys import Tracking
from orchestrator.decisions.observer import Observer
from orchestrator.output.tracking import how_to_look, open_trackers, track_verdict
from orchestrator.output.tracking.of_wandb import run_id
from orchestrator.study.causes import Cause
from orchestrator.study.run_directory import trial_directory
from orchestrator.study.trial import Metrics, Proposal, Trial, TrialState
from trainers import step_log
from trainers.config import DataConfig, ModelConfig, TrialConfig
from trainers.files import StorageLost

BLOCK = 32768


@pytest.fixture
def tracker(tmp_path: Path) -> Iterator[Observer]:
    (tracker,) = open_trackers(Tracking(wandb="offline", project="tests"), "my-study", tmp_path)
    yield tracker
    tracker.close()


def trial(trial_id: str = "train-m2", **fields: Any) -> Trial:
    config = TrialConfig(
        model=ModelConfig(target="gpt"),
        data=DataConfig(target="python_stdlib"),
        micro_batch_size=2,
        learning_rate=1e-3,
        sample_budget=64,
    )
    return Trial(Proposal(trial_id, "train", config, candidate=trial_id), TrialState.RUNNING, **fields)


def evaluate(tracker: Observer, samples: float, val_loss: float, trial_id: str = "train-m2") -> None:
    metrics: Metrics = {"samples_seen": samples, "val_loss": val_loss}
    tracker.evaluated(trial(trial_id, metrics=metrics), metrics)


def records(file: Path) -> Iterator[Any]:
    """The records of a .wandb file: protobufs in a LevelDB log."""
    from wandb.proto import wandb_internal_pb2

    record_type: Any = vars(wandb_internal_pb2)["Record"]  # made at import, so no checker finds it
    content, at, whole = file.read_bytes(), 7, b""
    while at + 7 <= len(content):
        if BLOCK - at % BLOCK < 7:
            at += BLOCK - at % BLOCK
            continue
        _, length, kind = struct.unpack_from("<IHB", content, at)
        whole += content[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (1, 4):  # a whole record, or its last part
            yield record_type.FromString(whole)
            whole = b""


def finished_records(file: Path) -> list[Any]:
    """All records, the exit among them: finish() returns shortly before W&B's own process has written the file out."""
    deadline = time.monotonic() + 10
    while time.monotonic() < deadline:
        found = list(records(file))
        if any(record.WhichOneof("record_type") == "exit" for record in found):
            return found
        time.sleep(0.02)
    raise AssertionError(f"{file} has no exit record: the run was never finished")


def read_run(run_dir: Path, trial_id: str) -> list[tuple[Any, list[dict[str, Any]], dict[str, Any], int | None]]:
    """Of each segment of a trial's run, in order: its run record, history rows, summary and exit code."""
    found = []
    for file in sorted(run_dir.glob(f"wandb/offline-run-*-my-study-{trial_id}-*/run-*.wandb")):
        run, rows, summary, code = None, [], {}, None
        for record in finished_records(file):
            kind = record.WhichOneof("record_type")
            if kind == "run" and run is None:
                run = record.run
            elif kind == "history":
                items = {"/".join(item.nested_key) or item.key: item.value_json for item in record.history.item}
                rows.append({key: json.loads(value) for key, value in items.items()})
            elif kind == "summary":
                summary |= {item.key: json.loads(item.value_json) for item in record.summary.update}
            elif kind == "exit":
                code = record.exit.exit_code
        found.append((run, rows, summary, code))
    return found


@pytest.mark.slow
def test_a_complete_trial_is_one_run_of_the_group(tracker: Observer, tmp_path: Path) -> None:
    tracker.started(trial())
    evaluate(tracker, 8, 3.0)
    evaluate(tracker, 16, 2.5)
    tracker.ended(replace(trial(metrics={"val_loss": 2.5}), state=TrialState.COMPLETE))
    ((run, rows, summary, code),) = read_run(tmp_path, "train-m2")
    config = {item.key: json.loads(item.value_json) for item in run.config.update}
    assert (run.run_group, run.display_name, run.project) == ("my-study", "train-m2", "tests")
    assert config["micro_batch_size"] == 2
    assert config["model"]["target"] == "gpt"
    assert [(row["_step"], row["samples_seen"], row["val_loss"]) for row in rows] == [(8, 8, 3.0), (16, 16, 2.5)]
    assert (summary["state"], summary["val_loss"], code) == ("complete", 2.5, 0)


@pytest.mark.parametrize(
    ("state", "code"), [(TrialState.PRUNED, 0), (TrialState.OUT_OF_MEMORY, 0), (TrialState.FAILED, 1)]
)
def test_every_end_finishes_its_run(tracker: Observer, tmp_path: Path, state: TrialState, code: int) -> None:
    tracker.started(trial())
    tracker.ended(replace(trial(), state=state, cause=Cause.RUNG, reason="place 2 of 2"))
    ((_, _, summary, exit_code),) = read_run(tmp_path, "train-m2")
    assert (summary["state"], summary["reason"], exit_code) == (state, "rung: place 2 of 2", code)


def test_a_trial_pruned_while_paused_is_finished_by_a_driver_that_never_started_it(
    tracker: Observer, tmp_path: Path
) -> None:
    tracker.ended(replace(trial(), state=TrialState.PRUNED, cause=Cause.RUNG, reason="place 2 of 2"))
    assert [code for _, _, _, code in read_run(tmp_path, "train-m2")] == [0]


def test_two_runs_open_at_once_keep_their_rows_apart(tracker: Observer, tmp_path: Path) -> None:
    for name in ("a", "b"):
        tracker.started(trial(name))
    for samples in (8, 16):
        evaluate(tracker, samples, 1.0, "a")
        evaluate(tracker, samples, 2.0, "b")
    for name in ("a", "b"):
        tracker.ended(replace(trial(name), state=TrialState.COMPLETE))
    for name, loss in (("a", 1.0), ("b", 2.0)):
        ((_, rows, _, _),) = read_run(tmp_path, name)
        assert [row["val_loss"] for row in rows] == [loss, loss]


def test_a_promoted_trial_goes_on_in_its_open_run(tracker: Observer, tmp_path: Path) -> None:
    tracker.started(trial())
    evaluate(tracker, 8, 3.0)
    tracker.started(trial(promoted=frozenset({8})))
    evaluate(tracker, 16, 2.0)
    tracker.ended(replace(trial(), state=TrialState.COMPLETE))
    ((_, rows, _, _),) = read_run(tmp_path, "train-m2")
    assert [row["samples_seen"] for row in rows] == [8, 16]


@pytest.mark.slow
def test_a_second_driver_goes_on_with_the_same_run_and_repeats_no_row(
    tracker: Observer, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    tracker.started(trial())
    evaluate(tracker, 8, 3.0)
    tracker.close()
    time.sleep(1.1)  # W&B names its folders by the second
    (again,) = open_trackers(Tracking(wandb="offline"), "my-study", tmp_path)
    again.started(trial(history=({"samples_seen": 8, "val_loss": 3.0},)))
    evaluate(again, 8, 3.0)
    evaluate(again, 16, 2.0)
    again.ended(replace(trial(), state=TrialState.COMPLETE))
    (first, rows, cut_off, code), (second, more, _, final) = read_run(tmp_path, "train-m2")
    assert first.run_id == second.run_id
    assert [row["_step"] for row in (*rows, *more)] == [8, 16]
    assert (cut_off["state"], code, final) == ("waiting", 1, 0)
    assert capfd.readouterr() == ("", "")


def test_a_study_begun_afresh_elsewhere_has_its_own_runs(tmp_path: Path) -> None:
    ids = set()
    for name in ("here", "there"):
        (tracker,) = open_trackers(Tracking(wandb="offline"), "my-study", tmp_path / name)
        tracker.started(trial())
        tracker.close()
        ids.add(read_run(tmp_path / name, "train-m2")[0][0].run_id)
    assert len(ids) == 2


@pytest.mark.slow
def test_the_verdict_is_a_run_of_its_own_beside_those_of_the_trials(tmp_path: Path) -> None:
    recommendation = {
        "micro_batch_size": 4,
        "learning_rate": 1e-3,
        "evidence": {"trial": "a"},
        "ruled_out": [],
        "verdict": "Train",
    }
    (tmp_path / "recommendation.json").write_text(json.dumps(recommendation))
    track_verdict(Tracking(wandb="offline", project="tests"), "my-study", tmp_path, "Train with micro-batch 4")
    ((run, rows, summary, code),) = read_run(tmp_path, "study")
    assert (run.project, run.run_group, run.display_name, run.job_type) == ("tests", "my-study", "study", "study")
    said = {key: value for key, value in summary.items() if key and not key.startswith("_")}
    assert said == {"verdict": "Train with micro-batch 4", "micro_batch_size": 4, "learning_rate": 1e-3}
    assert (rows, code) == ([], 0)


def test_the_command_that_sends_an_offline_study_is_told(tmp_path: Path) -> None:
    run_dir = tmp_path / "my study"
    sync = {"send to W&B": f"wandb sync '{run_dir}'/wandb/offline-run-*"}
    assert how_to_look(Tracking(wandb="offline"), run_dir) == sync
    curves = {"look at curves": f"tensorboard --logdir '{run_dir}'/tensorboard"}
    assert how_to_look(Tracking(wandb="offline", tensorboard=True), run_dir) == sync | curves
    assert how_to_look(Tracking(wandb="online"), run_dir) == how_to_look(Tracking(), run_dir) == {}


def test_run_ids_hold_only_what_wandb_takes_and_stay_different() -> None:
    assert run_id("s", "train-m2", "abc") == "s-train-m2-abc"
    odd = {run_id("s", name, "abc") for name in ("a/b", "a:b", "a-b", "x" * 300 + "1", "x" * 300 + "2")}
    assert len(odd) == 5
    assert all(len(name) <= 128 and not set("/:#?%\\") & set(name) for name in odd)


def test_off_does_nothing_and_imports_no_wandb(tmp_path: Path) -> None:
    assert open_trackers(Tracking(), "my-study", tmp_path) == []
    code = "import sys, orchestrator.output.tracking; sys.exit('wandb' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("key", "says"), [(None, "there is no W&B API key"), ("too-short", "refused this login: .*API key must have")]
)
def test_online_without_a_login_is_refused_before_anything_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, key: str | None, says: str
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    for name in ("WANDB_API_KEY", "WANDB_IDENTITY_TOKEN_FILE", "NETRC"):
        monkeypatch.delenv(name, raising=False)
    if key:
        monkeypatch.setenv("WANDB_API_KEY", key)
    with pytest.raises(ValueError, match=f"(?s){says}.*wandb login.*tracking.wandb: offline"):
        open_trackers(Tracking(wandb="online"), "my-study", tmp_path)
    assert not (tmp_path / "wandb").exists()


def test_a_directory_in_place_of_the_studys_token_is_named(tmp_path: Path) -> None:
    (token := tmp_path / "wandb" / "study-token").mkdir(parents=True)
    with pytest.raises(StorageLost, match=rf"^{re.escape(str(token))} could not be read: Is a directory$"):
        open_trackers(Tracking(wandb="offline", project="tests"), "my-study", tmp_path)


def keep_steps(run_dir: Path, numbers: range) -> None:
    steps = [step_log.Step(number, 2 * number, 4.0 / number, 0.5, 1e-3) for number in numbers]
    step_log.append(trial_directory(run_dir, "train-m2") / step_log.FILE_NAME, [step_log.line_of(steps)])


def run_twice(tracking: Tracking, run_dir: Path) -> None:
    """A trial of eight steps and two evaluations; the driver dies after the first, and the run takes two steps again."""
    (first,) = open_trackers(tracking, "my-study", run_dir)
    first.started(trial())
    keep_steps(run_dir, range(1, 7))
    evaluate(first, 8, 3.0)
    first.close()
    (second,) = open_trackers(tracking, "my-study", run_dir)
    second.started(trial(history=({"samples_seen": 8, "val_loss": 3.0},)))
    keep_steps(run_dir, range(5, 9))
    evaluate(second, 8, 3.0)
    evaluate(second, 16, 2.0)
    second.ended(replace(trial(), state=TrialState.COMPLETE))


@pytest.mark.slow
def test_wandb_has_every_step_once_between_the_evaluations(tmp_path: Path) -> None:
    run_twice(Tracking(wandb="offline", project="tests"), tmp_path)
    rows = [row for _, rows, _, _ in read_run(tmp_path, "train-m2") for row in rows]
    assert [row["samples_seen"] for row in rows] == [2, 4, 6, 8, 10, 12, 14, 16]
    assert [row["step_loss"] for row in rows] == pytest.approx([4.0 / n for n in range(1, 9)])
    assert [row.get("val_loss") for row in rows] == [None, None, None, 3.0, None, None, None, 2.0]


def scalars(folder: Path) -> dict[str, list[tuple[int, float]]]:
    """What TensorBoard's event files of a run hold: (samples, value) of each curve."""
    from tensorboardX.proto.event_pb2 import Event  # pyright: ignore[reportAttributeAccessIssue]

    found: dict[str, list[tuple[int, float]]] = {}
    for file in sorted(folder.glob("events.out.tfevents.*")):
        content, at = file.read_bytes(), 0
        while at < len(content):
            (length,) = struct.unpack_from("<Q", content, at)
            event = Event.FromString(content[at + 12 : at + 12 + length])
            at += 16 + length
            for value in event.summary.value:
                if value.HasField("simple_value"):
                    found.setdefault(value.tag, []).append((event.step, value.simple_value))
    return found


def test_tensorboard_has_every_step_once_and_the_evaluations(tmp_path: Path) -> None:
    run_twice(Tracking(tensorboard=True), tmp_path)
    found = scalars(tmp_path / "tensorboard" / "train-m2")
    assert sorted(found["step_loss"]) == [(2 * n, pytest.approx(4.0 / n)) for n in range(1, 9)]
    assert sorted(found["val_loss"]) == [(8, 3.0), (16, 2.0)]
    assert "samples_seen" not in found


def test_tensorboard_has_the_verdict(tmp_path: Path) -> None:
    track_verdict(Tracking(tensorboard=True), "my-study", tmp_path, "Train with micro-batch 4")
    (file,) = (tmp_path / "tensorboard" / "study").iterdir()
    assert b"Train with micro-batch 4" in file.read_bytes()
