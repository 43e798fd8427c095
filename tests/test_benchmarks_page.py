"""docs/benchmarks.md is what the recorded results say, and a result is what a benchmark printed."""

from __future__ import annotations

import json
import platform
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from record import names

from tests.support.processes import HANGS_AFTER_SECONDS

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results"
REMEDY = "run: python benchmarks/write_page.py benchmarks/results"


def tool(name: str, *arguments: str | Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(ROOT / "benchmarks" / f"{name}.py"), *map(str, arguments)]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=HANGS_AFTER_SECONDS)


def page_of(tmp_path: Path, **changes: Any) -> str:
    """The page of one result."""
    result = {"title": "T.", "command": "c", "date": "d", "machine": "m", "versions": {"python": "3.11.7"}} | changes
    (tmp_path / "results").mkdir()
    (tmp_path / "results" / "one.json").write_text(json.dumps(result))
    written = tool("write_page", tmp_path / "results", tmp_path / "page.md")
    assert written.returncode == 0, written.stderr
    return (tmp_path / "page.md").read_text()


def test_the_page_is_what_the_results_say(tmp_path: Path) -> None:
    written = tool("write_page", RESULTS, tmp_path / "page.md")
    assert written.returncode == 0, written.stderr
    assert (ROOT / "docs" / "benchmarks.md").read_text() == (tmp_path / "page.md").read_text(), REMEDY


def test_every_benchmark_has_a_result() -> None:
    benchmarks = set(names(ROOT / "benchmarks"))
    assert benchmarks <= {path.stem for path in RESULTS.glob("*.json")}, "record it: python benchmarks/record.py NAME"


@pytest.mark.parametrize(("name", "value", "written"), [
    ("peak_memory_bytes", 3 * 2**20, "3.00 MiB"),
    ("milliseconds_per_message", 0.536, "0.536 ms"),
    ("messages", 100_000, "100,000"),
    ("step_seconds", 0.37251, "0.373 s"),
    ("tokens_per_second", 12345.6, "12,346 /s"),
    ("ratio_2_ranks", 12.345, "12.35x"),
    ("worst_eager_error", 0.0251, "2.5%"),
    ("metrics_overhead", 0.002, "0.2%"),
    ("ours_1_rank", 3.8157e-07, "3.82e-07"),
    ("time_ratio", None, "-"),
])  # fmt: skip
def test_a_figure_is_written_in_the_unit_of_its_name(tmp_path: Path, name: str, value: Any, written: str) -> None:
    assert f"| side, {name} | {written} |" in page_of(tmp_path, last_line={"side": {name: value}})


def test_what_was_not_measured_yet_says_so_and_shows_no_figures(tmp_path: Path) -> None:
    page = page_of(tmp_path, note="It takes hours.")
    assert "| not measured yet |" in page
    assert "It takes hours." in page
    assert "| figure |" not in page


@pytest.mark.parametrize(("gpu", "says_none"), [("", True), ("1 x A100", False)])
def test_the_page_says_that_nothing_ran_on_a_gpu_until_something_did(tmp_path: Path, gpu: str, says_none: bool) -> None:
    assert ("Nothing was run on a GPU yet" in page_of(tmp_path, gpu=gpu)) is says_none


def record(tmp_path: Path, code: str, *arguments: str) -> tuple[subprocess.CompletedProcess[str], Path]:
    """A benchmark of this code, and where its result would be."""
    (tmp_path / "tiny.py").write_text(f'"""Seconds of nothing.\n\nMore of it.\n"""\n{code}')
    done = tool("record", "tiny", "--folder", tmp_path, "--results", tmp_path / "results", *arguments)
    return done, tmp_path / "results" / "tiny.json"


def test_a_record_is_the_last_line_and_what_it_takes_to_repeat_it(tmp_path: Path) -> None:
    code = "import batchscout, json, sys\nprint('a table')\nprint(json.dumps({'seconds': 1.5, 'of': batchscout.__file__, 'told': sys.argv[1:]}))"
    done, path = record(tmp_path, code, "--note", "a note", "--quick")
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("a table\n{"), "its output passes through"
    found = json.loads(path.read_text())
    assert found["last_line"] == {"seconds": 1.5, "of": str(ROOT / "batchscout" / "__init__.py"), "told": ["--quick"]}
    assert found["printed"] == ["a table"]
    assert (found["title"], found["note"]) == ("Seconds of nothing.", "a note")
    assert found["command"] == "python benchmarks/tiny.py --quick"
    assert found["versions"]["python"] == platform.python_version()
    assert found["versions"].keys() >= {"torch", "ray"}
    assert not found["transcribed"]
    assert all(found[key] for key in ("date", "machine", "commit", "wall_seconds"))


@pytest.mark.parametrize(("code", "exit_code", "said"), [
    ("print('{}')\nraise SystemExit(3)", 3, ""),
    ("print('no figures')", 1, "the last line of tiny.py is not one JSON object: 'no figures'; print its figures as one"),
    ("print([1])", 1, "the last line of tiny.py is not one JSON object: '[1]'; print its figures as one"),
    ("", 1, "the last line of tiny.py is not one JSON object: ''; print its figures as one"),
])  # fmt: skip
def test_nothing_is_kept_of_a_benchmark_that_fails(tmp_path: Path, code: str, exit_code: int, said: str) -> None:
    done, path = record(tmp_path, code)
    assert (done.returncode, done.stderr.strip()) == (exit_code, said)
    assert not path.exists()
