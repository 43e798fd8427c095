"""What is to run on a GPU runs here, line by line, with tiny sizes: only what CUDA itself must do is skipped, by its name."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.support.tiny import ROOT

GPU = ROOT / "benchmarks" / "gpu"

pytestmark = [pytest.mark.rehearsal, pytest.mark.slow, pytest.mark.timeout(1200)]


def lines_of(name: str, tmp_path: Path, *arguments: str) -> list[dict[str, Any]]:
    out = tmp_path / "lines.jsonl"
    command = [sys.executable, str(GPU / f"{name}.py"), "--device", "cpu", "--tiny", "--out", str(out), *arguments]
    environment = {**os.environ, "BATCHSCOUT_CACHE": str(tmp_path / "cache")}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    printed = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    assert printed == [json.loads(line) for line in out.read_text().splitlines()], "each line is kept as it is printed"
    assert printed[-1] == {"check": "end", "num_amiss": 0}
    return printed


def left_out(found: list[dict[str, Any]]) -> list[str]:
    """Return why each line that found nothing was left out."""
    return [line["left_out"] for line in found if "left_out" in line]


def test_every_check_runs_and_skips_by_name_what_cuda_alone_can_do(tmp_path: Path) -> None:
    found = lines_of("check", tmp_path)
    skipped = {line["check"] for line in found if "skipped" in line}
    assert skipped == {"no wait in a step", "compiling with 0 GiB left"}
    assert len(found) == 17
    assert not [line for line in found if "raised" in line]
    assert all(reason.startswith("its peers are not installed") for reason in left_out(found)), left_out(found)


def test_the_sides_of_the_speed_run_take_turns_and_name_their_best(tmp_path: Path) -> None:
    found = lines_of("speed", tmp_path)
    turns = [line["side"] for line in found if line["check"] == "turn"]
    assert turns[:5] == turns[5:10] == turns[10:]
    best = next(line for line in found if line["check"] == "best of each side")
    assert best["times_by_hand"].keys() == set(turns)
    assert best["times_by_hand"]["by hand"] == 1.0
    assert len(next(line for line in found if line["check"] == "longest kernels")["microseconds"]) == 15
    assert not left_out(found)


def test_the_studies_find_an_edge_and_survive_what_strikes_them(tmp_path: Path) -> None:
    lines = lines_of("study", tmp_path, "--limit-seconds", "1200")
    assert not left_out(lines)
    found = {line["check"]: line for line in lines}
    assert found["the frontier to the edge"]["num_out_of_memory"].keys() == {"none", "full"}
    assert found["the frontier to the edge"]["predicted"].keys() == {"none, float32", "full, float32"}
    assert found["a driver killed while it trains"]["struck"]
    assert [state for state, _ in found["targets out of range"]["trials"].values()] == [
        "complete",
        "failed",
        "complete",
    ]


def test_what_would_not_end_in_time_is_left_out_and_said(tmp_path: Path) -> None:
    for name in ("check", "speed", "study"):
        found = lines_of(
            name, tmp_path / name if (tmp_path / name).mkdir() is None else tmp_path, "--limit-seconds", "0.5"
        )
        assert left_out(found)
        assert "are left, and it takes about" in left_out(found)[0]
