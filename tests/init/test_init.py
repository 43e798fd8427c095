"""`batchscout init`: what it finds in a folder by reading alone, and that what it writes runs."""

from __future__ import annotations

import json
import re
import shlex
import shutil
from pathlib import Path
from typing import Any

import pytest
import yaml
from jsonschema import Draft202012Validator

from batchscout import load
from batchscout.orchestrator.config.load import load_study
from batchscout.orchestrator.config.placeholders import placeholders
from batchscout.orchestrator.init.command import Command, command_in
from batchscout.orchestrator.init.kinds import Kind
from batchscout.orchestrator.init.start import read_folder, start
from batchscout.orchestrator.init.study_file import PLACEHOLDER, Machine, written
from batchscout.orchestrator.init.subject import FromSubject, OwnSubject, Subject, WatchedSubject, subject_of
from batchscout.orchestrator.output.schemas import editors_line, schema_path
from batchscout.trainers.before import source
from batchscout.trainers.criteria import import_path
from batchscout.trainers.sources.settings import Settings
from tests.support.command_line import Typed
from tests.support.processes import apart

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples"
MODULE = "from torch import nn\n"
LIGHTNING = "import lightning as L\n"
NET = MODULE + "class Net(nn.Module):\n    def forward(self, x):\n        return x\n"
DATA = "from torch.utils.data import TensorDataset\ndef data():\n    return TensorDataset(1), TensorDataset(2)\n"


def project(folder: Path, **files: str) -> Path:
    """A folder with these files, each named without its ending."""
    for name, text in files.items():
        path = folder / f"{name}.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return folder


def found(folder: Path) -> Subject:
    return subject_of(read_folder(folder).project)


def own(folder: Path) -> OwnSubject:
    subject = found(folder)
    assert isinstance(subject, OwnSubject)
    return subject


def example(name: str, folder: Path) -> Path:
    """The scripts of an example, without its study files and what asks for the answer in Python."""
    there = folder / name
    shutil.copytree(
        EXAMPLES / name, there, ignore=shutil.ignore_patterns("*.yaml", "study.py", "speed.py", "base", "__pycache__")
    )
    return there


@pytest.mark.parametrize(
    ("name", "library", "target"),
    [
        ("lightning", "lightning", "train:make"),
        ("transformers_trainer", "transformers", "train:make_trainer"),
        ("trl_sft", "transformers", "train:make_trainer"),
    ],
)
def test_what_trains_elsewhere_is_found_by_the_function_that_makes_it(
    name: str, library: str, target: str, tmp_path: Path
) -> None:
    subject = found(example(name, tmp_path))
    assert isinstance(subject, FromSubject)
    assert (subject.library, subject.maker.target, subject.is_there) == (library, target, True)


@pytest.mark.parametrize(
    ("name", "model", "data", "loss"),
    [
        ("vit", "vit:ViT", "vit:data", "cross_entropy"),
        ("cnn", "cnn:ResNet", "cnn:data", "cross_entropy"),
        ("seq2seq", "seq2seq:Translator", "seq2seq:data", "cross_entropy"),
        ("nanogpt", "train:GPT", None, "mean"),
    ],
)
def test_a_model_and_its_data_are_found_and_no_part_of_the_model_is_taken_for_it(
    name: str, model: str, data: str | None, loss: str, tmp_path: Path
) -> None:
    subject = own(example(name, tmp_path))
    assert subject.model is not None
    assert (subject.model.target, subject.data and subject.data.target) == (model, data)
    assert subject.loss.type == loss


def test_classes_are_known_by_their_bases_in_other_files(tmp_path: Path) -> None:
    files = {
        "my/__init__": "from .models.net import Net\n",
        "my/models/base": MODULE + "class Base(nn.Module): pass\n",
        "my/models/net": "from .base import Base\nclass Net(Base):\n    def forward(self, x): return x\n",
        "my/sets": "import torch.utils.data as d\nfrom my import Net as Model\nclass Larger(Model): pass\nclass Own(d.Dataset): pass\n"
        "def make(path='x') -> tuple[Own, Own]:\n    return both(path)\n",
    }
    project(tmp_path, **files)
    subject = own(tmp_path)
    assert subject.model is not None
    assert subject.data is not None
    assert (subject.model.target, subject.data.target) == ("my.models.net:Net", "my.sets:make")
    classes = read_folder(tmp_path).project.classes_of(Kind.MODULE)
    assert sorted(one.name for _, one in classes) == ["Base", "Larger", "Net"]


def test_a_lightning_module_that_nothing_returns_is_found_with_the_function_to_write(tmp_path: Path) -> None:
    project(
        tmp_path, train=LIGHTNING + "class Net(L.LightningModule): pass\nclass Digits(L.LightningDataModule): pass\n"
    )
    subject = found(tmp_path)
    assert isinstance(subject, FromSubject)
    assert (subject.is_there, subject.maker.target) == (False, "train:make")
    assert subject.to_write == "def make():\n    return Net(), Digits()"


@pytest.mark.parametrize(
    "returned", ["Net(), loader()", "Net(), loader(), loader()", "Net(), loader(), loader(), Trainer()"]
)
def test_a_function_that_returns_what_lightnings_fit_is_called_with_is_found(returned: str, tmp_path: Path) -> None:
    project(
        tmp_path,
        train=LIGHTNING + f"class Net(L.LightningModule): pass\ndef both():\n    return {returned}\n",
    )
    subject = found(tmp_path)
    assert isinstance(subject, FromSubject)
    assert (subject.is_there, subject.maker.target) == (True, "train:both")


def test_a_function_that_makes_a_model_of_transformers_is_taken_for_the_model(tmp_path: Path) -> None:
    build = (
        "from transformers import AutoModelForCausalLM\ndef build():\n    return AutoModelForCausalLM.from_config(1)\n"
    )
    subject = own(project(tmp_path, train=build, sets=DATA))
    assert subject.model is not None
    assert (subject.model.target, subject.loss.type) == ("train:build", "transformers")


def test_of_two_lightning_modules_the_named_one_is_taken(home: Path) -> None:
    project(home, train=LIGHTNING + "class A(L.LightningModule): pass\nclass B(L.LightningModule): pass\n")
    done = start("train:B", None)
    assert isinstance(done.subject, FromSubject)
    assert done.subject.to_write == "def make():\n    return B(), FILL_IN_train_loader(), FILL_IN_val_loader()"


@pytest.mark.slow
def test_a_trainer_made_by_a_script_itself_is_found_with_the_function_to_write(tmp_path: Path) -> None:
    project(tmp_path, train="from transformers import Trainer\ntrainer = Trainer(model=1)\ntrainer.train()\n")
    done = start(str(tmp_path), None)
    assert isinstance(done.subject, FromSubject)
    assert (done.subject.is_there, done.subject.maker.target) == (False, "train:make_trainer")
    assert done.to_do[0].startswith(
        "write the function make_trainer into train.py (train.py, line 2):\n    def make_trainer():\n        "
    )
    written = done.path.read_text()
    assert re.search(r"^# +def make_trainer\(\):$", written, re.MULTILINE), "code stands in lines of its own"
    assert done.told[0].startswith("train.py, line 3 runs whenever the file is imported")


LOSSES = {
    "import torch\ncriterion = torch.nn.MSELoss()\n": ("mse", "train.py, line 2 calls MSELoss"),
    "from torch import nn\nc = nn.BCEWithLogitsLoss()\n": (
        "bce_with_logits",
        "train.py, line 2 calls BCEWithLogitsLoss",
    ),
    "": ("cross_entropy", "no call of a loss was found; cross_entropy takes logits and classes"),
}


@pytest.mark.parametrize("script", LOSSES)
def test_the_loss_is_the_one_that_the_script_calls(script: str, tmp_path: Path) -> None:
    loss = own(project(tmp_path, model=NET, train=script)).loss
    assert (loss.type, loss.why) == LOSSES[script]


@pytest.mark.parametrize(
    ("arguments", "loss", "to_do"),
    [
        ("", "cross_entropy", False),
        ("ignore_index=-100, reduction='mean'", "cross_entropy", False),
        ("ignore_index=0", {"type": "cross_entropy", "ignore_index": 0}, False),
        ("ignore_index=0, label_smoothing=0.1", "FILL_IN", True),
        ("weight=torch.ones(3)", "FILL_IN", True),
        ("reduction='sum'", "FILL_IN", True),
    ],
)
def test_what_the_loss_is_called_with_is_taken_or_left_to_be_written(
    arguments: str, loss: Any, to_do: bool, tmp_path: Path
) -> None:
    found = own(
        project(tmp_path, model=NET, sets=DATA, train=f"import torch\nc = torch.nn.CrossEntropyLoss({arguments})\n")
    )
    file = written(found, "a", "study.yaml", Machine(has_gpu=False, has_compiler=True))
    assert yaml.safe_load(file.text)["loss"] == loss
    assert any("write it as package.module:callable" in one for one in file.to_do) is to_do


def test_a_module_that_sums_its_loss_itself_names_none(tmp_path: Path) -> None:
    sums = "    def forward(self, x, y):\n        return F.cross_entropy(x, y, reduction='sum'), y.numel()\n"
    project(tmp_path, model=f"import torch.nn.functional as F\n{MODULE}class Net(nn.Module):\n{sums}")
    assert own(tmp_path).loss.type is None


def test_the_targets_of_a_dictionary_are_named_where_they_are_not_called_labels(tmp_path: Path) -> None:
    item = "    def __getitem__(self, i):\n        return {'image': 1, 'target': 2}\n"
    project(tmp_path, model=NET, sets=f"from torch.utils.data import Dataset\nclass Own(Dataset):\n{item}")
    subject = own(tmp_path)
    assert subject.loss.targets == "target"
    text = written(subject, "a", "study.yaml", Machine(has_gpu=False, has_compiler=True)).text
    assert yaml.safe_load(text)["loss"] == {"type": "cross_entropy", "targets": "target"}


def test_the_numbers_that_a_script_trains_with_are_taken_over(tmp_path: Path) -> None:
    train = "import torch\no = torch.optim.SGD(p, lr=0.05)\nl = torch.utils.data.DataLoader(s, batch_size=48)\n"
    project(tmp_path, model=NET, sets=DATA, train=train)
    start(str(tmp_path), None)
    tree = yaml.safe_load((tmp_path / "study.yaml").read_text())
    assert tree["optimizer"] == {"type": "sgd", "lr": 0.05, "reference_batch_size": 48}
    assert "from train.py, line 2" in (tmp_path / "study.yaml").read_text()


def test_what_only_the_user_knows_is_marked_and_told(tmp_path: Path) -> None:
    needs = (
        MODULE
        + "class Net(nn.Module):\n    def __init__(self, width, depth=2): pass\n    def forward(self, x): return x\n"
    )
    done = start(str(project(tmp_path, model=needs)), None)
    tree = yaml.safe_load(done.path.read_text())
    assert tree["model"] == {"target": "model:Net", "kwargs": {"width": PLACEHOLDER}}
    assert tree["data"] == {"target": PLACEHOLDER}
    assert [text.split(":")[0] for text in done.to_do] == ["data.target", "model.kwargs"]
    assert all(" ".join(text.split()) in _in_one_line(done.path) for text in done.to_do)


def _in_one_line(path: Path) -> str:
    """The comments of a file, as running text."""
    return " ".join(" ".join(line.strip().lstrip("#") for line in path.read_text().splitlines()).split())


def test_a_folder_with_nothing_gives_an_example_to_fill_in(tmp_path: Path, typed: Typed) -> None:
    code, out, err = typed("init", str(tmp_path))
    assert (code, err) == (0, "")
    assert out.startswith(
        "No model and no data were found: this is an example, whose placeholders are to be filled in.\n"
    )
    assert f"then:  cd {tmp_path} && batchscout plan study.yaml" in out
    tree = yaml.safe_load((tmp_path / "study.yaml").read_text())
    assert (tree["model"], tree["data"]) == ({"target": PLACEHOLDER}, {"target": PLACEHOLDER})


def test_a_file_that_is_there_is_never_overwritten(tmp_path: Path, typed: Typed) -> None:
    path = tmp_path / "study.yaml"
    path.write_text("mine")
    said = f"batchscout: {path} is there already, and init does not overwrite it; name another, as batchscout init --to other.yaml ..., or remove it\n"
    assert typed("init", str(tmp_path)) == (2, "", said)
    assert path.read_text() == "mine"
    assert typed("init", str(tmp_path), "--to", str(tmp_path / "other.yaml"))[0] == 0
    assert path.read_text() == "mine"


def test_nothing_is_run_and_nothing_else_is_written(tmp_path: Path) -> None:
    project(tmp_path, model=NET + "open('ran', 'w').close()\nraise SystemExit(3)\n", broken="def (:\n", sets=DATA)
    (tmp_path / "not-a-name.py").write_text("raise SystemExit(3)\n")
    done = start(str(tmp_path), None)
    assert sorted(one.name for one in tmp_path.iterdir()) == [
        "broken.py",
        "model.py",
        "not-a-name.py",
        "sets.py",
        "study.yaml",
    ]
    assert done.told[0].startswith("broken.py could not be parsed as Python (line 1: ")
    assert done.told[1].startswith("model.py, line 5 runs whenever the file is imported")


def test_environments_and_hidden_folders_are_not_looked_into(tmp_path: Path) -> None:
    project(tmp_path, **{"venv/net": NET, ".hidden/net": NET, "mine/net": NET})
    (tmp_path / "mine" / "pyvenv.cfg").write_text("")
    assert own(tmp_path).model is None


@pytest.mark.parametrize(
    ("what", "keys"),
    [
        ("model:Block", {"model": {"target": "model:Block"}}),
        ("model:make", {"model": {"target": "model:make"}}),
        ("sets:data", {"data": {"target": "sets:data"}}),
        ("model:Net", {"model": {"target": "model:Net"}}),
        ("train:trainer", {"from": {"transformers": "train:trainer"}}),
    ],
)
def test_an_import_path_says_which(what: str, keys: dict[str, Any], home: Path) -> None:
    more = "class Block(nn.Module):\n    def forward(self, x): return x\ndef make() -> nn.Module: return 1\n"
    trainer = "from transformers import Trainer\ndef trainer() -> Trainer:\n    return 1\n"
    project(home, model=NET + more, sets=DATA, train=trainer)
    start(what, None)
    tree = yaml.safe_load((home / "study.yaml").read_text())
    assert {key: tree[key] for key in keys} == keys


@pytest.mark.parametrize(
    ("what", "said"),
    [
        ("modle:Net", "there is no file for the module 'modle' in "),
        ("model:Nett", "model.py defines no class or function 'Nett'; did you mean Net? Or check the name"),
        ("model:what", "model:what (model.py, line 5) is neither a model, nor data, nor does it say that it returns them; annotate what"),
        ("nowhere", "there is no folder nowhere; name one, or a callable as package.module:callable"),
    ],
)  # fmt: skip
def test_what_cannot_be_found_is_named_with_what_would_do(what: str, said: str, home: Path, typed: Typed) -> None:
    project(home, model=NET + "def what(): return 1\n")
    code, out, err = typed("init", what)
    assert (code, out) == (2, "")
    assert said in err
    assert not (home / "study.yaml").exists()


@pytest.mark.parametrize("machine", [Machine(False, True), Machine(True, True), Machine(False, False)])
@pytest.mark.parametrize("name", ["vit", "lightning", "nanogpt", "lora"])
def test_what_is_written_validates_and_says_what_each_key_is(name: str, machine: Machine, tmp_path: Path) -> None:
    text = written(found(example(name, tmp_path)), "a-name", "study.yaml", machine).text
    schema = json.loads(schema_path("study").read_text())
    tree = yaml.safe_load(text)
    Draft202012Validator(schema).validate(tree)
    assert text.splitlines()[0] == editors_line(str(schema_path("study")))
    assert max(map(len, text.splitlines()[1:])) <= 120
    path = tmp_path / "study.yaml"
    path.write_text(text)
    for key in tree.keys() - {"name", "from", "optimizer", "model", "data"}:
        assert schema["properties"][key]["description"] in _in_one_line(path)
    if name == "vit":
        config = load_study(path, [])
        assert config.precision == ("bfloat16" if machine.has_gpu else "float32")


@pytest.mark.slow
@pytest.mark.timeout(400)
@pytest.mark.parametrize(
    ("name", "library", "how"),
    [
        ("vit", "torch", ("--set", "stages.frontier.activation_checkpointing=[none]")),
        ("transformers_trainer", "accelerate", ("--no-memory",)),  # its Trainer is made and read even so
    ],
)
def test_a_study_file_that_was_written_can_be_planned(
    name: str, library: str, how: tuple[str, ...], short: Path
) -> None:
    pytest.importorskip(library)
    folder = example(name, short)
    apart(folder, short, "-m", "batchscout", "init")
    out = apart(folder, short, "-m", "batchscout", "plan", "study.yaml", *how)
    assert "train: Which batch ends best at equal cost?" in out
    assert ("predicted peak memory" in out) == (name == "vit")


@pytest.mark.cluster
@pytest.mark.timeout(400)
def test_a_study_file_that_was_written_runs(short: Path) -> None:
    folder = example("vit", short)
    apart(folder, short, "-m", "batchscout", "init")
    stage = (
        "{type: frontier, smallest: 8, largest: 8, compile: [false], activation_checkpointing: [none], finalists: 1, "
        "rounds: 1, max_rounds: 1, memory_knobs: []}"
    )
    apart(
        folder,
        short,
        "-m",
        "batchscout",
        "run",
        "study.yaml",
        "--dir",
        str(short / "run"),
        "--set",
        f"stages=[{stage}]",
    )
    assert load(short / "run").verdict.startswith("frontier: micro-batch 8 with activation checkpointing none")


# Of a script, which is run


SCRIPT = """
import argparse, pathlib, torch, torch.nn.functional as F
from torch.utils.data import DataLoader, TensorDataset
parser = argparse.ArgumentParser()
parser.add_argument("--to", type=float, required=True)
rate = parser.parse_args().to
print("Hello")
pathlib.Path("log.txt").write_text("begun")
net = torch.nn.Linear(4, 3)
loader = DataLoader(TensorDataset(torch.randn(40, 4), torch.randint(3, (40,))), batch_size=8, shuffle=True)
optimizer = torch.optim.Adam(net.parameters(), lr=rate)
for epoch in range(1000):
    for x, y in loader:
        optimizer.zero_grad()
        F.cross_entropy(net(x), y).backward()
        optimizer.step()
"""


def test_of_a_script_a_study_file_is_written_that_runs_and_nothing_else(home: Path, typed: Typed) -> None:
    project(home, train=SCRIPT)
    code, printed, _ = typed("init", "train.py", "--to", "0.02")
    assert code == 0
    assert "model: Linear (15 parameters)" in printed
    assert "F.cross_entropy(net(x), y)" in printed
    assert "Hello" not in printed
    assert {one.name for one in home.iterdir()} == {"train.py", "study.yaml"}
    tree = yaml.safe_load((home / "study.yaml").read_text())
    assert tree["from"] == {"script": "train.py", "args": ["--to", "0.02"]}
    assert tree["sample_budget"] == 40_000, "its own run takes no longer than a short one may"
    assert "real_run" not in tree
    config = load_study(home / "study.yaml", [])
    assert (config.optimizer.lr, config.optimizer.reference_batch_size, config.optimizer.weight_decay) == (0.02, 8, 0.0)
    code, _, said = typed("plan", "study.yaml")
    assert code == 0
    assert "are others in every process" not in said, "what a script draws is the same in every process"
    assert {one.name for one in home.iterdir()} == {"train.py", "study.yaml"}


def test_a_run_of_the_study_is_as_long_as_half_a_minute_of_passes_allows() -> None:
    def length(run_samples: int | None, sample_seconds: float | None) -> dict[str, Any]:
        said = Settings({"optimizer": {"reference_batch_size": 8}}, (), run_samples, sample_seconds=sample_seconds)
        text = written(WatchedSubject(Command("train.py"), said, 1.0), "it", "study.yaml", Machine(False, False)).text
        return {key: value for key, value in yaml.safe_load(text).items() if key in ("sample_budget", "real_run")}

    assert length(40_000, 0.0005) == {"sample_budget": 40_000}
    assert length(200_000, 0.0005) == {"sample_budget": 60_000, "real_run": {"samples": 200_000}}
    assert length(200_000, 1.0) == {"sample_budget": 8192, "real_run": {"samples": 200_000}}
    assert length(200_000, None) == {"sample_budget": 8192, "real_run": {"samples": 200_000}}
    assert length(5_000, None) == {"sample_budget": 5_000}
    assert length(None, 0.0005) == {"sample_budget": 60_000}


def test_what_a_script_may_make_of_its_number_of_processes_is_told_in_numbers() -> None:
    said = Settings({"optimizer": {"reference_batch_size": 8, "lr": 0.1}}, ())
    subject = WatchedSubject(Command("train.py", (), 4), said, 1.0)
    text = written(subject, "it", "study.yaml", Machine(False, False)).text
    assert yaml.safe_load(text)["optimizer"] == {"reference_batch_size": 32}
    assert "was seen at the rate of one, 0.1: set optimizer.lr to 0.4 then" in text


@pytest.mark.slow
def test_where_the_loss_alone_was_not_had_it_is_the_one_hole(home: Path, typed: Typed) -> None:
    carried = "kept = torch.zeros(3)\nfor epoch"
    step = "out = net(x) + kept.detach()\n        kept = out.mean(0); F.cross_entropy(out, y).backward()"
    text = SCRIPT.replace("for epoch", carried).replace("F.cross_entropy(net(x), y).backward()", step)
    project(home, train=text, mine="def loss(module, batch): ...")
    code, printed, _ = typed("init", "train.py", "--to", "0.02")
    assert code == 0
    assert "its loss reads kept, which the step before has left" in printed
    text = (home / "study.yaml").read_text()
    assert list(placeholders(yaml.safe_load(text))) == ["loss"]
    (home / "study.yaml").write_text(text.replace(f'"{PLACEHOLDER}"', "mine:loss"))
    config = load_study(home / "study.yaml", [])
    assert (import_path(config.loss), config.optimizer.reference_batch_size) == ("mine:loss", 8)


def test_past_the_time_limit_the_files_are_read(home: Path, typed: Typed, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(source, "LONGEST_SECONDS", 0.05)
    project(home, train=SCRIPT, net=NET)
    code, printed, _ = typed("init", "train.py", "--to", "0.02")
    assert code == 0
    assert "it was not done after 0 s" in printed
    assert "model" in yaml.safe_load((home / "study.yaml").read_text())


@pytest.mark.slow
def test_of_a_folder_the_script_that_makes_the_optimizer_is_watched(tmp_path: Path, typed: Typed) -> None:
    project(tmp_path, **{"learn": SCRIPT.replace("required=True", "default=0.02"), "net": NET})
    code, printed, error = typed("init", str(tmp_path))
    assert code == 0
    assert "learn.py makes the optimizer (torch.optim.Adam, line 11)" in error
    assert "model: Linear (15 parameters)" in printed
    assert yaml.safe_load((tmp_path / "study.yaml").read_text())["from"] == {"script": "learn.py"}


@pytest.mark.slow
@pytest.mark.parametrize(
    "words", [("code", "--to", "it.yaml"), ("--to", "code/it.yaml", "code/learn.py"), ("code",), ("code/learn.py",)]
)
def test_the_command_that_is_printed_runs_where_it_says_wherever_the_file_lies(
    words: tuple[str, ...], home: Path, typed: Typed, monkeypatch: pytest.MonkeyPatch
) -> None:
    project(home / "code", learn=SCRIPT.replace("required=True", "default=0.02"))
    _, printed, _ = typed("init", *words)
    (file,) = home.rglob("*.yaml")
    *there, _, verb, named = shlex.split(printed.rpartition("next: ")[2])
    assert f"batchscout {verb} {named} " in _in_one_line(file)
    if there:
        monkeypatch.chdir(there[1])
    code, _, said = typed(verb, named, "--no-memory")
    assert code == 0, said


@pytest.mark.slow
def test_a_number_of_processes_that_is_no_number_is_told(home: Path, typed: Typed) -> None:
    project(home, train=SCRIPT)
    _, printed, _ = typed("init", "torchrun", "--nproc_per_node=gpu", "train.py", "--to", "0.02")
    told = "--nproc_per_node=gpu gives no number of processes, and 1 was taken"
    assert told in " ".join(printed.split())
    assert told in _in_one_line(home / "study.yaml")


@pytest.mark.slow
def test_a_folder_whose_script_needs_arguments_is_read(tmp_path: Path, typed: Typed) -> None:
    project(tmp_path, train=SCRIPT, net=NET)
    code, printed, _ = typed("init", str(tmp_path))
    assert code == 0
    assert "the following arguments are required: --to" in printed
    assert "run batchscout init train.py with its arguments" in " ".join(printed.split())
    assert yaml.safe_load((tmp_path / "study.yaml").read_text())["model"] == {"target": "net:Net"}


@pytest.mark.parametrize(
    ("words", "command"),
    [
        ("train.py --lr 1", Command("train.py", ("--lr", "1"))),
        ("-m package.train --lr 1", Command("package.train", ("--lr", "1"))),
        ("python3 train.py -m x", Command("train.py", ("-m", "x"))),
        ("torchrun --nproc_per_node 4 train.py --lr 1", Command("train.py", ("--lr", "1"), 4)),
        ("python -m torch.distributed.run --nproc-per-node=2 -m a.train", Command("a.train", (), 2)),
        ("torchrun --nnodes 2 --nproc_per_node 8 train.py", Command("train.py", (), 16)),
        ("torchrun --nproc_per_node=gpu train.py", Command("train.py", (), 1, "--nproc_per_node=gpu")),
        ("torchrun --nnodes 1:4 --nproc-per-node 8 train.py", Command("train.py", (), 8, "--nnodes=1:4")),
        ("accelerate launch --num_machines 2 --num_processes 8 train.py", Command("train.py", (), 8)),
        ("accelerate launch --mixed_precision bf16 -m package.train", Command("package.train")),
        ("folder", None),
        ("my.module:make", None),
        ("torchrun", None),
    ],
)
def test_a_script_is_found_behind_whatever_launches_it(words: str, command: Command | None) -> None:
    assert command_in(words.split()) == command


def test_a_script_that_is_no_study_is_refused_and_nothing_is_written(home: Path, typed: Typed) -> None:
    project(home, train="import torch\nprint('done')\n")
    code, _, error = typed("init", "train.py")
    assert code == 2
    assert "from.script train.py: no optimizer of torch was made" in error
    assert {one.name for one in home.iterdir()} == {"train.py"}
