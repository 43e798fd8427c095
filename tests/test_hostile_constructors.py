"""A user's constructor that ends its process, or raises what nobody expects, ends no study without a word.

Each is the program as it is typed, in a process of its own: where one of them were not held off, it would end this one.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.support.processes import HANGS_AFTER_SECONDS, python
from tests.support.studies import ON_TEXT

pytestmark = pytest.mark.slow  # each starts the program, and that a first pass

ROOT = Path(__file__).parents[1]
HOSTILE = """
import ctypes, os, sys, time

class Unexpected(BaseException):
    pass

def exits(**_): os._exit(0)
def crashes(**_): ctypes.string_at(0)
def raises(**_): raise Unexpected("of all things")
def interrupts(**_): raise KeyboardInterrupt
def waits(place):
    is_first = "batchscout.trainers.before.first_pass" in sys.orig_argv
    if is_first == (place == "first pass"):
        open("waits", "w").close()
        time.sleep(600)
    raise ValueError
"""
EXITS_AS_IT_IS_IMPORTED = "import os; os._exit(0)"
STUDY = ON_TEXT


@pytest.fixture
def home(tmp_path: Path) -> Path:
    (tmp_path / "hostile.py").write_text(HOSTILE)
    (tmp_path / "exits.py").write_text(EXITS_AS_IT_IS_IMPORTED)
    (tmp_path / "train.txt").write_text("".join(f"line {i}\n" for i in range(50)))
    return tmp_path


def said_to(home: Path, verb: str, **changes: Any) -> tuple[int, str]:
    """(exit code, all that was printed but for what `run` begins with) of a verb on a study of this directory."""
    (home / "study.yaml").write_text(yaml.safe_dump(STUDY | changes))
    done = python("-m", "batchscout", verb, "study.yaml", cwd=home)
    said = done.stdout.removeprefix("reading the data, building the model and predicting its memory\n") + done.stderr
    return done.returncode, said


HOW_IT_ENDS = [
    ("exits", r"ended its process, which exited with status 0; check the values, or debug it with batchscout trial\n"),
    ("crashes", r"ended its process, which was killed by SIGSEGV; check the values, or debug it with batchscout trial\. Its last output:\n"
     r"Fatal Python error: Segmentation fault\n(.|\n)*hostile.py\", line 8 in crashes\n(.|\n)*"),
    ("raises", r"raised Unexpected: of all things \(in \S+/hostile.py, line 9\); check the values, or debug it with batchscout trial\n"),
    ("interrupts", r"raised KeyboardInterrupt \(in \S+/hostile.py, line 10\); check the values, or debug it with batchscout trial\n"),
]  # fmt: skip


@pytest.mark.parametrize("verb", ["run", "plan"])
@pytest.mark.parametrize(("does", "how"), HOW_IT_ENDS, ids=[does for does, _ in HOW_IT_ENDS])
def test_a_hostile_model_is_exit_code_2_and_one_message_that_names_it(
    home: Path, verb: str, does: str, how: str
) -> None:
    code, said = said_to(home, verb, model={"target": f"hostile:{does}"})
    assert code == 2, said
    assert re.fullmatch(rf"batchscout: model\.target 'hostile:{does}' with model\.kwargs {{}} {how}", said), said


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"data": {"target": "hostile:exits"}}, "data.target 'hostile:exits' with data.kwargs {}"),
        ({"loss": "exits:loss"}, "loss 'exits:loss'"),
    ],
)
def test_so_are_hostile_data_and_a_hostile_loss(home: Path, changes: dict[str, Any], named: str) -> None:
    code, said = said_to(home, "run", **changes)
    assert code == 2, said
    assert said.startswith(f"batchscout: {named} ended its process, which exited with status 0; check the values")


@pytest.mark.parametrize("place", ["first pass", "driver"])
def test_a_real_interrupt_in_a_constructor_stops_the_study_as_ever(home: Path, place: str) -> None:
    """It is told from a KeyboardInterrupt that the constructor raises by itself."""
    (home / "study.yaml").write_text(
        yaml.safe_dump(STUDY | {"model": {"target": "hostile:waits", "kwargs": {"place": place}}})
    )
    command, settings = (
        [sys.executable, "-m", "batchscout", "run", "study.yaml"],
        os.environ | {"PYTHONPATH": str(ROOT)},
    )
    with subprocess.Popen(command, cwd=home, env=settings, stderr=subprocess.PIPE, text=True) as driver:
        while not (home / "waits").exists():
            assert driver.poll() is None, driver.communicate()[1]
            time.sleep(0.05)
        driver.send_signal(signal.SIGINT)
        said = driver.communicate(timeout=HANGS_AFTER_SECONDS)[1]
    assert (driver.returncode, "stopped; nothing that was measured" in said) == (130, True), said
