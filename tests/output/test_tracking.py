"""Trackers, offline and for real: what was logged is read back from the files that they write."""

import importlib.util
import json
import os
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

from batchscout.orchestrator.config.keys import Tracking
from batchscout.orchestrator.output.tracking import how_to_look, open_trackers, require_libraries
from batchscout.orchestrator.output.tracking.names import run_id
from batchscout.orchestrator.output.tracking.runs import Found, OpenRun, TrialRuns
from batchscout.orchestrator.study.causes import Cause
from batchscout.orchestrator.study.trial import Trial, TrialState
from batchscout.trainers.files import StorageLost
from batchscout.trainers.notices import Notice, NoticeKind
from tests.support.processes import HANGS_AFTER_SECONDS
from tests.support.tracked import evaluate, found_in, opened, run_twice, trial

BLOCK = 32768


@pytest.fixture
def tracker(tmp_path: Path) -> Iterator[TrialRuns]:
    tracker = opened(Tracking(wandb="offline", project="tests"), tmp_path)
    yield tracker
    tracker.close()


def records(file: Path) -> Iterator[Any]:
    """The whole records of a .wandb file that may still be written: protobufs in a LevelDB log."""
    from wandb.proto import wandb_internal_pb2

    record_type: Any = vars(wandb_internal_pb2)["Record"]  # made at import, so no checker finds it
    content, at, whole = file.read_bytes(), 7, b""
    while at + 7 <= len(content):
        if BLOCK - at % BLOCK < 7:
            at += BLOCK - at % BLOCK
            continue
        _, length, kind = struct.unpack_from("<IHB", content, at)
        if at + 7 + length > len(content):
            return
        whole += content[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (1, 4):  # a whole record, or its last part
            yield record_type.FromString(whole)
            whole = b""


def finished_records(file: Path) -> list[Any]:
    """All records, the exit among them: finish() returns shortly before W&B's own process has written the file out."""
    deadline = time.monotonic() + HANGS_AFTER_SECONDS
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
def test_a_complete_trial_is_one_run_of_the_group(tracker: TrialRuns, tmp_path: Path) -> None:
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
def test_every_end_finishes_its_run(tracker: TrialRuns, tmp_path: Path, state: TrialState, code: int) -> None:
    tracker.started(trial())
    tracker.ended(replace(trial(), state=state, cause=Cause.RUNG, reason="place 2 of 2"))
    ((_, _, summary, exit_code),) = read_run(tmp_path, "train-m2")
    assert (summary["state"], summary["reason"], exit_code) == (state, "rung: place 2 of 2", code)


def test_a_trial_pruned_while_paused_is_finished_by_a_driver_that_never_started_it(
    tracker: TrialRuns, tmp_path: Path
) -> None:
    tracker.ended(replace(trial(), state=TrialState.PRUNED, cause=Cause.RUNG, reason="place 2 of 2"))
    assert [code for _, _, _, code in read_run(tmp_path, "train-m2")] == [0]


def test_two_runs_open_at_once_keep_their_rows_apart(tracker: TrialRuns, tmp_path: Path) -> None:
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


def test_a_promoted_trial_goes_on_in_its_open_run(tracker: TrialRuns, tmp_path: Path) -> None:
    tracker.started(trial())
    evaluate(tracker, 8, 3.0)
    tracker.started(trial(promoted=frozenset({8})))
    evaluate(tracker, 16, 2.0)
    tracker.ended(replace(trial(), state=TrialState.COMPLETE))
    ((_, rows, _, _),) = read_run(tmp_path, "train-m2")
    assert [row["samples_seen"] for row in rows] == [8, 16]


@pytest.mark.slow
def test_a_second_driver_goes_on_with_the_same_run_and_repeats_no_row(
    tracker: TrialRuns, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    tracker.started(trial())
    evaluate(tracker, 8, 3.0)
    tracker.close()
    time.sleep(1.1)  # W&B names its folders by the second
    again = opened(Tracking(wandb="offline"), tmp_path)
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
        (tmp_path / name).mkdir()
        tracker = opened(Tracking(wandb="offline"), tmp_path / name)
        tracker.started(trial())
        tracker.close()
        ids.add(read_run(tmp_path / name, "train-m2")[0][0].run_id)
    assert len(ids) == 2


@pytest.mark.slow
def test_what_the_study_has_found_is_a_run_of_its_own_with_tables_and_report(tmp_path: Path) -> None:
    opened(Tracking(wandb="offline", project="tests"), tmp_path).tell_study(found_in(tmp_path))
    ((run, rows, summary, code),) = read_run(tmp_path, "study")
    assert (run.project, run.run_group, run.display_name, run.job_type) == ("tests", "my-study", "study", "study")
    assert (summary["verdict"], summary["micro_batch_size"], code) == ("Train with micro-batch 4", 4, 0)
    media = next(tmp_path.glob("wandb/offline-run-*/files/media"))
    (row,) = rows
    table = json.loads((media.parent / row["trials/path"]).read_text())
    assert (table["columns"], table["data"]) == (["trial", "val_loss"], [["train-m2", 2.0], ["train-m4", None]])
    assert (media.parent / row["report/path"]).read_text() == (tmp_path / "report.html").read_text()


def test_the_commands_that_send_and_show_are_told(tmp_path: Path) -> None:
    run_dir = tmp_path / "my study"
    assert how_to_look(Tracking(wandb="online"), run_dir) == how_to_look(Tracking(), run_dir) == {}
    (run_dir / "wandb" / "offline-run-1").mkdir(parents=True)
    (run_dir / "mlflow.db").touch()
    told = how_to_look(Tracking(wandb="offline", tensorboard=True, mlflow=True, trackio=True), run_dir)
    assert told == {
        "send to W&B": f"wandb sync '{run_dir}'/wandb/offline-run-*",
        "look at curves": f"tensorboard --logdir '{run_dir}'/tensorboard",
        "look in MLflow": f"mlflow ui --backend-store-uri sqlite:///'{run_dir}/mlflow.db'",
        "look in Trackio": "trackio show --project batchscout",
    }


def test_run_ids_hold_only_what_wandb_takes_and_stay_different() -> None:
    assert run_id("s", "train-m2", "abc") == "s-train-m2-abc"
    odd = {run_id("s", name, "abc") for name in ("a/b", "a:b", "a-b", "x" * 300 + "1", "x" * 300 + "2")}
    assert len(odd) == 5
    assert all(len(name) <= 128 and not set("/:#?%\\") & set(name) for name in odd)


def test_off_does_nothing_and_imports_no_wandb(tmp_path: Path) -> None:
    assert open_trackers(Tracking(), "my-study", tmp_path, print) == []
    code = "import sys, batchscout.orchestrator.output.tracking; sys.exit('wandb' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("environment", "says"),
    [
        ({}, "there is no W&B API key"),
        ({"WANDB_API_KEY": "too-short"}, "refused this login.*API key must have"),
        (
            {"WANDB_API_KEY": "0" * 40, "WANDB_BASE_URL": "http://127.0.0.1:9", "WANDB_HTTP_TIMEOUT": "1"},
            "was not reached",
        ),
    ],
    ids=["no_key", "no_valid_key", "no_network"],
)
@pytest.mark.slow
def test_online_without_a_key_or_a_network_the_study_goes_on_offline_and_says_so_once(
    tmp_path: Path, environment: dict[str, str], says: str
) -> None:
    """In a process of its own: W&B keeps what it knows of a login for as long as one lives."""
    clean = {name: value for name, value in os.environ.items() if not name.startswith("WANDB_") and name != "NETRC"}
    code = f"""
from pathlib import Path
from batchscout.orchestrator.config.keys import Tracking
from batchscout.orchestrator.output.tracking import open_trackers
from tests.support.tracked import evaluate, found_in, trial
run_dir = Path({str(tmp_path)!r})
(tracker,) = open_trackers(Tracking(wandb="online", project="tests"), "my-study", run_dir, lambda notice: print(notice.text))
tracker.started(trial())
evaluate(tracker, 8, 3.0)
tracker.close()
tracker.tell_study(found_in(run_dir))
"""
    told = subprocess.run(
        [sys.executable, "-c", code],
        env={**clean, "HOME": str(tmp_path), **environment},
        capture_output=True,
        text=True,
        check=True,
    )
    sync = re.escape(f"`wandb login` (or set WANDB_API_KEY), and then wandb sync {tmp_path}/wandb/offline-run-*")
    assert re.fullmatch(f"tracking.wandb is online, but .*{says}.*the study goes on, .*{sync}\n", told.stdout)
    assert [row["val_loss"] for _, rows, _, _ in read_run(tmp_path, "train-m2") for row in rows] == [3.0]
    assert len(read_run(tmp_path, "study")) == 1


@pytest.mark.slow
@pytest.mark.parametrize("told_already", [False, True])
def test_no_trial_becomes_the_users_own_run_or_one_of_their_sweep(tmp_path: Path, told_already: bool) -> None:
    """told_already: whether W&B has read the environment before, as in a script that logs a run of its own."""
    code = f"""
import os, wandb
from pathlib import Path
from batchscout.orchestrator.output.tracking.of_wandb import Wandb
from tests.support.tracked import trial
{"wandb.setup()" if told_already else ""}
tracker = Wandb("offline", "tests", "my-study", Path({str(tmp_path)!r}))
runs = [tracker.open(trial(name))._run for name in ("train-m2", "train-m4")]
print([(run.name, run.id.startswith("my-study-" + run.name), run.project, run.sweep_id) for run in runs])
[run.finish() for run in runs]
print(os.environ["WANDB_SWEEP_ID"], os.environ["WANDB_RUN_ID"])
"""
    theirs = {"WANDB_RUN_ID": "theirs", "WANDB_SWEEP_ID": "sweep", "WANDB_RESUME": "must", "WANDB_LAUNCH": "true"}
    done = subprocess.run(
        [sys.executable, "-c", code], env={**os.environ, **theirs}, capture_output=True, text=True, check=True
    )
    assert done.stdout.splitlines() == [
        "[('train-m2', True, 'tests', None), ('train-m4', True, 'tests', None)]",
        "sweep theirs",
    ]


class FullTracker:
    """One whose place has run out of room, or whose server has gone."""

    name = "Full"

    def open(self, trial: Trial) -> OpenRun:
        raise ConnectionError("nobody\nlistens")

    def tell_study(self, found: Found) -> None:
        raise AssertionError("it was to be told no more")


def test_a_tracker_that_fails_is_named_once_and_told_no_more(tmp_path: Path) -> None:
    told: list[Notice] = []
    runs = TrialRuns(FullTracker(), tmp_path, told.append)
    runs.started(trial())
    evaluate(runs, 8, 3.0)
    runs.ended(trial())
    runs.close()
    runs.tell_study(found_in(tmp_path))
    (notice,) = told
    assert notice.kind is NoticeKind.TRACKER_LOST
    assert notice.text.startswith("Full has failed (ConnectionError: nobody listens): the study goes on without it")


@pytest.mark.parametrize(
    ("key", "module", "packages"),
    [("mlflow", "sqlalchemy", "mlflow-skinny sqlalchemy alembic"), ("trackio", "trackio", "trackio")],
)
def test_a_tracker_that_is_not_installed_is_refused_with_the_command_that_installs_it(
    monkeypatch: pytest.MonkeyPatch, key: str, module: str, packages: str
) -> None:
    found = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == module else found(name) or object())
    says = f"tracking.{key} is true, but .*{module} cannot be imported; pip install {packages}, or set it to false"
    with pytest.raises(ValueError, match=f"^{says}$"):
        require_libraries(Tracking.model_validate({key: True}))
    require_libraries(Tracking(tensorboard=True, wandb="offline"))


def test_a_trial_that_is_tried_again_has_a_run_of_its_own(tmp_path: Path) -> None:
    runs = opened(Tracking(tensorboard=True), tmp_path)
    for earlier in ((), ("failed (a bug)",)):
        runs.started(trial(earlier_tries=earlier))
        evaluate(runs, 8, 3.0)
        runs.ended(replace(trial(earlier_tries=earlier), state=TrialState.FAILED))
    for folder in ("train-m2", "train-m2-try2"):
        assert scalars(tmp_path / "tensorboard" / folder) == {"val_loss": [(8, 3.0)]}


def test_a_directory_in_place_of_the_studys_token_is_named(tmp_path: Path) -> None:
    (token := tmp_path / "tracking-token").mkdir()
    with pytest.raises(StorageLost, match=rf"^{re.escape(str(token))} could not be read: Is a directory$"):
        opened(Tracking(wandb="offline", project="tests"), tmp_path)


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


def test_tensorboard_has_the_verdict_and_the_tables_and_names_the_report(tmp_path: Path) -> None:
    opened(Tracking(tensorboard=True), tmp_path).tell_study(found_in(tmp_path))
    (file,) = (tmp_path / "tensorboard" / "study").iterdir()
    for text in (b"Train with micro-batch 4", b"| train-m2 | 2.0 |", b"report.html, in the run directory"):
        assert text in file.read_bytes()
