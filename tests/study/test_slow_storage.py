"""A run directory whose storage does not answer is named while the driver waits for it."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import pytest

from batchscout.orchestrator.study import journal as module
from batchscout.orchestrator.study.events import RunBegan
from batchscout.orchestrator.study.journal import Journal
from batchscout.orchestrator.study.slow_storage import told_if_storage_hangs
from tests.support.processes import HANGS_AFTER_SECONDS

BEGAN = RunBegan(token="t")


@pytest.fixture
def said() -> list[str]:
    return []


def test_a_write_that_hangs_is_told_while_it_hangs_and_when_it_is_over(
    tmp_path: Path, said: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    is_told = threading.Event()

    def say(text: str) -> None:
        said.append(text)
        is_told.set()

    def hangs(file: int) -> None:
        assert is_told.wait(HANGS_AFTER_SECONDS), "nobody was told while the write hung"
        os.fdatasync(file)

    with Journal(tmp_path / "journal.jsonl", "s") as journal, told_if_storage_hangs(journal, say, seconds=0.05):
        with monkeypatch.context() as patched:
            patched.setattr(module.os, "fsync", hangs)
            journal.append(BEGAN)
        assert said[0].startswith(
            f"the storage of {tmp_path} has not answered for 0.05 s: the study waits, and goes on when it does"
        )
        assert said[1].startswith(f"the storage of {tmp_path} answers again, after ")
        assert len(said) == 2


def test_storage_that_answers_is_not_spoken_of(tmp_path: Path, said: list[str]) -> None:
    with (
        Journal(tmp_path / "journal.jsonl", "s") as journal,
        told_if_storage_hangs(journal, said.append, seconds=HANGS_AFTER_SECONDS),
    ):
        journal.append(BEGAN)
        journal.raise_if_lost()
    assert said == []
