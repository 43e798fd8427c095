"""A script may parse its arguments as it is imported."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from batchscout.trainers.config import resolve

SCRIPT = """
import argparse
parser = argparse.ArgumentParser()
parser.add_argument("--width", type=int, {how})
width = parser.parse_args().width
"""


@pytest.fixture
def argv(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What this process was called with, which no script knows."""
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "script_with_defaults.py").write_text(SCRIPT.format(how="default=3"))
    (tmp_path / "script_that_must_be_told.py").write_text(SCRIPT.format(how="required=True"))
    monkeypatch.setattr(sys, "argv", given := ["batchscout", "plan", "study.yaml"])
    return given


def test_a_script_that_is_imported_is_not_given_the_arguments_of_this_process(argv: list[str]) -> None:
    assert resolve("script_with_defaults:width") == 3
    assert sys.argv is argv


def test_one_that_misses_an_argument_is_refused_with_its_own_line(argv: list[str], tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=rf"exit code 2 \(in {tmp_path}/script_that_must_be_told.py, line 5\).*args: "):
        resolve("script_that_must_be_told:width")
    assert sys.argv is argv
