"""Whole studies whose run directory is in an object store: the driver is killed, its machine's disk lost, and the same command goes
on; the verbs read from there."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from batchscout.orchestrator.study.journal import replay
from batchscout.orchestrator.study.state import Study
from batchscout.orchestrator.study.storage.place import ObjectStore
from batchscout.orchestrator.study.storage.stored_study import stored_journal
from batchscout.orchestrator.study.trial import TrialState
from batchscout.trainers.loop import train
from batchscout.trainers.report import Report
from batchscout.trainers.step_log import read_steps
from tests.support.blind_node import blind_node, why_there_is_no_blind_node
from tests.support.nodes import cluster_of
from tests.support.object_store import BUCKET, Server, object_store, reached_at
from tests.support.outcome import GOLDEN
from tests.support.processes import of_a_driver_on, until
from tests.support.studies import TINY, grid

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(600)]

STUDY: dict[str, Any] = TINY | {"sample_budget": 512, "evaluations": 8, "placement": {"lanes": 1, "cpus_per_rank": 1}}


@pytest.fixture
def name() -> str:
    """Of the run directory in the store. What this process has asked there it asks at the same address again, where the server of another
    test was: a test that asks has a name of its own."""
    return "one"


@pytest.fixture
def server() -> Iterator[Server]:
    with object_store() as server:
        yield server


@pytest.fixture
def store(server: Server, name: str, cache: Path, monkeypatch: pytest.MonkeyPatch) -> ObjectStore:
    for variable, value in reached_at(server.address).items():
        monkeypatch.setenv(variable, value)
    return ObjectStore(f"s3://{BUCKET}/runs/{name}")


def batchscout(*words: object, **environment: str) -> subprocess.Popen[str]:
    command, own = [sys.executable, "-m", "batchscout", *map(str, words)], os.environ | environment
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=own)


def said(*words: object, code: int = 0, **environment: str) -> str:
    process = batchscout(*words, **environment)
    output, _ = process.communicate(timeout=300)
    assert process.returncode == code, output
    return output


def events(store: ObjectStore, kind: str) -> list[dict[str, Any]]:
    lines = [json.loads(line) for line in stored_journal(store).splitlines()]
    return [line for line in lines if line["kind"] == kind]


def evaluations_told(folder: Path) -> int:
    """By the copy beside the driver: whoever asks the store again and again takes the processor from the study."""
    copies = (folder / "cache" / "runs").rglob("journal.jsonl")
    return sum(copy.read_text().count('"kind":"evaluated"') for copy in copies)


def losses(store: ObjectStore) -> list[tuple[str, int, float]]:
    """Those of every evaluation, each told once."""
    told = [
        (one["id"], one["metrics"]["samples_seen"], one["metrics"]["val_loss"]) for one in events(store, "evaluated")
    ]
    assert len({one[:2] for one in told}) == len(told), "no evaluation is made twice"
    return sorted(told)


def in_this_process(study: Study, folder: Path) -> list[tuple[str, int, float]]:
    """The losses of the study's trials as they are where nothing goes wrong."""
    found = []
    for name, trial in study.trials.items():
        reports: list[Report] = []
        train(trial.config, reports.append, folder / name)
        told = [report.metrics for report in reports if report.kind in ("milestone", "end")]
        found += [(name, metrics["samples_seen"], metrics["val_loss"]) for metrics in told]
    return sorted(found)


def replayed(store: ObjectStore, name: str, folder: Path) -> Study:
    (folder / "journal.jsonl").write_bytes(stored_journal(store))
    return replay(folder / "journal.jsonl", name)


def test_a_study_goes_on_from_the_store_after_its_driver_and_its_disk_are_gone(
    store: ObjectStore, tmp_path: Path
) -> None:
    file = tmp_path / "study.yaml"
    file.write_text(yaml.safe_dump(STUDY | {"stages": grid(learning_rate=[1e-3, 2e-3])}))
    driver = batchscout("run", file, "--dir", store)
    until(lambda: evaluations_told(tmp_path) >= 3 or driver.poll() is not None, "evaluations", 200)
    assert driver.poll() is None, driver.communicate()[0]
    os.kill(driver.pid, signal.SIGKILL)
    driver.communicate()
    acknowledged = stored_journal(store)
    shutil.rmtree(tmp_path / "cache" / "runs")

    again = said("run", file, "--dir", store)
    assert "report:         s3://bucket/runs/one/report.html" in again
    assert str(tmp_path / "cache") not in again, "a user knows nothing of the copy"
    assert stored_journal(store).startswith(acknowledged), "nothing that was acknowledged is lost"
    assert losses(store) == in_this_process(replayed(store, "tiny", tmp_path), tmp_path / "undisturbed")
    trained = sum(one["seconds"] > 0 for one in events(store, "ended"))
    assert trained == 2

    shutil.rmtree(tmp_path / "cache" / "runs")
    assert "grid: complete" in said("status", store)
    assert {one["state"] for one in json.loads(said("status", store, "--json"))["trials"]} == {"complete"}
    assert said("report", store).strip() == "s3://bucket/runs/one/report.html"
    page = store.read("report.html")
    assert page is not None
    assert page.startswith(b"<!DOCTYPE html>")
    assert "micro-batch" in said("explain", store, events(store, "ended")[0]["id"])
    assert "per_device_train_batch_size" in said("export", store, "--to", "hf")
    assert said("compare", store, GOLDEN / "quickstart").startswith("one and quickstart\n")
    kept = [name for name in store.stored("trials") if name.endswith(".pt")]
    assert {name.split("/")[1] for name in kept} == {one["id"] for one in events(store, "ended")}, "as in a folder"
    assert "learning_rate" in said("run", file, "--dir", store, "--set", "stages.0.learning_rate=[3e-3]", code=2)


@pytest.mark.parametrize("name", ["hanging"])
def test_ctrl_c_ends_a_study_whose_store_hangs_and_the_same_command_goes_on(
    server: Server, store: ObjectStore, tmp_path: Path
) -> None:
    """What a store does that keeps each connection and says nothing: the library waits for minutes."""
    file = tmp_path / "study.yaml"
    file.write_text(yaml.safe_dump(STUDY | {"name": "hanging", "stages": grid(learning_rate=[1e-3, 2e-3])}))
    driver = batchscout("run", file, "--dir", store, "--seconds-to-save", 1)
    until(lambda: evaluations_told(tmp_path) >= 3 or driver.poll() is not None, "evaluations", 200)
    with server.saying_nothing():
        driver.send_signal(signal.SIGINT)
        told, _ = driver.communicate(timeout=200)
    assert driver.returncode == 130, told
    assert "nothing that was measured or saved is lost" in told
    assert f"{store} has not answered for 5 s; check the network" in " ".join(told.split())
    said("run", file, "--dir", store)
    assert losses(store) == in_this_process(replayed(store, "tiny", tmp_path), tmp_path / "undisturbed")


def test_what_the_store_lacks_is_bad_input_before_anything_starts(store: ObjectStore, tmp_path: Path) -> None:
    file = tmp_path / "study.yaml"
    file.write_text(yaml.safe_dump(STUDY | {"stages": grid(learning_rate=[1e-3])}))
    told = said("run", file, "--dir", "s3://nowhere/runs/one", code=2)
    assert (
        told
        == "batchscout: there is no bucket 'nowhere' for s3://nowhere/runs/one; make it, or check the name and its region\n"
    )
    told = said("status", store, code=2)
    assert re.search(r"s3://bucket/runs/one holds no study \(no study\.yaml in it\)", told)
    assert "batchscout trial takes a folder, and s3://bucket/x is in an object" in said(
        "trial", file, "--dir", "s3://bucket/x", code=2
    )
    assert "names no run directory; write s3://BUCKET/NAME" in said("plan", file, "--dir", "s3://bucket", code=2)


# On a cluster


def step_losses(path: Path) -> dict[int, float]:
    return {step.samples_seen: step.loss for step in read_steps(path)}


SECONDS_TO_GET_THERE = 400  # it takes a tenth of it where nothing else runs


@pytest.mark.timeout(1000)
@pytest.mark.parametrize(("name", "num_ranks"), [("moves", 1), ("moves-two", 2)])
def test_a_study_on_a_cluster_goes_on_on_other_nodes_when_those_are_lost_with_their_disks(
    store: ObjectStore, name: str, num_ranks: int, tmp_path: Path
) -> None:
    """A node for each rank. None sees the cache of the driver or of another: what they have of the study comes from the store."""
    if why := why_there_is_no_blind_node():
        pytest.skip(why)
    cache = tmp_path / "cache"
    cache.mkdir()
    file = tmp_path / "study.yaml"
    model = {"target": "tests.support.studies:Sleeps", "kwargs": {"seconds": 0.02}}
    stages = grid(learning_rate=[1e-3])
    file.write_text(yaml.safe_dump(STUDY | {"name": name, "model": model, "stages": stages, "world_size": num_ranks}))

    def nodes(address: str) -> contextlib.ExitStack:
        with contextlib.ExitStack() as started:
            for _ in range(num_ranks):
                started.enter_context(blind_node(address, cache))
            return started.pop_all()

    with cluster_of([]) as address:
        with nodes(address):
            driver = batchscout("run", file, "--dir", store, "--address", address, **of_a_driver_on(address))
            try:
                until(
                    lambda: evaluations_told(tmp_path) >= 3 or driver.poll() is not None,
                    "evaluations",
                    SECONDS_TO_GET_THERE,
                )
            except AssertionError:
                driver.kill()
                pytest.fail(driver.communicate()[0])
        with nodes(address):
            output, _ = driver.communicate(timeout=SECONDS_TO_GET_THERE)
    assert driver.returncode == 0, output
    study = replayed(store, name, tmp_path)
    (trial,) = study.trials.values()
    assert trial.state is TrialState.COMPLETE
    assert [hold.lost for hold in trial.holds] == [True, False], output
    told = [one["metrics"]["samples_seen"] for one in events(store, "evaluated")]
    assert len(told) == len(set(told)), "it went on from its last evaluation, which is journaled once"
    told_of = [(point["samples_seen"], point["val_loss"]) for point in trial.history]
    alone = trial.config.model_copy(
        update={"world_size": 1, "micro_batch_size": num_ranks * trial.config.micro_batch_size}
    )
    reports: list[Report] = []
    train(alone, reports.append, tmp_path / "undisturbed")
    undisturbed = [report.metrics for report in reports if report.kind in ("milestone", "end")]
    rel = 1e-6 if num_ranks > 1 else 0.0  # ranks add up in another order
    expected = {one["samples_seen"]: one["val_loss"] for one in undisturbed}
    assert dict(told_of) == pytest.approx(expected, rel=rel, abs=0.0), "it went on as it was"
    (tmp_path / "steps.jsonl").write_bytes(store.read(f"trials/{trial.id}/steps.jsonl") or b"")
    assert step_losses(tmp_path / "steps.jsonl") == pytest.approx(
        step_losses(tmp_path / "undisturbed/steps.jsonl"), rel=rel, abs=0.0
    )
    assert not [path for path in cache.rglob("*.pt") if "trials" in path.parts], "the driver needs no checkpoint"
    assert [name for name in store.stored("trials") if name.endswith(".pt")], "what a full run has saved is kept"


@pytest.mark.parametrize("name", ["barred"])
def test_a_node_that_may_not_read_there_is_named_before_anything_starts(store: ObjectStore, tmp_path: Path) -> None:
    file = tmp_path / "study.yaml"
    file.write_text(yaml.safe_dump(STUDY | {"name": "barred", "stages": grid(learning_rate=[1e-3])}))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")  # nobody is there
        with cluster_of([{"num_cpus": 1}]) as address:
            patch.undo()
            told = said("run", file, "--dir", store, "--address", address, code=2, **of_a_driver_on(address))
    assert "1 of 1 node that trials may run on does not reach s3://bucket/runs/barred (" in " ".join(told.split())
    assert "give every node the credentials and the network that the driver has" in " ".join(told.split())
    assert not events(store, "proposed")
