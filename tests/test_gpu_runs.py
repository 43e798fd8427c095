"""What is to run on a GPU runs here, line by line, with tiny sizes: only what CUDA itself must do is skipped, by its name."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tarfile
from itertools import islice
from pathlib import Path
from typing import Any

import pytest

from tests.support.tiny import ROOT

GPU = ROOT / "benchmarks" / "gpu"
LAST_OF_THE_FIRST_RUN = "the frontier to the edge"
AS_ANOTHER = {
    "resume": "bitwise resume under deterministic algorithms",
    "compiling with 0.2 GiB left": "compiling with 2 GiB left",
    "compiling with 1 GiB left": "compiling with 2 GiB left",
    "sides of a step, m=8": "sides of a step, m=32",
    "sides of a step, m=16": "sides of a step, m=32",
    "sides of a step, m=64": "sides of a step, m=32",
    "the compiled frontier to the edge": "the frontier to the edge",
}
"""Lines that do on a CPU what another one does, which is rehearsed in their place."""

pytestmark = [pytest.mark.rehearsal, pytest.mark.timeout(2600)]


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


@pytest.fixture
def in_order(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    monkeypatch.syspath_prepend(str(GPU))
    import all

    return all.in_order()


@pytest.fixture
def groups(in_order: list[Any]) -> list[set[str]]:
    """The names of the lines in their order, those together that run side by side and come in any."""
    import all

    return [{line.name for line in group} for group in all.side_by_side(in_order)]


def test_a_line_that_is_not_rehearsed_has_the_function_of_one_that_is(in_order: list[Any]) -> None:
    functions = {line.name: getattr(line.run, "func", line.run) for line in in_order}
    assert all(functions[name] is functions[other] for name, other in AS_ANOTHER.items())
    assert not AS_ANOTHER.keys() & set(AS_ANOTHER.values())


@pytest.mark.usefixtures("in_order")
def test_every_side_of_a_step_is_a_configuration() -> None:
    import speed

    for name, (compiled, cross_entropy, statistics) in speed.OURS.items():
        config = speed.config(name, tiny=True, size=2)
        found = config.compile, config.model.kwargs["cross_entropy"], config.statistics
        assert found == (compiled, cross_entropy, statistics)


def test_every_line_runs_in_its_order(tmp_path: Path, groups: list[set[str]]) -> None:
    printed = lines_of(tmp_path, "--limit-seconds", "2400", "--without", *AS_ANOTHER)
    groups = [group - AS_ANOTHER.keys() for group in groups if group - AS_ANOTHER.keys()]
    found = {line["line"]: line for line in printed}
    names = set.union(*groups)
    came = iter(line["line"] for line in printed if line["line"] in names)
    assert [set(islice(came, len(group))) for group in groups] == groups
    assert not [line for line in printed if "left_out" in line]
    assert {name for name, line in found.items() if "skipped" in line} == {
        "no wait in a step",
        *(name for name in names if name.startswith("compiling with")),
    }
    study = found["a small study, whole"]
    assert study["verdict"].startswith("Train with micro-batch")
    assert "complete" in study["states"]
    turns = [line["side"] for line in printed if line["line"] == "turn"]
    assert turns[:5] == turns[5:]
    assert found["sides of a step, m=32"]["times_by_hand"].keys() == set(turns[:5])
    edge = found[LAST_OF_THE_FIRST_RUN]
    assert edge["num_out_of_memory"].keys() == {"none", "full"}
    assert edge["predicted"].keys() == {"none, float32", "full, float32"}
    assert found["a driver killed while it trains"]["struck"]
    states = [state for state, _ in found["targets out of range"]["trials"].values()]
    assert states == ["complete", "failed", "complete"]
    with tarfile.open(tmp_path / "lines.jsonl.studies.tar.gz") as packed:
        journals = [name for name in packed.getnames() if name.endswith("journal.jsonl")]
    assert len(journals) == 4


def test_a_second_run_begins_behind_a_line_and_leaves_out_by_name_what_does_not_fit(
    tmp_path: Path, groups: list[set[str]]
) -> None:
    printed = lines_of(tmp_path, "--limit-seconds", "0.5", "--after", LAST_OF_THE_FIRST_RUN)
    second = groups[groups.index({LAST_OF_THE_FIRST_RUN}) + 1 :]
    assert {line["line"] for line in printed} == {"versions", "end"}.union(*second)
    assert all("are left, and it takes about" in line["left_out"] for line in printed[:-1])
