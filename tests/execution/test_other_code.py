"""A study whose code or data have changed does not count with what was made before: it stops, and says how it would go on."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from tests.support.studies import TINY, grid

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(600)]  # seven of them, one after the other

CLONE = Path(__file__).parents[2]
CODE = """
from tests.support import tiny
from trainers.layers import Net

def model(vocab_size, seq_len, **kwargs):
    return Net(vocab_size=vocab_size, seq_len=seq_len, **kwargs)

def data():
    return tiny.data(num_train=64, num_val=16)
"""
LAYERS = """
from batchscout.trainers.model.gpt import GPT

class Net(GPT):
    def forward(self, batch):
        if len(batch["input_ids"]) == 8:
            raise ArithmeticError("my own mistake")
        return super().forward(batch)
"""
STUDY = TINY | {
    "name": "changing",
    "model": {"target": "orchestrator.mine:model", "kwargs": {"num_layers": 1, "num_heads": 2, "hidden_dim": 16}},
    "data": {"target": "orchestrator.mine:data"},
    "stages": grid(micro_batch_size=[8]),
}


@pytest.fixture
def home() -> Iterator[Path]:
    """Where the user's code is, in packages with the names of our folders. Its name is short, for the sake of Ray's sockets."""
    with tempfile.TemporaryDirectory(prefix="bs-", dir="/tmp") as name:
        for folder, file, text in (("orchestrator", "mine.py", CODE), ("trainers", "layers.py", LAYERS)):
            (Path(name) / folder).mkdir()
            (Path(name) / folder / "__init__.py").write_text("")
            (Path(name) / folder / file).write_text(text)
        (Path(name) / "study.yaml").write_text(yaml.safe_dump(STUDY))
        yield Path(name)


def ran(home: Path, *options: str) -> tuple[int, str]:
    """(exit code, what was said) of `batchscout run`."""
    code = [sys.executable, "-c", "from batchscout.orchestrator.cli import main; main()", "run", "study.yaml", *options]
    environment = {**os.environ, "PYTHONPATH": str(CLONE), "TMPDIR": str(home), "BATCHSCOUT_CACHE": str(home / "cache")}
    done = subprocess.run(code, cwd=home, env=environment, capture_output=True, text=True)
    return done.returncode, done.stdout + done.stderr


def change(home: Path, file: str, old: str, new: str) -> None:
    text = (home / file).read_text()
    assert old in text
    (home / file).write_text(text.replace(old, new))


def test_what_was_made_with_other_code_or_data_counts_only_where_the_user_says_so(home: Path) -> None:
    code, said = ran(home)
    assert (code, "my own mistake" in said) == (1, True)
    change(home, "trainers/layers.py", '            raise ArithmeticError("my own mistake")', "            pass")
    code, said = ran(home)
    assert (code, "1 trial of an earlier try will run again: trainers/layers.py has changed since" in said) == (0, True)

    change(home, "trainers/layers.py", "            pass", "            pass  # as it should")
    (home / "unused.py").write_text("width = 2\n")
    assert ran(home)[0] == 0

    change(home, "trainers/layers.py", "super().forward(batch)", "GPT.forward(self, batch)")
    journal = (home / "runs/changing/journal.jsonl").read_bytes()
    code, said = ran(home)
    assert code == 2
    assert said.startswith(
        "batchscout: trainers/layers.py has changed since this study began, and trials of old and new code or data do not compare"
    )
    assert said.endswith("or add --keep-finished to go on with both\n")
    assert (home / "runs/changing/journal.jsonl").read_bytes() == journal
    kept = "Caveat a trial had been measured before trainers/layers.py changed, and is part of the answer"
    code, said = ran(home, "--keep-finished")
    assert (code, kept in " ".join(said.split())) == (0, True)
    code, said = ran(home)
    assert (code, kept in " ".join(said.split())) == (0, True), "it is asked once, and says so for good"

    change(home, "orchestrator/mine.py", "num_train=64", "num_train=64, padded=True")
    code, said = ran(home)
    assert code == 2
    assert said.startswith("batchscout: orchestrator/mine.py, training data, validation data have changed since")
