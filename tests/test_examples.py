"""The examples: scripts that train without this project get an answer with a few lines more."""

from __future__ import annotations

import ast
import json
import math
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from pydantic import JsonValue, TypeAdapter

from batchscout import load
from batchscout.orchestrator.config.load import load_study
from batchscout.orchestrator.config.trial import base_trial
from batchscout.orchestrator.output.exports import export
from batchscout.trainers.before.first_pass import FirstPass, first_pass, parts
from batchscout.trainers.config import TrialConfig
from batchscout.trainers.data.targets import counted_in
from batchscout.trainers.loop import train
from batchscout.trainers.model.blocks import find_blocks
from batchscout.trainers.report import Report
from batchscout.trainers.reporting.evaluation import evaluate
from batchscout.trainers.run import Run
from batchscout.trainers.sources.settings import GROUPS, OwnRun
from tests.support.every import for_every
from tests.support.example_study import example_recommendation
from tests.support.processes import apart, python

ROOT = Path(__file__).parents[1]
EXAMPLES = ROOT / "examples"
SCRIPTS = {"lightning": "lightning", "nanogpt": "torch", "transformers_trainer": "accelerate", "trl_sft": "trl"}
"""Folders whose train.py trains by itself, and what it needs."""
MOST_LINES = {"speed": 5, "study": 15}
IN_THE_THIRD_TIER = pytest.mark.cluster
"""A study for each folder is more than CI has time for: it runs one of an object and one of a script."""
WHOLE = {"lightning": pytest.mark.ray, "trl_sft": IN_THE_THIRD_TIER}
"""Folders whose whole study runs here; of the others it is the first stage."""
SHORT_STUDY = (
    "sample_budget=512", "evaluation_samples=32", "stages.throughput.multiples=[1,2]", "stages.throughput.rounds=1",
    "stages.throughput.max_rounds=1", "stages.equivalence.steps=5", "stages.train.max_runs=2",
)  # fmt: skip
SMALL = {
    "smallest": 4, "largest": 4, "activation_checkpointing": ["none"], "compile": [False], "finalists": 1, "rounds": 1, "max_rounds": 1,
    "memory_knobs": [],
}  # fmt: skip
SCALED_DOWN = [f"stages.frontier.{key}={json.dumps(value)}" for key, value in SMALL.items()]


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


@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", [pytest.param(name, marks=tier) for name, tier in WHOLE.items()])
def test_an_object_that_trains_elsewhere_gets_a_whole_study(name: str, short: Path) -> None:
    pytest.importorskip(SCRIPTS[name])
    changes = [part for change in (*SCALED_DOWN, *SHORT_STUDY) for part in ("--set", change)]
    apart(EXAMPLES / name, short, "-m", "batchscout", "run", "study.yaml", "--dir", str(short / "run"), *changes)
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
    apart(folder, short, "-m", "batchscout", "init", "vae.py", "--epochs", "2")
    short_one = ["sample_budget=512", "real_run=null", "evaluation_samples=64", "stages=[{type: train, max_runs: 2}]"]
    changes = [part for change in short_one for part in ("--set", change)]
    apart(folder, short, "-m", "batchscout", "run", "study.yaml", "--dir", str(short / "run"), *changes)
    recommended = load(short / "run").recommendation
    assert recommended is not None
    *_, command = (
        apart(folder, short, "-m", "batchscout", "export", str(short / "run"), "--to", "script").strip().splitlines()
    )
    values = f"--batch-size {recommended.micro_batch_size} --lr {recommended.learning_rate:.4g}"
    assert command.startswith("python vae.py --epochs 2 ")
    assert {*values.split()} <= {*command.split()}
    apart(folder, short, *shlex.split(command)[1:])
    assert {one.name for one in folder.iterdir()} == {"vae.py", "gan.py", "study.yaml"}


def test_a_gan_is_no_study(tmp_path: Path) -> None:
    shutil.copy(EXAMPLES / "scripts/gan.py", tmp_path)
    done = python("-m", "batchscout", "init", "gan.py", cwd=tmp_path)
    assert done.returncode == 2
    assert "two optimizers take turns (Adam and Adam), as those of a GAN do" in done.stderr
    assert [one.name for one in tmp_path.iterdir()] == ["gan.py"]


def own_run_of(folder: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """What an example's Trainer is set to, as the first pass of a study finds it."""
    monkeypatch.chdir(folder)
    monkeypatch.syspath_prepend(folder)
    found = first_pass(base_trial(load_study(Path("study.yaml"), ["stages=[{type: train}]"]), None), 60)
    assert found.outcome == "passed", found.said
    assert found.own_run is not None
    return TypeAdapter(OwnRun).dump_python(found.own_run, mode="json")


def copied(name: str, short: Path, **changes: tuple[str, str]) -> Path:
    """A copy of an example whose script has other texts in the place of these."""
    folder = short / name
    shutil.copytree(EXAMPLES / name, folder)
    text = (folder / "train.py").read_text()
    for before, after in changes.values():
        assert before in text
        text = text.replace(before, after)
    (folder / "train.py").write_text(text)
    return folder


OWN: dict[str, JsonValue] = {
    "micro_batch_size": 4, "gradient_accumulation_steps": 2, "effective_batch_size": 8, "learning_rate": 3e-3, "sample_budget": 128,
    "warmup_samples": 0, "precision": "float32", "compile": False, "activation_checkpointing": "none",
    "optimizer": {"type": "adamw", "betas": [0.9, 0.99], "param_groups": GROUPS, "weight_decay": 0.05},
}  # fmt: skip
"""What a short study of one of the examples may recommend."""


@pytest.mark.slow
def test_a_lightning_script_runs_with_what_is_pasted_back(short: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """For its own epochs, in its own groups."""
    pytest.importorskip("lightning")
    folder = copied("lightning", short, size=("num_train: int = 4096", "num_train: int = 64"))
    own_run = own_run_of(folder, monkeypatch)
    schedule: JsonValue = {"type": "table", "factors": [0.0, 1.0, 0.5]}
    pasted = export(example_recommendation(**OWN, own_run=own_run, schedule=schedule), "lightning")
    assert "batchscout." not in pasted
    script, _, _ = (folder / "train.py").read_text().partition("if __name__")
    (folder / "train.py").write_text(script + pasted + _FITTED)
    told = json.loads(apart(folder, short, "train.py").splitlines()[-1])
    assert told["rates"] == pytest.approx([3e-3 * min(n / 3.5, 1 - (n - 3.5) / 7) for n in range(8)])
    assert told["groups"] == [[[0.9, 0.99], 0.05], [[0.9, 0.99], 0.0]]


_FITTED = """
import json


class Rates(L.Callback):
    seen = []

    def on_before_optimizer_step(self, trainer, pl_module, optimizer):
        self.seen.append(optimizer.param_groups[0]["lr"])


trainer.callbacks.append(Rates())
trainer.fit(Classifier(), Digits(batch_size=micro_batch_size))
groups = [(group["betas"], group["weight_decay"]) for group in trainer.optimizers[0].param_groups]
print(json.dumps({"rates": Rates.seen, "groups": groups}))
"""


@pytest.mark.slow
@pytest.mark.parametrize(("name", "to"), [("transformers_trainer", "hf"), ("trl_sft", "trl")])
def test_a_trainers_script_runs_with_what_is_pasted_back(
    name: str, to: str, short: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """For its own epochs, on its own schedule, with whatever else it says of no matter to a study."""
    pytest.importorskip(SCRIPTS[name])
    pytest.importorskip("accelerate")
    size = {"hf": ("files[:20]", "files[:1]"), "trl": ("instructions(4096", "instructions(64")}[to]
    restarts = "lr_scheduler_type='cosine_with_restarts', lr_scheduler_kwargs={'num_cycles': 2}"
    folder = copied(
        name,
        short,
        size=size,
        schedule=('lr_scheduler_type="cosine"', restarts),
        epochs=("num_train_epochs=1", "num_train_epochs=2"),
    )
    own_run = own_run_of(folder, monkeypatch)
    pasted = export(example_recommendation(**OWN, own_run=own_run, schedule=own_run["schedule"]), to)
    before = (folder / "train.py").read_text()
    begin = before.index("args=") + len("args=")
    call = before[begin : before.index("),\n", begin) + 1]
    script, _, _ = before.replace(call, "args").partition("if __name__")
    top, _, make = script.partition("def make_trainer")
    (folder / "train.py").write_text(f"{top}{pasted}\n\ndef make_trainer{make}{_TRAINED}")
    told = json.loads(apart(folder, short, "train.py").splitlines()[-1])
    steps = math.ceil(told["samples"] / 4 / 2) * 2  # of two epochs
    assert (told["epochs"], told["steps"], told["report_to"]) == (2, steps, [])
    warmup = {"hf": 20 * 16 // 8, "trl": 0}[to]  # of 16 samples a step before, and 8 now
    expected = [
        n / warmup if n < warmup else 0.5 * (1 + math.cos(math.pi * (2 * (n - warmup) / (steps - warmup) % 1.0)))
        for n in range(steps)
    ]
    assert told["rates"] == pytest.approx([3e-3 * factor for factor in expected], abs=3e-4)


_TRAINED = """
import json
from transformers import TrainerCallback


class Rates(TrainerCallback):
    seen = []

    def on_pre_optimizer_step(self, args, state, control, optimizer, **kwargs):
        self.seen.append(optimizer.param_groups[0]["lr"])

trainer = make_trainer()
trainer.add_callback(Rates())
trainer.train()
told = {"epochs": args.num_train_epochs, "steps": trainer.state.global_step, "report_to": args.report_to}
print(json.dumps({**told, "samples": len(trainer.train_dataset), "rates": Rates.seen}))
"""


COUNTED_IN = {"lightning": "samples/s", "transformers_trainer": "tokens/s"}
"""Folders whose first stage runs here, and what the speed of their data is told in."""


@IN_THE_THIRD_TIER
@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", COUNTED_IN)
def test_an_object_that_trains_elsewhere_is_measured_as_it_is(name: str, short: Path) -> None:
    pytest.importorskip(SCRIPTS[name])
    changes = [part for change in SCALED_DOWN for part in ("--set", change)]
    out = apart(EXAMPLES / name, short, "-m", "batchscout", "run", "speed.yaml", "--dir", str(short / "run"), *changes)
    study = load(short / "run")
    assert study.is_over
    assert study.verdict.startswith("frontier: micro-batch 4 with activation checkpointing none")
    for told in (study.verdict, out, (short / "run" / "report.html").read_text()):
        assert {unit for unit in COUNTED_IN.values() if unit in told} == {COUNTED_IN[name]}


@IN_THE_THIRD_TIER
@pytest.mark.timeout(900)
def test_a_script_finds_its_answer_and_goes_on_with_it(short: Path) -> None:
    """What the script has defined itself has no import path."""
    script = EXAMPLES / "nanogpt" / "train.py"
    small = "stages=[{'type': 'frontier', " + ", ".join(f"'{key}': {value}" for key, value in SMALL.items()) + "}]"
    text = (EXAMPLES / "nanogpt" / "study.py").read_text()
    own = script.read_text().partition("def get_batch")[0] + "\n" + _without_imports_of(text, "train")
    (short / "script.py").write_text(_with_stages(own, small))
    first = apart(short, short, "script.py")
    assert "micro-batch 4 with activation checkpointing none" in first
    study = load(short / "runs" / "script")
    frame = study.trials()
    assert set(frame["state"]) == {"complete"}
    assert set(frame["micro_batch_size"]) == {4}
    lines = (study.run_dir / "journal.jsonl").read_bytes()
    again = apart(short, short, "script.py")
    assert again.splitlines()[-1] == first.splitlines()[-1]
    assert (study.run_dir / "journal.jsonl").read_bytes() == lines, "nothing is measured twice"
    (short / "script.py").write_text(_with_stages(own, small).replace("nn.GELU()", "nn.ReLU()"))
    with pytest.raises(AssertionError, match="holds a study that began with another model"):
        apart(short, short, "script.py")


IN_PROCESS = {"vit": ("samples", 4), "cnn": ("samples", 6), "seq2seq": ("tokens", 4), "lora": ("tokens", 2)}
"""Folders of a model and a study file: what its targets are, and its number of blocks."""


@pytest.fixture
def trial(name: str, tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> TrialConfig:
    """The example's own run with fewer samples, in a copy of its folder."""
    folder = tmp_path / name
    shutil.copytree(EXAMPLES / name, folder, ignore=shutil.ignore_patterns("base", "*.jsonl"))
    monkeypatch.chdir(folder)
    monkeypatch.syspath_prepend(folder)
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
