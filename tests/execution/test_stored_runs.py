"""Whole studies whose run directory is in an object store: the driver is killed, its machine's disk lost, and the same command goes
on; the verbs read from there."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from orchestrator.study.storage.place import ObjectStore
from orchestrator.study.storage.stored_study import stored_journal
from tests.support.object_store import BUCKET, object_store, reached_at
from tests.support.studies import TINY, grid

pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.timeout(600)]

STUDY: dict[str, Any] = TINY | {"sample_budget": 512, "evaluations": 8, "placement": {"lanes": 1, "cpus_per_rank": 1}}


@pytest.fixture
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ObjectStore]:
    with object_store() as address:
        for name, value in reached_at(address).items():
            monkeypatch.setenv(name, value)
        monkeypatch.setenv("BATCHSCOUT_CACHE", str(tmp_path / "cache"))
        yield ObjectStore(f"s3://{BUCKET}/runs/one")


def batchscout(*words: object) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "orchestrator", *map(str, words)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def said(*words: object, code: int = 0) -> str:
    process = batchscout(*words)
    output, _ = process.communicate(timeout=300)
    assert process.returncode == code, output
    return output


def events(store: ObjectStore, kind: str) -> list[dict[str, Any]]:
    lines = [json.loads(line) for line in stored_journal(store).splitlines()]
    return [line for line in lines if line["kind"] == kind]


def losses(store: ObjectStore) -> list[tuple[str, int, float]]:
    """Those of every evaluation, each told once."""
    told = [
        (one["id"], one["metrics"]["samples_seen"], one["metrics"]["val_loss"]) for one in events(store, "evaluated")
    ]
    assert len({one[:2] for one in told}) == len(told), "no evaluation is made twice"
    return sorted(told)


def test_a_study_goes_on_from_the_store_after_its_driver_and_its_disk_are_gone(
    store: ObjectStore, tmp_path: Path
) -> None:
    file = tmp_path / "study.yaml"
    file.write_text(yaml.safe_dump(STUDY | {"stages": grid(learning_rate=[1e-3, 2e-3])}))
    undisturbed = ObjectStore(f"s3://{BUCKET}/runs/undisturbed")
    said("run", file, "--dir", undisturbed)

    driver = batchscout("run", file, "--dir", store)
    deadline = time.monotonic() + 200
    while len(events(store, "evaluated")) < 3:
        assert driver.poll() is None, driver.communicate()[0]
        assert time.monotonic() < deadline
        time.sleep(0.05)
    os.kill(driver.pid, signal.SIGKILL)
    driver.communicate()
    acknowledged = stored_journal(store)
    shutil.rmtree(tmp_path / "cache" / "runs")

    again = said("run", file, "--dir", store)
    assert "report:         s3://bucket/runs/one/report.html" in again
    assert str(tmp_path / "cache") not in again, "a user knows nothing of the copy"
    assert stored_journal(store).startswith(acknowledged), "nothing that was acknowledged is lost"
    assert losses(store) == losses(undisturbed)
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
    assert said("compare", store, undisturbed)
    kept = [name for name in store.stored("trials") if name.endswith(".pt")]
    assert {name.split("/")[1] for name in kept} == {one["id"] for one in events(store, "ended")}, "as in a folder"
    assert "learning_rate" in said("run", file, "--dir", store, "--set", "stages.0.learning_rate=[3e-3]", code=2)


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
