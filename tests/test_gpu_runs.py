"""What is to run on a GPU runs here, line by line, with tiny sizes: only what CUDA itself must do is skipped, by its name."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tarfile
from pathlib import Path
from typing import Any

import pytest

from tests.support.tiny import ROOT

GPU = ROOT / "benchmarks" / "gpu"
FIRST_OF_THE_SECOND_RUN = "bitwise resume under deterministic algorithms"
LAST_OF_THE_FIRST_RUN = "the frontier to the edge"

pytestmark = [pytest.mark.rehearsal, pytest.mark.slow, pytest.mark.timeout(1200)]


def lines_of(tmp_path: Path, *arguments: str) -> list[dict[str, Any]]:
    out = tmp_path / "lines.jsonl"
    command = [sys.executable, str(GPU / "all.py"), "--device", "cpu", "--tiny", "--out", str(out), *arguments]
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    printed = [json.loads(line) for line in done.stdout.splitlines()]
    assert printed == [json.loads(line) for line in out.read_text().splitlines()], "each line is kept as it is printed"
    assert printed[-1] == {"line": "end", "num_amiss": 0}
    assert not [line for line in printed if "raised" in line or "failed" in line.get("states", ())]
    return printed


def names_in_order(printed: list[dict[str, Any]], expected: list[str]) -> list[str]:
    """The lines in the order in which they came, without the trials and turns that belong to one."""
    return [line["line"] for line in printed if line["line"] in expected]


@pytest.fixture
def in_order(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    monkeypatch.syspath_prepend(str(GPU))
    import all

    return [line.name for line in all.in_order()]


def test_the_first_run_is_whole_and_in_order(tmp_path: Path, in_order: list[str]) -> None:
    """By the deadline of a second run's first line: a run's limit leaves out what follows, by its name."""
    printed = lines_of(tmp_path, "--limit-seconds", "1200")
    found = {line["line"]: line for line in printed}
    assert names_in_order(printed, in_order) == in_order
    assert not [line for line in printed if "left_out" in line]
    assert {name for name, line in found.items() if "skipped" in line} == {
        "no wait in a step",
        *(name for name in in_order if name.startswith("compiling with")),
    }
    study = found["a small study, whole"]
    assert study["verdict"].startswith("Train with micro-batch")
    assert study["states"].keys() == {"complete"}
    turns = [line["side"] for line in printed if line["line"] == "turn"]
    assert turns[:5] == turns[5:10] == turns[10:15]
    assert found["sides of a step, m=32"]["times_by_hand"].keys() == set(turns[:5])
    edge = found[LAST_OF_THE_FIRST_RUN]
    assert edge["num_out_of_memory"].keys() == {"none", "full"}
    assert edge["predicted"].keys() == {"none, float32", "full, float32"}
    assert found["a driver killed while it trains"]["struck"]
    states = [state for state, _ in found["targets out of range"]["trials"].values()]
    assert states == ["complete", "failed", "complete"]
    with tarfile.open(tmp_path / "lines.jsonl.studies.tar.gz") as packed:
        journals = [name for name in packed.getnames() if name.endswith("journal.jsonl")]
    assert len(journals) == 6


def test_a_second_run_begins_behind_a_line_and_leaves_out_by_name_what_does_not_fit(
    tmp_path: Path, in_order: list[str]
) -> None:
    printed = lines_of(tmp_path, "--limit-seconds", "0.5", "--after", LAST_OF_THE_FIRST_RUN)
    second = in_order[in_order.index(FIRST_OF_THE_SECOND_RUN) :]
    assert [line["line"] for line in printed] == [*second, "end"]
    assert all("are left, and it takes about" in line["left_out"] for line in printed[:-1])
