"""The examples: scripts that train without this project get an answer with a few lines more."""

from __future__ import annotations

import ast
import os
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from batchscout import load
from batchscout.orchestrator.config.load import load_study
from batchscout.orchestrator.config.trial import base_trial
from batchscout.trainers.before.first_pass import FirstPass, parts
from batchscout.trainers.config import TrialConfig
from batchscout.trainers.data.targets import counted_in
from batchscout.trainers.loop import train
from batchscout.trainers.model.blocks import find_blocks
from batchscout.trainers.report import Report
from batchscout.trainers.reporting.evaluation import evaluate
from batchscout.trainers.run import Run
from tests.support.every import for_every

ROOT = Path(__file__).parents[1]
EXAMPLES = ROOT / "examples"
SCRIPTS = {"lightning": "lightning", "nanogpt": "torch", "transformers_trainer": "accelerate", "trl_sft": "trl"}
"""Folders whose train.py trains by itself, and what it needs."""
MOST_LINES = {"speed": 5, "study": 15}
WHOLE = "trl_sft"
"""The folder whose whole study runs here; of the others it is the first stage."""
SHORT_STUDY = (
    "sample_budget=512", "evaluation_samples=32", "stages.throughput.multiples=[1,2]", "stages.throughput.rounds=1",
    "stages.throughput.max_rounds=1", "stages.equivalence.steps=5", "stages.train.max_runs=2",
)  # fmt: skip
SCALED_DOWN = (
    "largest=4", "smallest=4", "activation_checkpointing=[none]", "compile=[false]", "finalists=1", "rounds=1", "max_rounds=1",
    "memory_knobs=[]",
)  # fmt: skip


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


@for_every(answer=MOST_LINES, name=SCRIPTS)
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
@pytest.mark.timeout(900)
def test_an_object_that_trains_elsewhere_gets_a_whole_study(short: Path) -> None:
    pytest.importorskip(SCRIPTS[WHOLE])
    frontier = [f"stages.frontier.{change}" for change in SCALED_DOWN]
    changes = [part for change in (*frontier, *SHORT_STUDY) for part in ("--set", change)]
    run(EXAMPLES / WHOLE, short, "-m", "batchscout", "run", "study.yaml", "--dir", str(short / "run"), *changes)
    study = load(short / "run")
    assert study.is_over
    assert study.verdict.startswith("Train with micro-batch")
    assert study.recommendation is not None
    assert study.recommendation.learning_rate > 0


@pytest.mark.ray
@pytest.mark.timeout(900)
def test_a_script_gets_a_whole_study_and_its_own_command_back(short: Path) -> None:
    folder = short / "scripts"
    shutil.copytree(EXAMPLES / "scripts", folder)
    run(folder, short, "-m", "batchscout", "init", "vae.py", "--epochs", "2")
    short_one = ["sample_budget=512", "real_run=null", "evaluation_samples=64", "stages=[{type: train, max_runs: 2}]"]
    changes = [part for change in short_one for part in ("--set", change)]
    run(folder, short, "-m", "batchscout", "run", "study.yaml", "--dir", str(short / "run"), *changes)
    recommended = load(short / "run").recommendation
    assert recommended is not None
    *_, command = (
        run(folder, short, "-m", "batchscout", "export", str(short / "run"), "--to", "script").strip().splitlines()
    )
    values = f"--batch-size {recommended.micro_batch_size} --lr {recommended.learning_rate:.4g}"
    assert command.startswith("python vae.py --epochs 2 ")
    assert {*values.split()} <= {*command.split()}
    run(folder, short, *shlex.split(command)[1:])
    assert {one.name for one in folder.iterdir()} == {"vae.py", "gan.py", "study.yaml"}


def test_a_gan_is_no_study(tmp_path: Path) -> None:
    shutil.copy(EXAMPLES / "scripts/gan.py", tmp_path)
    command = [sys.executable, "-m", "batchscout", "init", "gan.py"]
    done = subprocess.run(
        command, cwd=tmp_path, env=os.environ | {"PYTHONPATH": str(ROOT)}, capture_output=True, text=True
    )
    assert done.returncode == 2
    assert "two optimizers take turns (Adam and Adam), as those of a GAN do" in done.stderr
    assert [one.name for one in tmp_path.iterdir()] == ["gan.py"]


SMALL = {
    "smallest": 4, "largest": 4, "activation_checkpointing": ["none"], "compile": [False], "finalists": 1, "rounds": 1, "max_rounds": 1,
    "memory_knobs": [],
}  # fmt: skip

COUNTED_IN = {"lightning": "samples/s", "transformers_trainer": "tokens/s"}
"""Folders whose first stage runs here, and what the speed of their data is told in."""


@pytest.mark.ray
@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", COUNTED_IN)
def test_an_object_that_trains_elsewhere_is_measured_as_it_is(name: str, short: Path) -> None:
    pytest.importorskip(SCRIPTS[name])
    changes = [part for change in SCALED_DOWN for part in ("--set", f"stages.frontier.{change}")]
    out = run(EXAMPLES / name, short, "-m", "batchscout", "run", "speed.yaml", "--dir", str(short / "run"), *changes)
    study = load(short / "run")
    assert study.is_over
    assert study.verdict.startswith("frontier: micro-batch 4 with activation checkpointing none")
    for told in (study.verdict, out, (short / "run" / "report.html").read_text()):
        assert {unit for unit in COUNTED_IN.values() if unit in told} == {COUNTED_IN[name]}


@pytest.mark.ray
@pytest.mark.timeout(900)
def test_a_script_finds_its_answer_and_goes_on_with_it(short: Path) -> None:
    """What the script has defined itself has no import path."""
    script = EXAMPLES / "nanogpt" / "train.py"
    small = "stages=[{'type': 'frontier', " + ", ".join(f"'{key}': {value}" for key, value in SMALL.items()) + "}]"
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
    with pytest.raises(AssertionError, match="holds a study that began with another model"):
        run(short, short, "script.py")


IN_PROCESS = {"vit": ("samples", 4), "cnn": ("samples", 6), "seq2seq": ("tokens", 4), "lora": ("tokens", 2)}
"""Folders of a model and a study file: what its targets are, and its number of blocks."""


@pytest.fixture
def trial(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> TrialConfig:
    """The example's own run with fewer samples, in a copy of its folder."""
    folder = tmp_path / name
    shutil.copytree(EXAMPLES / name, folder, ignore=shutil.ignore_patterns("base", "*.jsonl"))
    monkeypatch.chdir(folder)
    monkeypatch.syspath_prepend(folder)
    monkeypatch.setenv("BATCHSCOUT_CACHE", str(tmp_path / "cache"))
    if name == "lora":
        pytest.importorskip("peft")
        pytest.importorskip("transformers")
        prepare = [sys.executable, "prepare.py", "--steps", "20"]
        done = subprocess.run(prepare, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
    changes = ["batch.micro_batch_size=32", "sample_budget=512", "evaluation_samples=64", "compile=false"]
    own = base_trial(load_study(Path("study.yaml"), changes), None)
    return own.model_copy(update={"activation_checkpointing": "full", "evaluations": (), "memory_limit_bytes": None})


@pytest.mark.slow
@pytest.mark.parametrize("name", IN_PROCESS)
def test_what_is_no_language_model_of_ours_passes_and_learns_checkpointed(
    name: str, trial: TrialConfig, tmp_path: Path
) -> None:
    *_, found = parts(trial)
    assert isinstance(found, FirstPass)
    assert (found.outcome, found.said) == ("passed", "")
    run = Run(trial, torch.device("cpu"))
    counted, num_blocks = IN_PROCESS[name]
    assert counted_in(run.first_samples, found.targets_per_sample) == counted
    assert len(find_blocks(run.module, trial.model.blocks)) == num_blocks
    reports: list[Report] = []
    train(trial, reports.append, tmp_path / "run")
    told = reports[-1].metrics
    # In training mode: after so few steps BatchNorm's averages are still those of the beginning.
    assert told["final_loss"] < evaluate(run)["val_loss"]
    assert ("perplexity" in told) == (counted == "tokens")


def _without_imports_of(text: str, module: str) -> str:
    return "\n".join(line for line in text.splitlines() if not line.startswith(f"from {module} "))


def _with_stages(text: str, stages: str) -> str:
    begin, end = text.index("stages=["), text.index(")  # fmt")
    return text[:begin] + stages + "\n" + text[end:]
