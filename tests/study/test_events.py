"""What users' code says reaches the journal, and has a bound there."""

from __future__ import annotations

from pathlib import Path

from orchestrator.study.causes import Cause
from orchestrator.study.events import MOST_CHARACTERS, Concluded, Ended, Proposed
from orchestrator.study.journal import Journal, replay
from orchestrator.study.trial import TrialState
from tests.support.tiny import config


def test_a_reason_of_50_mb_takes_few_kb_and_reads_back_as_it_was_told(tmp_path: Path) -> None:
    path, reason = tmp_path / "journal.jsonl", f"RuntimeError: it began {'x' * 50_000_000} and ended"
    wanted = Proposed(
        id="a", stage="grid", config=config(), candidate="a", role="", protected=False, fresh_process=False, round=None,
        control=False, expected={},
    )  # fmt: skip
    end = Ended(id="a", state=TrialState.FAILED, cause=Cause.FAILED, reason=reason, metrics={}, seconds=1.0)
    with Journal(path, "long") as journal:
        for event in (wanted, end, Concluded(stage="grid", ok=False, reason=reason, notes=(reason, "short"))):
            journal.append(event)
        told = journal.study
    assert path.stat().st_size < 20_000
    kept = told.trials["a"].reason
    assert len(kept) <= MOST_CHARACTERS
    assert kept.startswith("RuntimeError: it began xxx")
    assert kept.endswith("xxx and ended")
    assert " ... (50,000,033 characters in all) ... " in kept
    assert replay(path, "long") == told


def test_a_reason_that_is_cut_may_be_cut_in_the_middle_of_what_utf_8_cannot_hold() -> None:
    event = Concluded(stage="grid", ok=False, reason="\ud800" * 5000)
    assert event.reason.encode().startswith(b"???")
