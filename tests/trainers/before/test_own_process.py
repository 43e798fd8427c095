"""A process of its own is asked and answers, and however it ends, that is told."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from batchscout.trainers.before.own_process import own_process

OTHER_END = """
import os, sys
from batchscout.trainers.before.own_process import asked

{}
"""


def answers_of(folder: Path, code: str, question: Any = None) -> tuple[list[Any], int, str]:
    """(its answers, its exit code, its last words)."""
    (folder / "other_end.py").write_text(OTHER_END.format(code))
    with own_process("other_end", question, [str(folder), *sys.path]) as process:
        return list(process.answers()), process.exit_code(), process.last_words()


def test_what_it_prints_is_no_answer_and_it_is_told_of_no_other_arguments(tmp_path: Path) -> None:
    code = "with asked() as (question, answer):\n    print('mine')\n    answer([question, sys.argv[1:]])\n    answer(2)"
    assert answers_of(tmp_path, code, {"a": 1}) == ([[{"a": 1}, []], 2], 0, "mine\n")


@pytest.mark.parametrize(
    ("fault", "exit_code", "said"),
    [
        ("raise RuntimeError('the fault')", 1, "RuntimeError: the fault"),
        ("sys.exit('the fault')", 1, "the fault"),
        ("os._exit(3)", 3, "loaded"),
    ],
)
def test_the_last_that_it_says_is_heard_after_its_last_answer(
    tmp_path: Path, fault: str, exit_code: int, said: str
) -> None:
    code = f"with asked() as (question, answer):\n    answer(1)\n    print('loaded')\n    {fault}"
    answers, code_of_end, last_words = answers_of(tmp_path, code)
    assert (answers, code_of_end, last_words.splitlines()[-1]) == ([1], exit_code, said)


def test_one_that_ends_without_having_read_its_question_is_told_by_its_end(tmp_path: Path) -> None:
    """The question is larger than what the pipe holds, so it is still being asked when the process ends."""
    assert answers_of(tmp_path, "sys.exit(4)", ["a long question"] * 100_000) == ([], 4, "")


def test_it_puts_away_what_it_has_to_before_it_is_ended(tmp_path: Path) -> None:
    code = (
        "import atexit\natexit.register(lambda: open('{}', 'w').close())\nwith asked() as (_, answer):\n    answer(1)"
    )
    (tmp_path / "other_end.py").write_text(OTHER_END.format(code.format(tmp_path / "put away")))
    with own_process("other_end", None, [str(tmp_path), *sys.path]) as process:
        assert next(process.answers()) == 1
    assert (tmp_path / "put away").exists()
