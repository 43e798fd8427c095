"""`batchscout.find` of objects: a study is found again by the same objects, others are refused, and what is refused leaves no files."""

from __future__ import annotations

import inspect
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import batchscout
from batchscout.orchestrator.config.load import study_of
from batchscout.orchestrator.config.trial import base_trial
from batchscout.orchestrator.find import IN_PYTHON, Subject, find, in_python
from batchscout.orchestrator.study.events import proposed
from batchscout.orchestrator.study.run_directory import open_run_directory
from batchscout.orchestrator.study.trial import Proposal
from batchscout.trainers.sources import objects
from tests.support.processes import descended_from, kill, next_line

ROOT = Path(__file__).parents[1]


class Net(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear = nn.Linear(width, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x)


def rows(seed: int) -> list[tuple[Tensor, Tensor]]:
    x = torch.randn(32, 4, generator=torch.Generator().manual_seed(seed))
    return [(row, torch.tensor(0)) for row in x]


def subject(**changes: Any) -> Subject:
    sizes = {"width": 4}
    return Subject(
        **{"model": lambda: Net(**sizes), "train": rows(0), "val": rows(1), "loss": "cross_entropy"} | changes
    )


def test_a_script_that_several_processes_train_is_refused_with_the_command_that_takes_it() -> None:
    command = "torchrun --nproc_per_node 4 train.py"
    with pytest.raises(ValueError, match=rf"starts 4 processes.* type batchscout init {command}"):
        Subject(script=command)


def begun(where: Path, of: Subject) -> None:
    """Leave a study there that has a trial."""
    kwargs = objects.kept_as(of.handed(), where)
    where.mkdir()
    objects.keep(of.handed(), Path(kwargs["file"]))
    config = study_of({"name": "found", **of.keys(kwargs)}, "the test's", say=print)
    with open_run_directory(config, where) as journal:
        journal.append(proposed(Proposal("grid-m4k1", "grid", base_trial(config, None), candidate="grid-m4k1")))


def refused(where: Path, of: Subject, **keys: Any) -> str:
    with pytest.raises(ValueError, match=r".") as raised:
        find(of, run_dir=where, name="found", quiet=True, **keys)
    return str(raised.value)


def files(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}


def with_width(width: int) -> dict[str, Any]:
    sizes = {"width": width}
    return {"model": lambda: Net(**sizes)}


def module(seed: int) -> dict[str, Any]:
    torch.manual_seed(seed)
    return {"model": Net(4)}


@pytest.mark.parametrize(
    ("before", "now", "said"),
    [
        (with_width(4), with_width(8), r"holds a study that began with another model; choose another run_dir, or take the change back"),
        ({}, {"train": rows(2)}, r"holds a study that began with other training data; choose"),
        ({}, {"val": rows(2), **with_width(8)}, r"began with another model and other validation data; choose"),
        (module(0), module(1), r"began with other weights; .*; a module that is made anew begins .* \(model=lambda: Net\(\)\), or call torch.manual"),
        ({"loss": lambda module, batch: module(batch)}, {"loss": lambda module, batch: module(batch[0])}, r"began with another loss; choose"),
    ],
    ids=["dictionary", "data", "two", "weights", "loss"],
)  # fmt: skip
def test_a_study_of_other_objects_is_refused_by_what_differs_and_nothing_is_written(
    tmp_path: Path, before: dict[str, Any], now: dict[str, Any], said: str
) -> None:
    where = tmp_path / "study"
    begun(where, subject(**before))
    there = files(where)
    with pytest.raises(ValueError, match=said):
        find(subject(**now), run_dir=where, name="found", quiet=True)
    assert files(where) == there


def test_the_same_objects_made_anew_are_the_same_study(tmp_path: Path) -> None:
    """It goes on to what is wrong with the keys."""
    where = tmp_path / "study"
    begun(where, subject())
    there = files(where)
    assert "memory_limt: no such key" in refused(where, subject(), memory_limt="1GiB")
    assert files(where) == there


def test_a_call_that_is_refused_leaves_nothing(tmp_path: Path) -> None:
    where = tmp_path / "study"
    assert "memory_limt: no such key" in refused(where, subject(), memory_limt="1GiB")
    assert "weights and their gradients alone take" in refused(
        where, subject(), memory_limit="20B", stages=["frontier"]
    )
    assert not where.exists()
    where.mkdir()
    (where / "study.yaml").write_text("name: [\n")
    assert refused(where, subject(), memory_limt="1GiB")
    assert files(where) == {"study.yaml"}


STARTS_OTHERS = """
import subprocess, batchscout, torch

class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        subprocess.Popen(["sleep", "60"], start_new_session=True)
        subprocess.run(["sh", "-c", "setsid sleep 60 & echo"], stdout=subprocess.DEVNULL)
        raise ArithmeticError("no model")

rows = [(torch.zeros(4), torch.tensor(0))] * 32
own = subprocess.Popen(["sleep", "60"])
try:
    batchscout.find(model=lambda: Net(), train=rows, val=rows, loss="cross_entropy", quiet=True)
except ValueError as error:
    assert "no model" in str(error), error
    print(own.pid, flush=True)
    input()
"""


@pytest.mark.slow
def test_a_thread_is_told_that_ctrl_c_is_heard_elsewhere(tmp_path: Path) -> None:
    with ThreadPoolExecutor() as pool:
        called = pool.submit(batchscout.find, model=nn.Linear(1, 1), train=[1], val=[1], run_dir=tmp_path / "run")
    with pytest.raises(ValueError, match=r"called in a thread, .* the main thread alone hear Ctrl-C; call it there"):
        called.result()
    assert not (tmp_path / "run").exists()


def test_what_a_constructor_has_started_ends_with_find_and_what_a_notebook_has_started_stays(tmp_path: Path) -> None:
    environment = os.environ | {"PYTHONPATH": str(ROOT), "DESCENDS_FROM": str(tmp_path)}
    notebook = subprocess.Popen(
        [sys.executable, "-c", STARTS_OTHERS],
        cwd=tmp_path,
        env=environment,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        own = int(next_line(notebook))
        assert sorted(descended_from(tmp_path)) == sorted([notebook.pid, own])
    finally:
        kill(*descended_from(tmp_path))
        notebook.communicate()


def test_a_refusal_names_the_arguments_of_the_call_and_no_option_of_the_command_line(tmp_path: Path) -> None:
    full = tmp_path / "full"
    full.mkdir()
    (full / "mine.txt").write_text("x")
    begun(where := tmp_path / "begun", subject())
    for said in (refused(full, subject()), refused(where, subject(), sample_budget=77)):
        assert "another run_dir" in said
        assert "--" not in said
    for typed, called in IN_PYTHON.items():
        assert in_python(f"fix it, and {typed}") == f"fix it, and {called}"
        name = called.split("=")[0]
        assert name.startswith("call ") or name in inspect.signature(batchscout.find).parameters
