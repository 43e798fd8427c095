"""A run goes on from its own checkpoint alone: from any other it would report what another run has found."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from typing import Any

import pytest

from batchscout.trainers.checkpoints import made_with
from batchscout.trainers.checkpoints.checkpoint import save_checkpoint
from batchscout.trainers.config import TrialConfig
from batchscout.trainers.loop import train
from batchscout.trainers.notices import NoticeKind
from batchscout.trainers.report import Known, Report
from tests.support.tiny import assert_equal_bit_by_bit, config, cpu_run, newest_state, stop_at

BUDGET = 96
RUN: dict[str, Any] = {"dropout": 0.2, "sample_budget": BUDGET, "rungs": (24, 48), "evaluations": (BUDGET,)}
DATA = "tests.support.tiny:data"


def ended(trial: TrialConfig, directory: Path, known: Known | None = None) -> tuple[list[Report], dict[str, Any]]:
    """What the run reported until its end, and how it ended."""
    told: list[Report] = []
    train(trial, told.append, directory, "second", known)
    return told, newest_state(directory / "checkpoints")


CHANGES: dict[str, tuple[dict[str, Any], str]] = {
    "seed": ({"seed": 1}, "seed 0, and this run has 1"),
    "weight decay": (
        {"optimizer": {"weight_decay": 0.5}},
        "optimizer.weight_decay 0.1, and this run has 0.5",
    ),
    "batch": ({"micro_batch_size": 8}, "an effective batch of 4, and this run has 8"),
    "budget": ({"sample_budget": 128}, "sample_budget 96, and this run has 128"),
    "data": (
        {"data": {"target": DATA, "kwargs": {"padded": False, "vocab_size": 20}}},
        "data.kwargs.vocab_size absent, and this run has 20",
    ),
    "number of samples": ({"data": {"target": DATA, "kwargs": {"padded": False, "num_val": 8}}}, "data.kwargs.num_val"),
}


@pytest.mark.slow
@pytest.mark.parametrize("change", CHANGES)
def test_another_runs_checkpoint_is_told_and_left_and_the_run_ends_as_in_a_directory_of_its_own(
    tmp_path: Path, change: str
) -> None:
    changes, said = CHANGES[change]
    train(config(**RUN), stop_at(48), tmp_path / "shared", "first")
    (left,) = (tmp_path / "shared" / "checkpoints").iterdir()
    trial = config(**(RUN | changes))
    told, state = ended(trial, tmp_path / "shared")
    alone, undisturbed = ended(trial, tmp_path / "alone")
    notice = told[0].notice
    assert notice is not None
    assert notice.kind is NoticeKind.FOREIGN_CHECKPOINT
    assert notice.text.startswith(f"{left} was made with {said}")
    aside = tmp_path / "shared" / "set_aside"
    assert notice.text.endswith(f"; the run begins again, and the file is set aside in {aside}")
    assert (aside / left.name).exists()
    assert_equal_bit_by_bit(state, undisturbed)
    assert [report.samples_seen for report in told[1:]] == [report.samples_seen for report in alone]


@pytest.mark.parametrize(
    "change", [{"keep_checkpoints": 3}, {"memory_limit_bytes": 2**33}, {"kept_checkpoints": (72,)}], ids=str
)
def test_what_decides_nothing_may_change(tmp_path: Path, change: dict[str, Any]) -> None:
    train(config(**RUN), stop_at(48), tmp_path, "first")
    told, _ = ended(config(**(RUN | change)), tmp_path)
    assert [report.notice for report in told] == [None] * len(told)
    assert told[0].samples_seen == 48


def test_a_field_that_is_new_had_its_default_before(tmp_path: Path) -> None:
    run = cpu_run(config(**RUN), steps=1)
    state = run.state(None)
    del state["configuration"]["check_parts"]
    state["configuration"]["optimizer"].pop("eps")
    save_checkpoint(tmp_path / "checkpoints", "first", 4, state, keep=1)
    again = cpu_run(config(**RUN))
    again.resume(tmp_path)
    assert again.num_steps == 1
    state["configuration"]["of_a_later_version"] = True
    save_checkpoint(tmp_path / "checkpoints", "first", 8, state, keep=1)
    with pytest.warns(UserWarning, match="was made with a configuration that this version cannot read; the run begins"):
        cpu_run(config(**RUN)).resume(tmp_path)


def test_shards_are_not_read_as_a_whole_model(tmp_path: Path) -> None:
    run = cpu_run(config())
    save_checkpoint(tmp_path / "checkpoints", "a", 4, run.state(None) | {"parallel": "fsdp"}, keep=1)
    with pytest.warns(UserWarning, match="was made with parallel: fsdp, and this run has ddp; the run begins again"):
        assert run.resume(tmp_path) is None


def test_other_text_in_the_same_file_is_other_data(tmp_path: Path, cache: Path) -> None:
    text = tmp_path / "train.txt"
    kwargs = {"train": str(text), "seq_len": 12, "tokenizer": "bytes"}
    trial = config(**RUN, data={"target": "text", "kwargs": kwargs})
    text.write_text("".join(f"line {i}\n" for i in range(300)))
    train(trial, stop_at(48), tmp_path / "run", "first")
    text.write_text(text.read_text()[::-1])
    as_in_a_new_process()
    told, _ = ended(trial, tmp_path / "run")
    assert told[0].notice is not None
    assert " was made with other data; the run begins again" in told[0].notice.text


def as_in_a_new_process() -> None:
    """Forget what a process reads once."""
    from batchscout.trainers.run import open_data

    open_data.cache_clear()
    made_with.code_when_first_asked.cache_clear()


def test_other_code_in_the_users_module_makes_another_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(tmp_path))
    module = tmp_path / "users_own_model.py"
    module.write_text("from batchscout.trainers.model.gpt import GPT\n\nModel = GPT\n")
    model = {"target": "users_own_model:Model", "kwargs": {"num_layers": 1, "num_heads": 2, "hidden_dim": 16}}
    trial = config(**RUN, model=model)
    train(trial, stop_at(48), tmp_path / "run", "first")
    module.write_text("from batchscout.trainers.model.gpt import GPT\n\n\nclass Model(GPT):\n    gain = 2\n")
    as_in_a_new_process()
    del sys.modules["users_own_model"]
    importlib.invalidate_caches()
    told, _ = ended(trial, tmp_path / "run")
    assert told[0].notice is not None
    assert " was made with other code in users_own_model.py; the run begins again" in told[0].notice.text


def test_where_the_journal_was_removed_or_emptied_the_run_begins_again(tmp_path: Path) -> None:
    ended(config(**RUN), tmp_path / "run")
    whole = newest_state(tmp_path / "run" / "checkpoints")
    (left,) = (tmp_path / "run" / "checkpoints").iterdir()
    told: list[Report] = []
    train(config(**RUN), told.append, tmp_path / "run", "third", Known(frozenset({"third"}), frozenset()))
    assert told[0].notice is not None
    expected = (
        f"{left} was saved by a run of the study (second) of which the journal does not tell; the run begins again"
    )
    assert told[0].notice.text.startswith(expected)
    assert [report.samples_seen for report in told[1:]] == [24, 48, BUDGET]
    assert_equal_bit_by_bit(newest_state(tmp_path / "run" / "checkpoints"), whole)


@pytest.mark.parametrize(
    ("evaluations", "goes_on_from"), [({24, 48}, "nothing is told"), ({24}, "48"), (set(), "24")], ids=str
)
def test_where_the_journal_was_cut_back_the_run_goes_on_from_what_it_still_tells(
    tmp_path: Path, evaluations: set[int], goes_on_from: str
) -> None:
    trial = config(**RUN, keep_checkpoints=3)
    _, whole = ended(trial, tmp_path / "run")
    told: list[Report] = []
    known = Known(frozenset({"second"}), frozenset(evaluations))
    train(trial, told.append, tmp_path / "run", "third", known)
    texts = [report.notice.text for report in told if report.notice]
    missing = sorted({24, 48} - evaluations)
    assert all(f"comes after the evaluation at {missing[0]} samples, of which the journal does not" in t for t in texts)
    assert all(f"the run goes on from {goes_on_from} samples" in text for text in texts)
    assert len(texts) == len(missing)
    assert [report.samples_seen for report in told if not report.notice] == [*missing, BUDGET]
    assert_equal_bit_by_bit(newest_state(tmp_path / "run" / "checkpoints"), whole)


def test_what_this_driver_has_saved_is_taken_whatever_it_knew_when_it_began(tmp_path: Path) -> None:
    """After the loss of a lane the trial is handed over with what the journal knew when it was first handed over."""
    known = Known(frozenset({"only"}), frozenset())
    report, told = stop_at(48), list[Report]()
    train(config(**RUN), report, tmp_path, "only", known)
    train(config(**RUN), told.append, tmp_path, "only", known)
    assert [report.samples_seen for report in told] == [48, BUDGET]
