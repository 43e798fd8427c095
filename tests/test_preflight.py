"""What is checked before anything is started, and said in the user's words. Nothing that was there is touched."""

from __future__ import annotations

import contextlib
import itertools
import math
import os
import re
import threading
import time
import weakref
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal

import pytest
import torch
import yaml
from torch import nn

from batchscout.orchestrator import preflight
from batchscout.orchestrator.config.load import load_study, parse_study
from batchscout.orchestrator.config.trial import base_trial
from batchscout.orchestrator.stages import stage_of
from batchscout.orchestrator.stages.context import StageContext
from batchscout.orchestrator.study.events import FactsRead, RunBegan, parser, proposed
from batchscout.orchestrator.study.facts import Facts
from batchscout.orchestrator.study.inputs import data_files_of
from batchscout.orchestrator.study.journal import Journal, replay
from batchscout.orchestrator.study.run_directory import open_run_directory
from batchscout.orchestrator.study.state import Study
from batchscout.orchestrator.study.trial import Proposal
from batchscout.trainers.before.digests import num_validated_on_training
from batchscout.trainers.before.first_pass import FirstPass
from batchscout.trainers.config import Split
from batchscout.trainers.errors import Obstacle
from batchscout.trainers.model.gpt import GPT
from batchscout.trainers.model.models import initial_module
from batchscout.trainers.notices import Notice, NoticeKind, heard_by
from batchscout.trainers.reporting.evaluation import evaluate
from tests.support import fed
from tests.support.command_line import Typed
from tests.support.every import for_every
from tests.support.processes import HANGS_AFTER_SECONDS, python
from tests.support.storage import fault, on_failing_storage
from tests.support.studies import ON_TEXT
from tests.support.tiny import cpu_run, data

# Their few samples are met often; whoever hears notices hears of that all the same.
pytestmark = pytest.mark.filterwarnings("ignore:runs see each of the:UserWarning")

USERS_MODULE = '''
"""A user's own model and data."""
import torch
from torch import nn

class Model(nn.Module):
    def __init__(self, width=4):
        super().__init__()
        self.layer = nn.Linear(1, width)

def not_a_module():
    return "text"

def gives_up(**kwargs):
    raise SystemExit(0)

class Speechless(Exception):
    def __str__(self):
        raise RuntimeError("it cannot be said")

def fails_without_words(**kwargs):
    raise Speechless

class GivesUp(nn.Module):
    def forward(self, batch):
        raise SystemExit("no forward\\nat all")

def no_data():
    return [], []

class Raises(torch.utils.data.Dataset):
    def __len__(self):
        return 8

    def __getitem__(self, index):
        raise RuntimeError("no such file")

def samples_that_raise():
    return Raises(), Raises()

def three_samples():
    return [torch.zeros(1)] * 3, [torch.zeros(1)]

class Uneven(list):
    lengths = [3, 5, 2, 7]

def uneven(with_lengths=True):
    samples = [{"input_ids": torch.ones(n, dtype=torch.int64), "labels": torch.ones(n, dtype=torch.int64)} for n in Uneven.lengths]
    return (Uneven(samples) if with_lengths else samples), samples

def three_to_train():
    return [torch.zeros(1)] * 3, [torch.zeros(1)] * 64

def of_any_words(**words):
    return seen()

def seen():
    samples = [torch.full((1,), float(number)) for number in range(64)]
    return samples, samples

def one_to_validate():
    return [torch.zeros(1)] * 64, [torch.zeros(1)]

class Logits(nn.Module):
    def __init__(self, vocab_size):
        super().__init__()
        self.table = nn.Embedding(vocab_size, vocab_size)

    def forward(self, batch):
        return self.table(batch["input_ids"]).mean(), batch["targets"].numel()

class Drifts(nn.Module):
    scale = 0.0

    def forward(self, x):
        self.scale += 1.0
        return x * self.scale

class Drifting(nn.Module):
    def __init__(self, vocab_size):
        super().__init__()
        self.table, self.blocks = nn.Embedding(vocab_size, vocab_size), nn.ModuleList([Drifts(), Drifts()])

    def forward(self, batch):
        logits = self.table(batch["input_ids"])
        for block in self.blocks:
            logits = block(logits)
        return nn.functional.cross_entropy(logits.flatten(0, 1), batch["targets"].flatten(), reduction="sum"), batch["targets"].numel()

number = 7
'''

STUDY = ON_TEXT
ENDS_ITS_PROCESS = '''
"""A classifier whose forward is the last that a process does."""
import ctypes, os
import torch
from torch import nn

class Head(nn.Module):
    def __init__(self, ends):
        super().__init__()
        self.head, self.ends = nn.Linear(4, 2), ends

    def forward(self, x):
        self.ends()
        return self.head(x)

def crashes():
    return Head(lambda: ctypes.string_at(0))

def leaves():
    return Head(lambda: os._exit(5))

def points():
    samples = [(torch.zeros(4), torch.tensor(0))] * 4096
    return samples, samples[:8]
'''


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A user's directory, with data and code in it, that the program runs in."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.path", [str(tmp_path), *__import__("sys").path])
    monkeypatch.delitem(__import__("sys").modules, "mine", raising=False)
    (tmp_path / "mine.py").write_text(USERS_MODULE)
    (tmp_path / "train.txt").write_text("".join(f"line {i}\n" for i in range(50)))
    return tmp_path


@pytest.fixture
def passing(monkeypatch: pytest.MonkeyPatch) -> None:
    """A first pass that shows nothing, for what is refused in any case: the process of a real one takes two seconds."""
    monkeypatch.setattr("batchscout.trainers.before.first_pass.first_pass", lambda *_: FirstPass("passed", "pass"))


def files(folder: Path) -> dict[str, bytes]:
    """What lies there, but for who the drivers were."""
    found = [p for p in folder.rglob("*") if p.is_file() and p.suffix != ".pyc" and p.parent.name != ".lease"]
    return {str(p.relative_to(folder)): p.read_bytes() for p in found}


def run(typed: Typed, *arguments: str, **changes: Any) -> tuple[int, str]:
    """(exit code, what went to stderr) of `batchscout run` on a study of this directory."""
    Path("study.yaml").write_text(yaml.safe_dump(STUDY | changes))
    code, out, err = typed("run", "study.yaml", *arguments)
    assert out in ("", "reading the data, building the model and predicting its memory\n")
    return code, err


UNEVEN = {"model": {"target": "mine:Model"}, "data": {"target": "mine:uneven"}}

BAD: list[tuple[dict[str, Any], str]] = [
    ({"model": {"target": "mine:Modell"}}, r"'mine:Modell' does not resolve: 'mine' has no 'Modell'; check its spelling"),
    ({"model": {"target": "yours:Model"}}, r"no module named 'yours'; run from the directory that holds it, or install"),
    ({"model": {"target": "gtp"}}, r"model.target 'gtp' is not built in; use gpt, hf or an import path"),
    ({"model": {"target": "mine:Model", "kwargs": {"wdith": 4}}}, r"model.kwargs do not fit: .*'wdith'; it takes: width"),
    ({"model": {"target": "mine:not_a_module"}}, r"returned a str, not an nn.Module; return the module itself"),
    ({"model": {"target": "mine:Model", "kwargs": {"width": "wide"}}},
     r"model.target 'mine:Model' with model.kwargs {'width': 'wide'} raised TypeError: .* line \d+\); check the values"),
    ({"model": {"target": "mine:fails_without_words"}},
     r"'mine:fails_without_words' with model.kwargs {} raised Speechless \(in "),
    ({"model": {"target": "mine:Model"}, "data": {"target": "mine:samples_that_raise"}},
     r"data.target 'mine:samples_that_raise' with data.kwargs {} raised RuntimeError: no such file \(at sample 0\) \(in .*mine.py, line \d+\)"),
    ({"stages": [{"type": "equivalence", "effective_batch_size": 2**20}], "sample_budget": 2**21},
     r"fewer than one effective batch \(1048576\)"),
    ({"model": STUDY["model"] | {"blocks": "layers"}}, r"model.blocks names 'layers', .*it has: blocks"),
    ({"model": {"target": "mine:Logits"}, "activation_checkpointing": "full"},
     r"activation_checkpointing is full, and the model has no ModuleList or Sequential of repeated blocks to checkpoint; put its"),
    ({"model": {"target": "mine:Logits"}, "stages": [{"type": "frontier", "activation_checkpointing": ["selective", 0.5]}]},
     r"stages.frontier.activation_checkpointing is selective, 0.5, and the model has no ModuleList or Sequential"),
    ({"model": {"target": "mine:Model"}, "stages": [{"type": "frontier", "cross_entropy": ["whole", "chunked"]}]},
     r"stages.frontier.cross_entropy has chunked, .*built-in gpt alone; leave it out, and name memory_knobs: \[chunked_cross_entropy\] there"),
    *(({"model": {"target": "mine:Model"}, "data": {"target": target}, "stages": [{"type": "frontier", "compile": [False], "seq_len": [8, 16]}]},
       rf"stages.frontier.seq_len is 8, 16, and data.target '{target}' takes no seq_len; give it that argument, or leave seq_len out")
      for target in ("mine:seen", "mine:of_any_words")),
    ({"initial_weights": "no.pt"}, r"initial_weights: there is no file .*/no\.pt; check the path"),
    ({"loss": "mine:losss"}, r"'mine:losss' does not resolve: 'mine' has no 'losss'; check its spelling"),
    ({"memory_limit": "1KiB"}, r"memory_limit is 1 KiB, and the model's weights and their gradients alone take 22.9 KiB on each rank; raise"),
    ({"memory_limit": "900GiB", "world_size": 2}, r"memory_limit is 900 GiB for each of 2 ranks, and this machine has .* GiB; lower"),
    ({"loss": "mine"}, r"loss: 'mine' is no loss that is built in; use cross_entropy, mse, bce_with_logits, mean, transformers, or your own"),
    ({"loss": "torch.nn.functional:cross_entropy"}, r"loss: 'torch.nn.functional:cross_entropy' takes outputs and targets, .*loss\(module, batch\); use one of cross_entropy"),
    ({"loss": {"type": "mse", "ignore_index": 1}}, r"loss.ignore_index: no such key; the keys here are: targets, type"),
    ({"data": {"target": "txt"}}, r"data.target 'txt' is not built in; use python_stdlib, text, hf, chat or an import path"),
    ({"data": {"target": "mine:number"}}, r"data.target 'mine:number' is a int; name a callable"),
    ({"data": {"target": "mine:no_data"}}, r"returned 0 train and 0 val samples; each needs at least one"),
    ({"data": {"target": "text", "kwargs": {"train": "no.txt"}}}, r"no\.txt"),
    ({"data": {"target": "text", "kwargs": {"trian": "train.txt"}}}, r"data.kwargs do not fit: .*it takes: train, val"),
    ({"model": {"target": "mine:Model"}, "data": {"target": "mine:three_samples"}, "batch": {"micro_batch_size": 4}},
     r"the training data has 3 samples, fewer than one effective batch \(4\); add data, shorten seq_len, or lower the batch"),
    ({"model": {"target": "mine:Model"}, "data": {"target": "mine:three_samples"}, "world_size": 2,
      "stages": [{"type": "frontier", "smallest": 2, "compile": [False]}]}, r"has 3 samples, .*effective batch \(4\)"),
    ({"micro_batch": {"tokens": 64}}, r"the train set does not say how many they have; give it `lengths`, one number for each sample, or name"),
    (UNEVEN | {"micro_batch": {"tokens": 6}}, r"micro_batch.tokens is 6, and sample 3 of the train set has 7; raise it to 7 at least"),
    (UNEVEN | {"micro_batch": {"tokens": 15}, "batch": {"micro_batch_size": 3}},
     r"micro_batch.tokens is 15, and 3 of the longest samples \(micro_batch_size\) have 21, 7 each; lower micro_batch_size to 2, or raise"),
    (UNEVEN | {"micro_batch": {"tokens": 8}, "stages": [{"type": "frontier", "smallest": 2, "compile": [False]}]},
     r"micro_batch.tokens is 8, and 2 of the longest samples \(micro_batch_size\) have 14, 7 each; lower micro_batch_size to 1, or raise"),
    ({"micro_batch": {"token": 15}}, r"micro_batch.token: no such key; did you mean tokens\? The keys here are: tokens"),
    ({"memory_knobs": ["activation_offload"]}, r"memory_knobs has activation_offload: (.|\n)*; leave it out, or train on a GPU"),
    ({"stages": [{"type": "frontier", "memory_knobs": ["optimizer_offload"]}]},
     r"memory_knobs has optimizer_offload: (.|\n)*; leave it out, or train on a GPU"),
    ({"micro_batch": {"tokens": "many"}}, r"micro_batch.tokens: 'many' is no number of tokens; write how many a micro-batch may hold"),
    ({"data": {"target": "mine:uneven", "pack": 16}}, r"pack is 16, and pad does not say what rows are made of and filled up with; add pad"),
    ({"data": {"target": "mine:uneven", "pack": 16, "pad": {"labels": 0}}, "micro_batch": {}},
     r"micro_batch cuts steps by the lengths of samples, and data.pack makes rows that all have 16 tokens; leave one of the two out"),
    ({"data": {"target": "mine:uneven", "pack": 5, "pad": {"labels": 0}}},
     r"data.pack is 5, and sample 3 of the train set of data.target 'mine:uneven' has 7 tokens; raise it to 7 at least"),
    ({"model": {"target": "mine:Model"}, "data": {"target": "mine:uneven", "kwargs": {"with_lengths": False}, "pad": {"tokens": 0}},
      "micro_batch": {}}, r"data.pad names tokens, and in the train set of data.target 'mine:uneven' a sample has input_ids, labels; name"),
]  # fmt: skip


BAD_IN_A_PASS: list[tuple[dict[str, Any], str]] = [
    ({"model": {"target": "mine:Logits"}}, r"loss_sum is \S+ for one sample and \S+ for two equal ones: it is a mean, .*\n    loss_sum = F"),
    ({"model": {"target": "mine:GivesUp"}},
     r"the model's first forward and backward pass raised SystemExit: no forward \(in .*mine.py, line \d+\); its forward takes \(batch\)"),
    ({"data": {"target": "mine:no_data"}}, r"returned 0 train and 0 val samples; each needs at least one"),
    ({"model": {"target": "mine:Logits", "kwargs": {"vocab_size": 8}}, "data": {"target": "mine:uneven"}},
     r"input_ids of the samples of a batch differs in length \(3 and 5\), and nothing says how to pad it; set data.pad: {input_ids: 0, la"),
    ({"model": {"target": "mine:Drifting"}, "activation_checkpointing": "full"},
     r"activation_checkpointing is full, and a block of the model that is run again on the same input gives something else, and so a wrong "
     r"gradient: its result is [\d.]+ of its length away .* or use none"),
    ({"optimizer": {"kwargs": {"amsgard": True}}}, r"optimizer\.kwargs do not fit adamw: .*'amsgard'; it takes: lr, betas"),
    ({"optimizer": {"kwargs": {"foreach": True}}}, r"optimizer adamw cannot be made .*foreach"),
    ({"optimizer": {"target": "torch.optim:Muon"}}, r"optimizer torch\.optim:Muon cannot be made of this model's parameters: Muon only"),
]  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize(("changes", "said"), BAD_IN_A_PASS)
def test_what_a_real_pass_shows_is_one_message_too(
    home: Path, typed: Typed, changes: dict[str, Any], said: str
) -> None:
    """Whether the driver would have found the same, or not."""
    test_bad_input_is_exit_code_2_and_one_message(home, typed, changes, said)


@pytest.mark.usefixtures("passing")
@pytest.mark.parametrize(("changes", "said"), BAD, ids=lambda value: value[:40] if isinstance(value, str) else "")
def test_bad_input_is_exit_code_2_and_one_message(home: Path, typed: Typed, changes: dict[str, Any], said: str) -> None:
    before = files(home)
    code, message = run(typed, **changes)
    assert code == 2
    assert message.startswith("batchscout: ")
    assert message.count("batchscout: ") == 1
    assert "Traceback" not in message
    assert re.search(said, message), message
    after = files(home)
    assert {name: after[name] for name in before} == before
    assert {name.split("/")[0] for name in after.keys() - before.keys()} <= {"study.yaml", "runs"}


@pytest.mark.usefixtures("passing")
@pytest.mark.parametrize(
    "changes", [{"model": {"target": "mine:not_a_module"}}, {"data": {"target": "mine:no_data"}}], ids=str
)
def test_a_plan_is_refused_as_the_run_would_be(changes: dict[str, Any], typed: Typed) -> None:
    refused = run(typed, **changes)
    code, _, said = typed("plan", "study.yaml")
    assert (code, said) == refused


@pytest.mark.slow
@pytest.mark.usefixtures("passing", "home")
@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU's memory is its own limit")
def test_a_plan_of_more_memory_than_there_is_predicts_what_fits_into_it(typed: Typed) -> None:
    stages = [{"type": "frontier", "activation_checkpointing": ["none"], "compile": [False], "memory_knobs": []}]
    Path("study.yaml").write_text(yaml.safe_dump(STUDY | {"memory_limit": "900GiB", "stages": stages}))
    code, out, _ = typed("plan", "study.yaml")
    assert code == 0
    assert "largest in" in out
    assert "900 GiB" in out
    assert re.search(
        r"this machine has [^ ]* GiB.*: so this is a prediction for another machine", " ".join(out.split())
    )


@pytest.mark.usefixtures("passing")
def test_a_plan_says_that_the_machine_is_too_small_and_that_the_directory_holds_another_study(
    home: Path, typed: Typed
) -> None:
    Path("study.yaml").write_text(yaml.safe_dump(STUDY | {"world_size": 4096}))
    code, _, said = typed("plan", "study.yaml")
    assert code == 2
    assert re.search(
        r"^batchscout: world_size 4096 on 1 lane takes 4,096 [CG]PUs, and this machine has \d+; lower world_size, ",
        said,
    )
    with open_run_directory(parse_study(STUDY, "the test's study"), home / "runs/mine") as journal:
        config = base_trial(parse_study(STUDY, "the test's study"), None)
        journal.append(proposed(Proposal("grid-m4k1", "grid", config, candidate="grid-m4k1")))
    before = files(home / "runs")
    Path("study.yaml").write_text(yaml.safe_dump(STUDY | {"sample_budget": 64}))
    code, _, said = typed("plan", "study.yaml")
    assert code == 2
    assert "runs/mine holds another study:\n" in said
    assert "\n  sample_budget: 32768 there, 64 now\nchoose another --dir" in said
    code, _, said = typed("plan", "study.yaml", "--dir", "train.txt")
    assert (code, said) == (2, f"batchscout: {home}/train.txt is no directory; choose another --dir\n")
    assert files(home / "runs") == before


def noticed_of(changes: dict[str, Any]) -> list[Notice]:
    """The notices that a look at such a study gives."""
    told: list[Notice] = []
    with heard_by(told.append):
        preflight.check(parse_study(STUDY | changes, "the test's study"), compiles=False)
    return told


@pytest.mark.parametrize(("changes", "remedy"), [
    ({}, r"has 1, and evaluation_samples is 256\), so it ranks .* by chance; add validation data$"),
    ({"evaluation_samples": 1, "data": STUDY["data"]}, r"has \d+, and evaluation_samples is 1\), .*; raise evaluation_samples$"),
])  # fmt: skip
def test_a_validation_loss_of_one_sample_is_told(changes: dict[str, Any], remedy: str) -> None:
    own = {"model": {"target": "mine:Model"}, "data": {"target": "mine:one_to_validate"}}
    (notice,) = [one for one in noticed_of(changes or own) if one.kind is NoticeKind.ONE_VALIDATION_SAMPLE]
    assert re.search(f"^the validation loss is that of one sample .*{remedy}", notice.text)


TEN = [torch.full((1,), float(number)) for number in range(10)]


@for_every(
    train_val_and_shared=[
        (TEN, TEN, 10),
        (TEN, TEN[7:], 3),
        (TEN, [*TEN, torch.ones(1) / 3], 0),
        ([torch.zeros(1)] * 4, [torch.zeros(1)] * 2, 0),  # of samples that are all the same nothing is known
    ]
)
def test_validation_samples_that_are_training_samples_are_found(train_val_and_shared: Any) -> None:
    train, val, shared = train_val_and_shared
    assert num_validated_on_training(train, val) == shared


def test_and_they_are_told() -> None:
    told = noticed_of({"data": {"target": "mine:seen"}, "model": {"target": "mine:Model"}})
    (notice,) = [one for one in told if one.kind is NoticeKind.VALIDATES_ON_TRAINING]
    assert "16 validation samples are training samples" in notice.text
    assert "; validate on samples that are not trained on" in notice.text


@pytest.mark.parametrize(("budget", "told_of"), [(40 * 3, []), (40 * 3 + 1, [NoticeKind.FEW_TRAINING_SAMPLES])])
def test_samples_that_are_learned_by_heart_are_told(budget: int, told_of: list[NoticeKind]) -> None:
    three = {"data": {"target": "mine:three_to_train"}, "model": {"target": "mine:Model"}, "sample_budget": budget}
    told = noticed_of(three)
    assert [notice.kind for notice in told] == told_of
    if told_of:
        assert told[0].text == (
            "runs see each of the 3 training samples 40 times (sample_budget is 121), and memorise them, so the best batch says little "
            "about other data; add training data or lower sample_budget"
        )


def test_the_optimizer_of_a_lightning_module_that_is_not_used_is_named(home: Path) -> None:
    (home / "lit.py").write_text(LIGHTNING_MODULE)
    targets = ("lit:WithItsOwn", "lit:Without")
    told = [one for target in targets for one in noticed_of({"model": {"target": target}, "loss": "lit:loss"})]
    (notice,) = [one for one in told if one.kind is NoticeKind.UNUSED_OPTIMIZER]
    assert notice.text == (
        "model.target 'lit:WithItsOwn' is a LightningModule, and its configure_optimizers is not used: trials train with the study "
        "file's optimizer (adamw). To train with the module's own, name a callable that returns the module and its data in "
        "from: {lightning: package.module:callable}, in place of model, loss and data"
    )


LIGHTNING_MODULE = """
import lightning
import torch

class Without(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(1, 1)

class WithItsOwn(Without):
    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=1.0)

def loss(module, batch):
    return module.layer(batch).sum(), 1
"""


def test_a_batch_larger_than_the_data_is_no_trial_either(typed: Typed) -> None:
    study = {
        "model": {"target": "mine:Model"},
        "data": {"target": "mine:three_samples"},
        "stages": [{"type": "frontier"}],
    }
    Path("study.yaml").write_text(yaml.safe_dump(STUDY | study | {"batch": {"micro_batch_size": 4}, "compile": False}))
    code, _, said = typed("trial", "study.yaml")
    assert code == 2
    assert "has 3 samples, fewer than one effective batch (4); add data" in said


def test_a_constructor_that_ends_the_program_does_not_end_it_without_a_word(typed: Typed) -> None:
    """Least of all with 0, which says that the study is done."""
    code, message = run(typed, model={"target": "mine:gives_up"})
    assert code == 2
    assert message.startswith(
        "batchscout: model.target 'mine:gives_up' with model.kwargs {} exited with status 0 (sys.exit) (in "
    )
    assert "check the values, or debug it with batchscout trial" in message


LOCAL, CLUSTER = True, False
NO_ROOM = "this machine has no room for a forward and backward pass, so nothing is known of it before the first trial"


@pytest.mark.parametrize(
    ("found", "is_local", "refused", "told"),
    [
        (FirstPass("passed", "pass"), LOCAL, None, []),
        (FirstPass("passed", "pass", "it does not add up"), LOCAL, None, ["it does not add up"]),
        (FirstPass("too_large", "pass", exit_code=-9), LOCAL, None, [NO_ROOM]),
        (FirstPass("too_large", "data"), LOCAL, None, [NO_ROOM]),
        (FirstPass("too_large", "data", exit_code=-9), CLUSTER,
         f"data.target 'text' with data.kwargs {STUDY['data']['kwargs']} took more memory than this machine lets it have, and was killed; make it "
         "smaller, or use a larger machine", []),
        (FirstPass("refused", "pass", "it is a mean"), CLUSTER, "it is a mean", []),
        (FirstPass("raised", "pass", "KeyError: 'x' (in a.py, line 3)"), LOCAL,
         "the model's first forward and backward pass raised KeyError: 'x' (in a.py, line 3); check the values, or debug it with "
         "batchscout trial", []),
        (FirstPass("raised", "pass", "KeyError: 'x' (in a.py, line 3)", given="its forward takes (batch), and a batch is a list of str"), LOCAL,
         "the model's first forward and backward pass raised KeyError: 'x' (in a.py, line 3); its forward takes (batch), and a batch is a "
         "list of str; check the values, or debug it with batchscout trial", []),
        (FirstPass("raised", "pass", "KeyError: 'x' (in a.py, line 3)"), CLUSTER, None,
         ["the model's first forward and backward pass raised KeyError: 'x' (in a.py, line 3); check the values, or debug it with "
          "batchscout trial; that was on this machine, and the cluster's devices may do better"]),
        (FirstPass("ended", "model", "Fatal Python error", -11), LOCAL,
         "model.target 'gpt' with model.kwargs {'num_layers': 1, 'num_heads': 1, 'hidden_dim': 8} ended its process, which was "
         "killed by SIGSEGV; check the values, or debug it with batchscout trial. Its last output:\nFatal Python error", []),
        (FirstPass("ended", "loss", "", 0), CLUSTER,
         "loss '' ended its process, which exited with status 0; check the values, or debug it with batchscout trial", []),
        (FirstPass("slow", "pass"), LOCAL, None,
         ["the model's first forward and backward pass takes more than 30 s on this machine, so nothing is known of it before the "
          "first trial"]),
    ],
)  # fmt: skip
def test_what_a_first_pass_shows_is_refused_or_told(
    monkeypatch: pytest.MonkeyPatch, found: FirstPass, is_local: bool, refused: str | None, told: list[str]
) -> None:
    said: list[str] = []
    monkeypatch.setattr("batchscout.trainers.before.first_pass.first_pass", lambda *_: found)
    raises = contextlib.nullcontext() if refused is None else pytest.raises(ValueError, match=re.escape(refused) + "$")
    with raises:
        study = parse_study(STUDY, "study.yaml")
        preflight.check_new_study(study, is_local=is_local, compiles=False, say=said.append)
    assert said == told


CHECKS = """
import sys; sys.path.insert(0, '.')
from batchscout.orchestrator import preflight
from batchscout.orchestrator.config.load import parse_study
for ends in ('crashes', 'leaves'):
    study = parse_study({study} | {{'model': {{'target': 'mine:' + ends}}}}, 's')
    preflight.check_new_study(study, is_local={cluster}, compiles=False, say=print)
    try:
        preflight.check_new_study(study, is_local={local}, compiles=False, say=print)
    except ValueError as refused:
        print('refused:', refused)
    print('not ended')
"""


@pytest.mark.slow
def test_a_forward_that_ended_the_process_of_its_first_pass_does_not_end_this_one(home: Path) -> None:
    """It is not called here, where which memory knobs go with a model is looked for by its forward. Seen from outside, since this
    process would end, too."""
    (home / "mine.py").write_text(ENDS_ITS_PROCESS)
    study = {
        "name": "s",
        "loss": "cross_entropy",
        "data": {"target": "mine:points"},
        "stages": [{"type": "frontier", "smallest": 2, "compile": [False], "activation_checkpointing": ["none"]}],
    }
    code = CHECKS.format(study=study, local=LOCAL, cluster=CLUSTER)
    found = python("-c", code, cwd=home)
    assert found.returncode == 0, found.stderr
    crashed, left, rest = found.stdout.split("not ended\n")
    assert rest == ""
    for told, how in ((crashed, "was killed by SIGSEGV"), (left, "exited with status 5")):
        on_cluster, refused = told.split("refused: ")
        for one in (on_cluster, refused):
            assert (
                f"the model's first forward and backward pass ended its process, which {how}; check the values" in one
            )


named = threading.Event()


def model_that_waits_until_it_is_named(vocab_size: int, seq_len: int, **sizes: Any) -> GPT:
    assert named.wait(HANGS_AFTER_SECONDS)
    return GPT(vocab_size=vocab_size, seq_len=seq_len, **sizes)


def test_a_model_that_does_not_come_is_named_while_it_is_waited_for(home: Path) -> None:
    said: list[str] = []

    def say(text: str) -> None:
        said.append(text)
        named.set()

    target = "tests.test_preflight:model_that_waits_until_it_is_named"
    study = STUDY | {"model": {"target": target, "kwargs": STUDY["model"]["kwargs"]}}
    preflight.check(parse_study(study, "study.yaml"), compiles=False, say=say, seconds=0.2)
    assert any(
        re.fullmatch(rf"model.target '{target}' .* has not returned for 0.2 s; Ctrl-C stops it", one) for one in said
    )
    said.clear()
    preflight.check(parse_study(STUDY, "study.yaml"), compiles=False, say=say)
    assert said == []


def slow_model(vocab_size: int, seq_len: int, **sizes: Any) -> GPT:
    time.sleep(0.6)
    return GPT(vocab_size=vocab_size, seq_len=seq_len, **sizes)


@pytest.mark.slow
def test_so_is_one_that_does_not_come_in_the_first_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    """There it is built first: a model that hangs does so there."""
    said = list[str]()
    monkeypatch.setattr(preflight, "MANY_SECONDS", 0.3)
    monkeypatch.setattr(preflight, "check", lambda *_, **__: Facts())
    study = STUDY | {"model": {"target": "tests.test_preflight:slow_model", "kwargs": STUDY["model"]["kwargs"]}}
    preflight.check_new_study(parse_study(study, "study.yaml"), is_local=True, compiles=False, say=said.append)
    named = [one for one in said if one.startswith("model.target 'tests.test_preflight:slow_model' with ")]
    assert [one.partition("} ")[2] for one in named] == ["has not returned for 0.3 s; Ctrl-C stops it"]


def test_a_missing_compiler_is_found_before_anything_starts(
    typed: Typed, monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory
) -> None:
    monkeypatch.setenv("CXX", "/nonexistent/g++")
    compiled = [STUDY["stages"][0] | {"compile": [True]}]
    code, message = run(typed, stages=compiled)
    assert code == 2
    assert re.search(
        r"torch.compile needs a C\+\+ compiler on a CPU, and there is no '/nonexistent/g\+\+'; install one .* name yours "
        r"in CXX, or set compile: false, and compile: \[false\] in the frontier stage and in a grid that lists it", message
    )  # fmt: skip
    monkeypatch.delenv("CXX")
    (programs := tmp_path_factory.mktemp("programs")).joinpath("bash").symlink_to("/bin/sh")
    monkeypatch.setenv("PATH", str(programs))
    code, message = run(typed, stages=compiled)
    assert (code, "there is no 'g++'" in message) == (2, True)


def test_on_a_gpu_the_compiler_is_that_of_c_and_pythons_header_is_looked_for(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Triton builds what calls its kernels when the first one runs, which is in a lane."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr("sysconfig.get_path", lambda _: str(tmp_path))
    monkeypatch.setenv("CXX", "/nonexistent/g++")
    with pytest.raises(ValueError, match=r"Python's C header on a GPU, and there is no .*Python\.h; install it"):
        preflight.check_compiler(True)
    (tmp_path / "Python.h").touch()
    preflight.check_compiler(True)
    monkeypatch.setenv("CC", "/nonexistent/cc")
    with pytest.raises(
        ValueError, match=r"a C compiler on a GPU, and there is no '/nonexistent/cc'; .* name yours in CC"
    ):
        preflight.check_compiler(True)
    monkeypatch.delenv("CC")
    monkeypatch.setenv("PATH", "/nonexistent")
    with pytest.raises(ValueError, match="there is no gcc or clang; install one"):
        preflight.check_compiler(True)
    preflight.check_compiler(False)


def test_a_machine_on_which_ray_could_start_no_process_is_named_before_it_tries(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = parse_study(STUDY, "the test's study")
    preflight.check_host(config)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ValueError, match=r"bash, and there is none on the PATH \(.*\); install it"):
        preflight.check_host(config)


@pytest.mark.usefixtures("passing")
def test_after_bad_input_the_mended_file_is_welcome_in_the_same_directory(typed: Typed) -> None:
    """Nothing had begun: the next message is about the next fault, not about another study."""
    assert "'Modell'" in run(typed, model={"target": "mine:Modell"})[1]
    code, message = run(typed, model={"target": "mine:Model"}, loss="mine:losss")
    assert code == 2
    assert "'losss'" in message
    assert "another study" not in message


@pytest.mark.usefixtures("passing")
def test_a_directory_that_holds_another_study_is_refused_with_the_difference(home: Path, typed: Typed) -> None:
    assert run(typed, loss="mine:losss")[0] == 2
    with Journal(home / "runs/mine/journal.jsonl", "mine") as journal:
        journal.append(RunBegan(token="first"))
        config = base_trial(parse_study(STUDY, "the test's study"), None)
        journal.append(proposed(Proposal("grid-m4k1", "grid", config, candidate="grid-m4k1")))
    before = files(home / "runs")
    code, message = run(typed, loss="mine:losss", sample_budget=64, seeds=[0, 1])
    assert code == 2
    assert "holds another study:\n" in message
    assert "  sample_budget: 32768 there, 64 now\n" in message
    assert "  seeds.1: absent there, 1 now\n" in message
    assert message.count(" there, ") == 2
    assert message.endswith("choose another --dir, or take the change back to go on with that study\n")
    assert files(home / "runs") == before
    assert list(replay(home / "runs/mine/journal.jsonl", "mine").trials) == ["grid-m4k1"]


def test_data_and_weights_that_changed_under_their_names_since_the_study_began_are_refused(
    home: Path, typed: Typed
) -> None:
    def save_weights(seed: int) -> None:
        torch.manual_seed(seed)
        torch.save(GPT(vocab_size=256, seq_len=8, **STUDY["model"]["kwargs"]).state_dict(), home / "weights.pt")

    save_weights(0)
    (home / "study.yaml").write_text(yaml.safe_dump(STUDY | {"initial_weights": "weights.pt"}))
    config = load_study(home / "study.yaml", [])
    with open_run_directory(config, home / "runs/mine") as journal:
        facts = preflight.check_new_study(config, is_local=True, compiles=False, say=print)
        journal.append(FactsRead(facts=replace(facts, inputs=data_files_of(config))))
        journal.append(proposed(Proposal("grid-m4k1", "grid", base_trial(config, None), candidate="grid-m4k1")))
    save_weights(1)
    code, message = run(typed, initial_weights="weights.pt")
    assert code == 2
    assert message.startswith(
        "batchscout: initial_weights has changed since this study began, and trials of old and new code or data do not compare"
    )
    save_weights(0)
    (home / "train.txt").write_text("".join(f"another line {i}\n" for i in range(50)))
    code, message = run(typed, initial_weights="weights.pt")
    assert (code, message.partition(" since")[0]) == (
        2,
        "batchscout: data.kwargs.train, training data, validation data have changed",
    )


def said_of_weights(folder: str, by: Literal["model", "digest"]) -> str:
    """What a study is refused with whose initial weights cannot be opened, to give them to the model or to know them by their digest."""
    os.environ.update(fault("open", "weights.pt", "EIO", after=0))
    kwargs = STUDY["data"]["kwargs"] | {"train": f"{folder}/train.txt"}
    changes = {"initial_weights": f"{folder}/weights.pt", "data": STUDY["data"] | {"kwargs": kwargs}}
    config = parse_study(STUDY | changes, "study.yaml")
    try:
        preflight.check(config, compiles=False) if by == "model" else data_files_of(config)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


@pytest.mark.slow
@pytest.mark.parametrize("by", ["model", "digest"])
def test_initial_weights_that_cannot_be_read_are_named(home: Path, by: Literal["model", "digest"]) -> None:
    torch.save(GPT(vocab_size=256, seq_len=8, **STUDY["model"]["kwargs"]).state_dict(), home / "weights.pt")
    said = on_failing_storage(said_of_weights, str(home), by)
    assert said == f"StorageLost: {home}/weights.pt could not be read: Input/output error"


def test_a_directory_that_is_not_ours_is_refused_and_left_alone(home: Path, typed: Typed) -> None:
    (home / "thesis").mkdir()
    (home / "thesis/chapter1.txt").write_text("It was a dark and stormy night.")
    (home / "file").write_text("x")
    before = files(home)
    code, message = run(typed, "--dir", "thesis")
    assert (code, message) == (
        2, f"batchscout: {home}/thesis is not empty and holds no study.yaml; choose another --dir, or empty it\n"
    )  # fmt: skip
    code, message = run(typed, "--dir", "file")
    assert (code, message) == (2, f"batchscout: {home}/file is no directory; choose another --dir\n")
    after = files(home)
    del after["study.yaml"]
    assert after == before


@pytest.mark.usefixtures("passing")
def test_a_study_that_another_process_runs_is_refused(home: Path, typed: Typed) -> None:
    assert run(typed, loss="mine:losss")[0] == 2
    before = files(home / "runs")
    with Journal(home / "runs/mine/journal.jsonl", "mine"):
        code, message = run(typed, loss="mine:losses")
    assert files(home / "runs") == before, "another process's study.yaml is not touched"
    assert code == 2
    assert message.startswith("batchscout: another process (")


def test_the_facts_are_those_of_data_model_and_host() -> None:
    Path("study.yaml").write_text(yaml.safe_dump(STUDY | {"world_size": 2}))
    facts = preflight.check(load_study(Path("study.yaml"), []), compiles=True)
    assert facts.num_train_samples
    assert facts.num_val_samples
    assert facts.num_parameters
    assert facts.regularizers == {"dropout": 0.0, "label_smoothing": 0.0}
    assert facts.num_train_samples > 4 * facts.num_val_samples * 0.8
    assert facts.num_parameters > 256 * 8
    host_bytes = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    assert 2**20 < preflight.available_memory_bytes() < 0.9 * host_bytes


def test_what_the_users_code_leaves_on_a_gpu_is_given_back_once_it_was_looked_at(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """This process lives as long as the study, and its runs are to have the memory."""
    built, kept = list[weakref.ref[nn.Module]](), list[bool]()

    def build(*given: Any) -> nn.Module:
        model = initial_module(*given)
        built.append(weakref.ref(model))
        return model

    monkeypatch.setattr("batchscout.trainers.model.models.initial_module", build)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: kept.append(any(one() is not None for one in built)))
    preflight.check(parse_study(STUDY, "study.yaml"), compiles=False)
    assert built
    assert kept[-1:] == [False]


def test_a_model_with_a_linear_head_is_known_to_go_with_chunks_and_others_are_not_tried() -> None:
    def tried(target: str, **changes: Any) -> tuple[str, ...] | None:
        model = {"target": target}
        loss = {"type": "cross_entropy", "targets": "targets"}
        config = parse_study(
            {"name": "one", "model": model, "loss": loss, "data": {"target": "tests.support.tiny:data"}, **changes},
            "one",
        )
        return preflight.check(config, compiles=False, follows=True).memory_knobs

    assert tried("tests.support.heads:Headed") == ("chunked_cross_entropy",)
    assert tried("tests.support.heads:Capped") is None
    assert tried("tests.support.heads:Headed", stages=[{"type": "train"}]) is None
    asked = {"stages": [{"type": "frontier", "memory_knobs": ["chunked_cross_entropy"]}]}
    with pytest.raises(
        ValueError, match=r"no linear layer's own output.*; return what an nn.Linear returns, or leave it out"
    ):
        tried("tests.support.heads:Capped", **asked)


@pytest.mark.slow
def test_chunks_that_leave_out_a_part_of_the_loss_are_not_tried_unasked_and_refused_where_they_are_named(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pytest.importorskip("transformers", reason="pip install -e '.[hf]'")
    chunks, said = "chunked_cross_entropy", list[str]()

    def tried(model: str, **changes: Any) -> tuple[str, ...] | None:
        fields: dict[str, Any] = {
            "name": "one",
            "model": {"target": f"tests.support.labelled:{model}"},
            "data": {"target": "tests.support.labelled:data"},
            "loss": "transformers",
            "optimizer": {"reference_batch_size": 8},
        }
        config = parse_study(fields | changes, "one")
        return preflight.check_new_study(config, is_local=True, compiles=False, say=said.append).memory_knobs

    assert tried("tiny_llama") == (chunks,)
    assert tried("with_z_loss") is None
    assert said == [], "nobody has asked for it"
    named: list[dict[str, Any]] = [
        {"memory_knobs": [chunks]},
        {"stages": [{"type": "frontier", "memory_knobs": [chunks]}]},
    ]
    for changes in named:
        with pytest.raises(ValueError, match=r"in chunks, and .* is left out; leave chunked_cross_entropy out of"):
            tried("with_z_loss", **changes)
    found = FirstPass("too_large", "pass")
    monkeypatch.setattr("batchscout.trainers.before.first_pass.first_pass", lambda *_: found)
    assert tried("tiny_llama") is None, "its loss could not be compared"


def among_those_beside_it(module: nn.Module, batch: dict[str, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    """A contrastive loss: each sample is told from the others of its micro-batch."""
    found = module(batch["input_ids"]).mean(1)
    own = torch.arange(len(found))
    return nn.functional.cross_entropy(found @ found.T, own, reduction="sum"), torch.tensor(len(own))


def drawn_to_validate() -> tuple[Any, Any]:
    """Validation samples are drawn for each batch, as masks and crops are."""
    train, val = data()
    return train, fed.Drawing(val)


@pytest.mark.slow
@pytest.mark.parametrize(("target", "expected"), [("drawn_to_validate", 8), ("data", None)])
def test_where_validation_samples_are_drawn_trials_of_every_micro_batch_are_judged_by_the_same(
    target: str, expected: int | None
) -> None:
    study: dict[str, Any] = {
        "name": "one",
        "model": {"target": "gpt", "kwargs": {"hidden_dim": 16, "num_layers": 1, "num_heads": 2}},
        "data": {"target": f"tests.test_preflight:{target}"},
        "batch": {"micro_batch_size": 8},
        "optimizer": {"reference_batch_size": 8},
        "sample_budget": 64,
        "evaluation_samples": 16,
    }
    config, said = parse_study(study, "one"), list[str]()
    facts = preflight.check_new_study(config, is_local=True, compiles=False, say=said.append)
    assert facts.evaluated_together == expected
    assert any("whatever its micro-batch, so that all are judged by one loss" in one for one in said) == bool(expected)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, 2),
        ({"stages": [{"type": "grid", "micro_batch_size": [4, 8]}]}, 4),
        ({"batch": {"micro_batch_size": 8}}, 8),
    ],
)
def test_where_samples_do_not_add_up_trials_of_every_micro_batch_are_judged_by_one_loss(
    changes: dict[str, Any], expected: int
) -> None:
    study: dict[str, Any] = {
        "name": "one",
        "model": {"target": "tests.support.heads:Headed"},
        "data": {"target": "tests.support.tiny:data"},
        "loss": "tests.test_preflight:among_those_beside_it",
        "optimizer": {"reference_batch_size": 8},
        "sample_budget": 64,
        "evaluation_samples": 16,
    }
    config, said = parse_study(study | changes, "one"), list[str]()
    facts = preflight.check_new_study(config, is_local=True, compiles=False, say=said.append)
    assert facts.evaluated_together == expected
    assert "candidates with micro-batches of different sizes train by different losses" in said[0]
    assert said[1].startswith(f"every trial is evaluated over {expected} samples at a time, whatever its micro-batch")
    context = StageContext(config.stages[0], config, Study("one", facts=facts))
    trials = [context.trial(Split(size, 1, 1), None, compile=False) for size in (2, 4, 8)]
    losses, own = (
        [evaluate(cpu_run(trial.model_copy(update=fields)))["val_loss"] for trial in trials]
        for fields in ({}, {"evaluated_together": None})
    )
    assert losses == pytest.approx([losses[0]] * 3, rel=1e-6)
    assert own[-1] > 2 * own[0], "each micro-batch has a loss of its own"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"data": {"target": "tests.support.fed:streams", "kwargs": {"kind": "uneven"}}},
            r"the train stream of data.target 'tests.support.fed:streams' has samples of 5 and of 7 numbers among its first, and the "
            r"frontier must measure the longest, which a stream has no `lengths` to find; pad or pack them to one length in the stream, or "
            r"return a map-style data set with `lengths`",
        ),
        (
            {"data": {"target": "tests.support.fed:streams", "workers": 2}},
            r"one process reads them; set data.workers: 1",
        ),
        (
            {"data": {"target": "tests.support.fed:streams", "pad": {"0": 0}}},
            r"data.pad pads samples to the longest of a batch, and the train stream .* is a stream, of whose samples nobody knows the longest; pad",
        ),
        (
            {"data": {"target": "tests.support.fed:streams"}, "micro_batch": {"tokens": "auto"}},
            r"micro_batch cuts a step by the tokens of its samples, and the train stream .* is a stream, which has no `lengths`; leave",
        ),
    ],
)
def test_a_stream_that_a_study_cannot_use_is_refused_before_anything_starts(
    changes: dict[str, Any], message: str
) -> None:
    frontier = {"stages": [{"type": "frontier"}], "optimizer": {"reference_batch_size": 8}}
    study = parse_study(STUDY | frontier | changes, "s")
    with pytest.raises(ValueError, match=message):
        preflight.check(study, compiles=False)


@pytest.mark.slow
def test_every_mode_of_the_frontier_is_predicted_for_what_it_runs() -> None:
    from batchscout.trainers.before.prediction import predict

    stage = {
        "type": "frontier",
        "activation_checkpointing": ["none"],
        "compile": [True, False],
        "seq_len": [32, 10_000],
    }
    config = parse_study(STUDY | {"stages": [stage]}, "a study")
    facts = preflight.with_predicted_memory(config, Facts(chunked_cross_entropy=True))
    predicted = facts.predicted_memory
    assert predicted is not None
    names = {"none, float32", "none-T32, float32", "none-chunked, float32"}
    assert set(predicted) == names, "the text is too short for 10000"
    probes = stage_of(config.stages[0]).propose(StageContext(config.stages[0], config, Study("mine", facts=facts)))
    names = ("none", "none-eager", "none-T32", "none-eager-T32", "none-T10000", "none-eager-T10000")
    assert [probe.id for probe in probes] == [f"frontier-{name}-m1" for name in names]
    expected = [probe.expected.get("predicted_memory_bytes", math.nan) for probe in probes]
    as_trained = [probe.config.model_copy(update={"evaluation_samples": 0}) for probe in probes[:4]]
    assert expected[:4] == [predict(trial).bytes_at(1) for trial in as_trained]
    assert all(map(math.isnan, expected[4:])), "nothing is predicted of a length that the text does not have"
    assert expected[0] == expected[1] < expected[2] == expected[3]
    whole, in_chunks = (predicted[f"{name}, float32"].lines[-1] for name in ("none", "none-chunked"))
    assert in_chunks.bytes_per_sample < whole.bytes_per_sample, "bytes for every sample"


@pytest.mark.slow
def test_why_nothing_is_predicted_is_said_once_and_kept_among_the_facts() -> None:
    stage = {"type": "frontier", "activation_checkpointing": ["none", "full"]}
    config = parse_study(STUDY | {"stages": [stage], "loss": "tests.support.studies:reading_a_value"}, "a study")
    said: list[str] = []
    facts = preflight.with_predicted_memory(config, Facts(chunked_cross_entropy=False), said.append)
    assert facts.unpredicted_memory is not None
    assert {key: why.obstacle for key, why in facts.unpredicted_memory.items()} == {
        "none, float32": Obstacle.READS_VALUES,
        "full, float32": Obstacle.READS_VALUES,
    }
    assert len(said) == 1
    assert said[0].startswith(
        "memory cannot be predicted for this model: a training step of it reads a tensor's values"
    )
    event = FactsRead(facts=facts)
    assert parser.validate_json(event.model_dump_json()) == event


# Samples that differ in size


@pytest.mark.usefixtures("passing")
def test_a_new_study_knows_its_longest_samples_and_says_if_it_did_not_look_at_all(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where the set does not tell how long they are."""
    sizes = [3, 4] * 25 + [80] + [3] * 13
    (home / "ragged.py").write_text(
        f"from tests.trainers.data.test_long_samples import Ragged\n\ndef data():\n    return Ragged({sizes}), Ragged([3] * 64)\n"
    )
    model = {"target": "tests.trainers.data.test_long_samples:Summed"}
    config = parse_study(STUDY | {"model": model, "data": {"target": "ragged:data"}}, "study.yaml")
    said = list[str]()
    facts = preflight.check_new_study(config, is_local=True, compiles=False, say=said.append)
    assert said == []
    assert facts.long_samples is not None
    assert facts.long_samples[0] == 50
    assert base_trial(config, None, long_samples=facts.long_samples).long_samples == facts.long_samples
    seconds = SimpleNamespace(monotonic=itertools.count().__next__)  # one for each sample that is read
    monkeypatch.setattr("batchscout.trainers.data.long_samples.time", seconds)
    assert preflight.check_new_study(config, is_local=True, compiles=False, say=said.append).long_samples
    assert re.match(
        r"the training samples differ in size, and 5 of 64 were looked at in 4 s: among the others .* `lengths`",
        said[0],
    )
