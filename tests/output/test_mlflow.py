"""MLflow, offline and for real: what was logged is read back from the run directory's database."""

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from batchscout.orchestrator.config.keys import Tracking
from batchscout.orchestrator.output.tracking import open_trackers
from batchscout.orchestrator.study.causes import Cause
from batchscout.orchestrator.study.trial import TrialState
from batchscout.trainers.notices import Notice
from tests.support.tracked import evaluate, found_in, opened, run_twice, trial

pytest.importorskip("mlflow")
pytest.importorskip("alembic")

from mlflow.entities import Run  # pyright: ignore[reportMissingImports]  (an extra)
from mlflow.tracking import MlflowClient  # pyright: ignore[reportMissingImports]  (an extra)

# MLflow uses what SQLAlchemy and its own version have deprecated.
pytestmark = [
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
]
TRACKING = Tracking(mlflow=True, project="tests")


@pytest.fixture(scope="module")
def empty_store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A database whose tables have been made, for which MLflow takes seconds."""
    run_dir = tmp_path_factory.mktemp("empty")
    client_of(run_dir).search_experiments()
    return run_dir / "mlflow.db"


@pytest.fixture
def run_dir(empty_store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    shutil.copy(empty_store, tmp_path / "mlflow.db")
    return tmp_path


def client_of(run_dir: Path) -> MlflowClient:
    return MlflowClient(f"sqlite:///{run_dir / 'mlflow.db'}")


def runs_in(run_dir: Path) -> dict[str, Run]:
    client = client_of(run_dir)
    experiment = client.get_experiment_by_name("tests")
    assert experiment is not None
    found = client.search_runs([experiment.experiment_id])
    named = {str(run.info.run_name): run for run in found if "my-study" in run.data.tags["batchscout.run_id"]}
    assert len(named) == len(found)
    return named


def curve(run_dir: Path, name: str) -> list[tuple[int, float]]:
    run = runs_in(run_dir)["train-m2"]
    return [(point.step, point.value) for point in client_of(run_dir).get_metric_history(run.info.run_id, name)]


@pytest.mark.slow
def test_a_run_that_goes_on_has_every_step_once_and_the_evaluations(run_dir: Path) -> None:
    run_twice(TRACKING, run_dir)
    assert curve(run_dir, "step_loss") == [(2 * n, pytest.approx(4.0 / n)) for n in range(1, 9)]
    assert curve(run_dir, "val_loss") == [(8, 3.0), (16, 2.0)]


@pytest.mark.slow
def test_a_trial_is_a_run_below_that_of_its_study(run_dir: Path) -> None:
    tracker = opened(TRACKING, run_dir)
    tracker.started(trial())
    tracker.ended(
        replace(trial(metrics={"peak_memory_bytes": 5.0}), state=TrialState.PRUNED, cause=Cause.RUNG, reason="2 of 2")
    )
    runs = runs_in(run_dir)
    run, study = runs["train-m2"], runs["study"]
    assert run.data.params["micro_batch_size"] == "2"
    assert run.data.metrics["peak_memory_bytes"] == 5.0
    tags = {name: run.data.tags[name] for name in ("mlflow.parentRunId", "stage", "state", "reason")}
    assert tags == {
        "mlflow.parentRunId": study.info.run_id, "stage": "train", "state": "pruned", "reason": "rung: 2 of 2"
    }  # fmt: skip
    assert (run.info.status, study.info.status) == ("FINISHED", "RUNNING")
    config = client_of(run_dir).download_artifacts(run.info.run_id, "config.json")
    assert json.loads(Path(config).read_text())["model"]["target"] == "gpt"


@pytest.mark.slow
def test_the_studys_run_has_verdict_numbers_tables_and_report(run_dir: Path) -> None:
    found = found_in(run_dir)
    opened(TRACKING, run_dir).tell_study(found)
    study, client = runs_in(run_dir)["study"], client_of(run_dir)
    assert study.data.tags["mlflow.note.content"] == study.data.tags["verdict"] == "Train with micro-batch 4"
    assert (study.data.metrics["micro_batch_size"], study.info.status) == (4.0, "FINISHED")
    table = Path(client.download_artifacts(study.info.run_id, "trials.csv")).read_text()
    assert table.splitlines() == ["trial,val_loss", "train-m2,2.0", "train-m4,"]
    assert found.report is not None
    copy = client.download_artifacts(study.info.run_id, "report.html")
    assert Path(copy).read_text() == found.report.read_text()


@pytest.mark.slow
def test_without_its_server_the_study_goes_on_and_says_so_once(run_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://127.0.0.1:9")
    told: list[Notice] = []
    (tracker,) = open_trackers(TRACKING, "my-study", run_dir, told.append)
    tracker.started(trial())
    evaluate(tracker, 8, 3.0)
    tracker.close()
    (notice,) = told
    assert notice.text.startswith("MLFLOW_TRACKING_URI is set, but http://127.0.0.1:9 does not answer: ")
    assert f"the study goes on, and its runs are kept in {run_dir / 'mlflow.db'}: mlflow ui" in notice.text
    assert curve(run_dir, "val_loss") == [(8, 3.0)]
