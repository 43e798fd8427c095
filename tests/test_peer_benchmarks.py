"""The benchmarks that hold this project against others still run, and end with the figures that are quoted of them. They are asked for
by `pytest -m rehearsal`, and no part of `.ci/run`."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.tiny import ROOT

pytestmark = [pytest.mark.rehearsal, pytest.mark.timeout(900)]

PEERS = "accelerate", "lightning"


@pytest.mark.parametrize(
    ("name", "needs", "figures"),
    [
        ("frontier_search", PEERS, {"ours", "doubling and bisecting", "accelerate", "lightning power", "cases"}),
        ("step_throughput", PEERS, {"ratio", "ratio_whole", "ratio_all_statistics", "tokens_per_second"}),
        (
            "input_pipeline",
            ("lightning",),
            {"ours, 2 workers, throttled", "by hand, 0 workers", "lightning, 2 workers"},
        ),
        ("trial_overhead", (), {"ratio_1_rank", "ours_seconds", "naive_seconds", "recompile_seconds"}),
        ("memory_prediction", (), {"worst_eager_error", "worst_compiled_error", "worst_error_of_two_ranks"}),
    ],
)
def test_a_benchmark_against_peers_runs_to_its_last_line(
    name: str, needs: tuple[str, ...], figures: set[str], tmp_path: Path
) -> None:
    missing = [package for package in needs if importlib.util.find_spec(package) is None]
    if missing:
        pytest.skip(f"it needs {' and '.join(missing)}: pip install -e '.[benchmarks]'")
    environment = {**os.environ, "BATCHSCOUT_CACHE": str(tmp_path / "cache"), "PYTHONPATH": str(ROOT)}
    command = [sys.executable, str(ROOT / "benchmarks" / f"{name}.py"), "--quick"]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    assert figures <= json.loads(done.stdout.splitlines()[-1]).keys()
