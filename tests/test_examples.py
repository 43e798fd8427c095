"""The examples: scripts that train without this project get an answer with a few lines more."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from batchscout import load

ROOT = Path(__file__).parents[1]
EXAMPLES = ROOT / "examples"
SCRIPTS = {"lightning": "lightning", "nanogpt": "torch", "transformers_trainer": "accelerate", "trl_sft": "trl"}
"""Folders whose train.py trains by itself, and what it needs."""
MOST_LINES = {"speed": 5, "study": 15}
SCALED_DOWN = ("largest=4", "smallest=4", "activation_checkpointing=[none]", "compile=[false]", "finalists=1")


def lines_added(folder: Path, answer: str) -> int:
    """The lines that a user adds for this answer: those marked in the script, and those of the file that asks for it."""
    marked = [line for line in (folder / "train.py").read_text().splitlines() if line.endswith("# batchscout")]
    (asks,) = folder.glob(f"{answer}.*")
    text = asks.read_text()
    if asks.suffix == ".py":
        body = [
            node for node in ast.parse(text).body if not isinstance(node, ast.Expr) or isinstance(node.value, ast.Call)
        ]
        return len(marked) + sum(1 + (node.end_lineno or node.lineno) - node.lineno for node in body)
    return len(marked) + sum(bool(line.strip()) and not line.startswith("#") for line in text.splitlines())


@pytest.mark.parametrize("answer", MOST_LINES)
@pytest.mark.parametrize("name", SCRIPTS)
def test_an_answer_takes_a_few_lines_more(name: str, answer: str) -> None:
    assert lines_added(EXAMPLES / name, answer) <= MOST_LINES[answer]


@pytest.fixture
def short() -> Iterator[Path]:
    """A folder with a short name, for the sake of Ray's sockets."""
    with tempfile.TemporaryDirectory(prefix="bs-", dir="/tmp") as name:
        yield Path(name)


def run(folder: Path, short: Path, *command: str) -> str:
    settings = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    settings |= {"PYTHONPATH": str(ROOT), "RAY_TMPDIR": str(short), "BATCHSCOUT_CACHE": str(short / "cache")}
    done = subprocess.run([sys.executable, *command], cwd=folder, env=settings, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:] + done.stdout[-2000:]
    return done.stdout


@pytest.mark.ray
@pytest.mark.timeout(400)
@pytest.mark.parametrize("name", [name for name in SCRIPTS if name != "nanogpt"])
def test_an_object_that_trains_elsewhere_is_measured_as_it_is(name: str, short: Path) -> None:
    pytest.importorskip(SCRIPTS[name])
    changes = [part for change in SCALED_DOWN for part in ("--set", f"stages.frontier.{change}")]
    run(EXAMPLES / name, short, "-m", "orchestrator", "run", "speed.yaml", "--dir", str(short / "run"), *changes)
    study = load(short / "run")
    assert study.is_over
    assert study.verdict.startswith("frontier: micro-batch 4 with activation checkpointing none")


@pytest.mark.ray
@pytest.mark.timeout(400)
def test_a_script_finds_its_answer_and_goes_on_with_it(short: Path) -> None:
    """What the script has defined itself has no import path."""
    script = EXAMPLES / "nanogpt" / "train.py"
    small = "stages=[{'type': 'frontier', 'smallest': 4, 'largest': 4, 'activation_checkpointing': ['none'], 'compile': [False]}]"
    text = (EXAMPLES / "nanogpt" / "study.py").read_text()
    own = script.read_text().partition("def get_batch")[0] + "\n" + _without_imports_of(text, "train")
    (short / "script.py").write_text(_with_stages(own, small))
    first = run(short, short, "script.py")
    assert "micro-batch 4 with activation checkpointing none" in first
    study = load(short / "runs" / "script")
    frame = study.trials()
    assert set(frame["state"]) == {"complete"}
    assert set(frame["micro_batch_size"]) == {4}
    lines = (study.run_dir / "journal.jsonl").read_bytes()
    again = run(short, short, "script.py")
    assert again.splitlines()[-1] == first.splitlines()[-1]
    assert (study.run_dir / "journal.jsonl").read_bytes() == lines, "nothing is measured twice"
    (short / "script.py").write_text(_with_stages(own, small).replace("nn.GELU()", "nn.ReLU()"))
    with pytest.raises(AssertionError, match="holds another study"):
        run(short, short, "script.py")


def _without_imports_of(text: str, module: str) -> str:
    return "\n".join(line for line in text.splitlines() if not line.startswith(f"from {module} "))


def _with_stages(text: str, stages: str) -> str:
    begin, end = text.index("stages=["), text.index(")  # fmt")
    return text[:begin] + stages + "\n" + text[end:]
