"""Trackio, offline and for real: what was logged is read back from its own store."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from batchscout.orchestrator.config.keys import Tracking
from batchscout.orchestrator.study.causes import Cause
from batchscout.orchestrator.study.trial import TrialState
from tests.support.tracked import evaluate, found_in, opened, run_twice, trial

TRACKING = Tracking(trackio=True, project="tests")


@pytest.fixture(scope="module", autouse=True)
def store(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Its directory, which it reads from the environment when it is imported, and never again."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRACKIO_DIR", str(folder := tmp_path_factory.mktemp("trackio")))
        pytest.importorskip("trackio")
        yield folder


def logs(run_name: str, run_dir: Path) -> list[dict[str, Any]]:
    """The rows of the run of a study in this directory, without the times."""
    from trackio.sqlite_storage import SQLiteStorage  # pyright: ignore[reportMissingImports]  (an extra)

    token = (run_dir / "tracking-token").read_text()
    (record,) = [
        run for run in SQLiteStorage.get_run_records("tests") if str(run["id"]).endswith(f"{run_name}-{token}")
    ]
    assert record["name"] == f"my-study/{run_name}"
    return [
        {key: value for key, value in row.items() if key != "timestamp"}
        for row in SQLiteStorage.get_logs("tests", str(record["name"]), run_id=record["id"])
    ]


def test_a_run_that_goes_on_has_every_step_once_and_the_evaluations(tmp_path: Path) -> None:
    run_twice(TRACKING, tmp_path)
    rows = logs("train-m2", tmp_path)
    steps = [(row["step"], row["step_loss"]) for row in rows if "step_loss" in row]
    assert steps == [(2 * n, pytest.approx(4.0 / n)) for n in range(1, 9)]
    assert [(row["step"], row["val_loss"]) for row in rows if "val_loss" in row] == [(8, 3.0), (16, 2.0)]
    assert rows[-1]["state"] == "complete"


def test_two_runs_open_at_once_keep_their_rows_apart_and_print_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tracker = opened(TRACKING, tmp_path)
    for name in ("a", "b"):
        tracker.started(trial(name))
    for name, loss in (("a", 1.0), ("b", 2.0)):
        evaluate(tracker, 8, loss, name)
    for name in ("a", "b"):
        tracker.ended(replace(trial(name), state=TrialState.COMPLETE))
    assert [row.get("val_loss") for row in logs("a", tmp_path)] == [1.0, None]
    assert [row.get("val_loss") for row in logs("b", tmp_path)] == [2.0, None]
    assert capsys.readouterr() == ("", "")


def test_a_trial_that_was_never_evaluated_has_its_figures_and_how_it_ended(tmp_path: Path) -> None:
    tracker = opened(TRACKING, tmp_path)
    tracker.ended(
        replace(trial(metrics={"peak_memory_bytes": 5.0}), state=TrialState.PRUNED, cause=Cause.RUNG, reason="2 of 2")
    )
    assert logs("train-m2", tmp_path) == [
        {"step": 0, "peak_memory_bytes": 5.0, "state": "pruned", "reason": "rung: 2 of 2"}
    ]


def test_the_studys_run_has_verdict_numbers_tables_and_report(tmp_path: Path, store: Path) -> None:
    found = found_in(tmp_path)
    opened(TRACKING, tmp_path).tell_study(found)
    (row,) = logs("study", tmp_path)
    assert (row["verdict"], row["micro_batch_size"]) == ("Train with micro-batch 4", 4)
    rows = [{"trial": "train-m2", "val_loss": 2.0}, {"trial": "train-m4", "val_loss": None}]
    assert row["trials"]["_value"] == rows
    assert found.report is not None
    (copy,) = store.rglob("*.html")
    assert copy.read_text() == found.report.read_text()
