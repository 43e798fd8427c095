"""What a user's code does wrong in its first pass is known before anything is started, whatever it is."""

from __future__ import annotations

import ctypes
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from orchestrator.execution.process_endings import wait_for_end
from tests.support.tiny import ROOT, config
from trainers import first_pass as module
from trainers.first_pass import PARTS, FirstPass, first_pass

pytestmark = pytest.mark.slow  # each starts a process


class Faulty(nn.Module):
    """A user's module that does in its forward what it is told."""

    def __init__(self, *, vocab_size: int, does: str) -> None:
        super().__init__()
        self.table, self.does = nn.Embedding(vocab_size, vocab_size), does

    def forward(self, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
        match self.does:
            case "crash":
                ctypes.string_at(0)
            case "exit":
                os._exit(3)
            case "hang":
                Path(os.environ.get("NOTE", os.devnull)).write_text(str(os.getpid()))
                time.sleep(600)
            case "take all memory":
                torch.empty(1 << 50)
        print("a user's code may print")
        logits = self.table(batch["words"] if self.does == "look for words" else batch["input_ids"])
        return logits.mean() if self.does == "return a mean" else logits.sum(), torch.tensor(logits.shape[0])


def passed_by(does: str, seconds: float = 60.0, **changes: Any) -> FirstPass:
    model = {"target": "tests.trainers.test_first_pass:Faulty", "kwargs": {"does": does}}
    return first_pass(config(model=model, **changes), seconds)


@pytest.mark.parametrize(
    ("does", "expected"),
    [
        ("nothing wrong", FirstPass("passed", "pass")),
        ("crash", FirstPass("ended", "pass", exit_code=-signal.SIGSEGV)),
        ("exit", FirstPass("ended", "pass", exit_code=3)),
        ("take all memory", FirstPass("too_large", "pass")),
    ],
)
def test_how_it_ended_is_told(does: str, expected: FirstPass) -> None:
    assert passed_by(does) == expected


def test_a_pass_that_hangs_is_ended() -> None:
    assert passed_by("hang", seconds=0.5) == FirstPass("slow", "pass", exit_code=-signal.SIGKILL)


def test_what_it_raised_is_told_with_its_file_and_line() -> None:
    found = passed_by("look for words")
    assert (found.outcome, found.part) == ("raised", "pass")
    assert re.fullmatch(rf"KeyError: 'words' \(in {ROOT}/tests/trainers/test_first_pass\.py, line \d+\)", found.said)


def test_a_mean_is_refused() -> None:
    found = passed_by("return a mean")
    assert found.outcome == "refused"
    assert "for two equal ones: it is a mean" in found.said


def test_each_part_is_told_as_it_begins_and_data_that_do_not_load_end_it() -> None:
    begun: list[str] = []
    assert first_pass(config(), 60.0, begun.append).outcome == "passed"
    assert begun == list(PARTS)
    found = passed_by("nothing wrong", data={"target": "text", "kwargs": {"train": "no.txt"}})
    assert (found.outcome, found.part) == ("raised", "data")


def test_a_model_without_room_is_followed_without_its_values(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "BYTES_PER_WEIGHT_BYTE", 1 << 60)
    told = [one for one in module._parts(config()) if isinstance(one, FirstPass)]
    assert told == [FirstPass("too_large", "pass")]


def test_it_does_not_outlive_whoever_asked(tmp_path: Path) -> None:
    note = tmp_path / "pid"
    code = "from tests.trainers.test_first_pass import passed_by; passed_by('hang')"
    with subprocess.Popen([sys.executable, "-c", code], cwd=ROOT, env={**os.environ, "NOTE": str(note)}) as asker:
        while not note.exists() or not note.read_text():
            assert asker.poll() is None
            time.sleep(0.05)
        process = os.pidfd_open(int(note.read_text()))
        asker.kill()
    assert wait_for_end(process, seconds=10.0)
    os.close(process)
