"""A run that was stopped ends bit by bit as the run that was not, and no damaged or foreign file is in its way."""

from __future__ import annotations

import random
import re
import resource
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from batchscout.trainers.checkpoints.checkpoint import load_newest, save_checkpoint
from batchscout.trainers.checksums import Damaged, load_tensors, save_tensors
from batchscout.trainers.config import TrialConfig
from batchscout.trainers.device.memory import give_back, memory_of
from batchscout.trainers.files import StorageLost
from batchscout.trainers.loop import train
from batchscout.trainers.notices import NoticeKind
from batchscout.trainers.report import Answer, Report
from tests.support.damage import flipped
from tests.support.ranks import on_two_ranks
from tests.support.tiny import (
    assert_equal_bit_by_bit,
    config,
    in_fresh_process,
    newest_state,
    stop_at,
    train_until_killed,
)

BUDGET = 96
STOPPABLE: dict[str, Any] = {
    "dropout": 0.2,
    "padded": True,
    "micro_batch_size": 4,
    "gradient_accumulation_steps": 2,
    "sample_budget": BUDGET,
    "rungs": (24, 48),
    "evaluations": (BUDGET,),
}


def final_state(directory: Path) -> dict:
    state = newest_state(directory / "checkpoints")
    assert state["num_steps"] * state["effective_batch_size"] == BUDGET
    return state


@pytest.fixture(scope="module")
def never_stopped(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    directory = tmp_path_factory.mktemp("never-stopped")
    assert train(config(**STOPPABLE), lambda report: None, directory) == Answer.GO_ON
    return final_state(directory)


class Counting(torch.nn.Module):
    """Its scale grows in training, in place or as a new tensor, and its state leaves that out."""

    def __init__(self, vocab_size: int, *, anew: bool) -> None:
        super().__init__()
        self.embedding = torch.nn.Embedding(vocab_size, 8)
        self.blocks = torch.nn.ModuleList(Grown(anew) for _ in range(2))
        self.head = torch.nn.Linear(8, vocab_size)

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        values = self.embedding(input_ids)
        for block in self.blocks:
            values = block(values)
        return self.head(values)


class Grown(torch.nn.Module):
    scale: torch.Tensor
    table: torch.Tensor

    def __init__(self, anew: bool) -> None:
        super().__init__()
        self.linear, self.anew = torch.nn.Linear(8, 8), anew
        self.register_buffer("scale", torch.ones(()), persistent=False)
        self.register_buffer("table", torch.ones(64), persistent=False)

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        if self.training and self.anew:
            self.scale = self.scale * 1.1
        elif self.training:
            self.scale.mul_(1.1)
        return self.linear(values) * self.scale * self.table[0]


class ToldHowItWasMade(Counting):
    """Its state has what it was made with, as libraries save it, and what else a module of it keeps."""

    def __init__(self, vocab_size: int) -> None:
        super().__init__(vocab_size, anew=False)
        self.blocks.append(Steps())

    def state_dict(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        state = super().state_dict(*args, **kwargs)
        state["_made_with"] = {"activation": torch.nn.functional.gelu}
        return state

    def load_state_dict(self, state_dict: Any, *args: Any, **kwargs: Any) -> Any:
        assert state_dict.pop("_made_with")["activation"] is torch.nn.functional.gelu
        return super().load_state_dict(state_dict, *args, **kwargs)


class Steps(torch.nn.Module):
    """Its state is no tensor: how often it was called in training, which it multiplies by."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def get_extra_state(self) -> dict[str, int]:
        return {"calls": self.calls}

    def set_extra_state(self, state: dict[str, int]) -> None:
        self.calls = state["calls"]

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        self.calls += self.training
        return values * (1 + 0.1 * self.calls)


class Around(torch.nn.Module):
    def __init__(self, inner: torch.nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.inner(*args, **kwargs)


def told_how_it_was_made(*, vocab_size: int, seq_len: int, within: bool) -> torch.nn.Module:
    model = ToldHowItWasMade(vocab_size)
    return Around(model) if within else model


@pytest.mark.parametrize("within", [False, True])
def test_a_run_goes_on_with_what_is_no_tensor_in_the_state_of_its_model(tmp_path: Path, within: bool) -> None:
    trial = config(
        model={
            "target": "tests.trainers.checkpoints.test_checkpoint:told_how_it_was_made",
            "kwargs": {"within": within},
        },
        loss={"type": "cross_entropy", "targets": "targets"},
        sample_budget=64,
        rungs=(32,),
        evaluations=(64,),
        save_weights=True,
    )
    ends = list[Any]()
    for name, report in (("whole", stop_at()), ("parts", stop_at(32))):
        while not (weights := tmp_path / name / "weights.pt").exists():
            train(trial, report, tmp_path / name)
        ends.append(load_tensors(weights)["final"])
    torch.testing.assert_close(*ends, rtol=0, atol=0)
    assert newest_state(tmp_path / "parts" / "checkpoints")["model"][f"{'inner.' * within}blocks.2._extra_state"] == {
        "calls": 16
    }


@pytest.mark.parametrize("anew", [False, True])
@pytest.mark.parametrize("mode", ["none", "full"])
def test_a_run_goes_on_with_the_buffers_that_its_modules_do_not_save(tmp_path: Path, anew: bool, mode: str) -> None:
    model = {"target": "tests.trainers.checkpoints.test_checkpoint:Counting", "kwargs": {"anew": anew}}
    trial = config(
        model=model,
        loss={"type": "cross_entropy", "targets": "targets"},
        activation_checkpointing=mode,
        sample_budget=64,
        rungs=(32,),
        evaluations=(64,),
    )
    ends: dict[str, list[float]] = {"whole": [], "parts": []}
    for name, report in (("whole", stop_at()), ("parts", stop_at(32))):

        def said(one: Report, name: str = name, report: Callable[[Report], Answer] = report) -> Answer:
            ends[name] += [one.metrics["val_loss"]] if one.kind == "end" else []
            return report(one)

        while not ends[name]:
            train(trial, said, tmp_path / name)
    assert ends["whole"] == ends["parts"]
    saved = newest_state(tmp_path / "parts" / "checkpoints")["buffers"]
    assert set(saved) == {"blocks.0.scale", "blocks.1.scale"}, "what does not move is not kept"


@pytest.mark.parametrize("optimizer", [{"type": "adamw"}, {"type": "sgd"}])
def test_a_run_stopped_at_two_rungs_ends_bit_by_bit_as_the_one_that_was_not(
    tmp_path: Path, optimizer: dict[str, Any]
) -> None:
    trial = config(optimizer=optimizer, **STOPPABLE)
    train(trial, lambda report: None, tmp_path / "whole")
    report, answers = stop_at(24, 48), []
    while not answers or answers[-1] == Answer.STOP:
        torch.manual_seed(len(answers) + 1000)  # what else the process draws is of no consequence
        answers.append(train(trial, report, tmp_path / "parts"))
    assert answers == [Answer.STOP, Answer.STOP, Answer.GO_ON]
    assert_equal_bit_by_bit(final_state(tmp_path / "parts"), final_state(tmp_path / "whole"))


def test_a_run_whose_process_died_ends_bit_by_bit_as_the_one_that_did_not(
    tmp_path: Path, never_stopped: dict[str, Any]
) -> None:
    train_until_killed(config(**STOPPABLE), tmp_path, 48)
    train(config(**STOPPABLE), lambda report: None, tmp_path)
    assert_equal_bit_by_bit(final_state(tmp_path), never_stopped)


def split(world_size: int, micro_batch_size: int, gradient_accumulation_steps: int) -> TrialConfig:
    """The same effective batch, without the dropout that differs between ranks."""
    changes: dict[str, Any] = STOPPABLE | {
        "dropout": 0.0,
        "world_size": world_size,
        "micro_batch_size": micro_batch_size,
        "gradient_accumulation_steps": gradient_accumulation_steps,
    }
    return config(**changes)


def as_ranks(directory: str, *rungs: int) -> str:
    return train(split(2, 2, 2), stop_at(*rungs), Path(directory))


@pytest.mark.slow
@pytest.mark.parametrize("ranks_first", [True, False])
@pytest.mark.parametrize("one_rank", [(1, 2, 4), (1, 8, 1)])
def test_a_run_goes_on_at_another_world_size_with_the_samples_that_were_next(
    tmp_path: Path, one_rank: tuple[int, int, int], ranks_first: bool
) -> None:
    alone, whole, parts = split(*one_rank), tmp_path / "whole", tmp_path / "parts"
    train(split(1, 4, 2), lambda report: None, whole)
    if ranks_first:
        assert on_two_ranks(as_ranks, tmp_path, str(parts), 48) == [Answer.STOP, Answer.STOP]
        assert train(alone, lambda report: None, parts) == Answer.GO_ON
    else:
        assert train(alone, stop_at(48), parts) == Answer.STOP
        assert on_two_ranks(as_ranks, tmp_path, str(parts)) == [Answer.GO_ON, Answer.GO_ON]
    ours, theirs = final_state(parts)["model"], final_state(whole)["model"]
    for name, value in theirs.items():
        torch.testing.assert_close(ours[name], value, rtol=1e-4, atol=1e-5)


def flip_a_weight(path: Path) -> None:
    """Change one bit of the embedding, as a disk may; torch loads such a file."""
    content = path.read_bytes()
    weights = torch.load(path, weights_only=True)["model"]["token_embedding.weight"].numpy().tobytes()
    path.write_bytes(flipped(content, 8 * content.index(weights) + 30))
    torch.load(path, weights_only=True)


@pytest.mark.parametrize(("keep", "then"), [(2, "goes on from 24 samples"), (1, "begins again")])
def test_a_flipped_bit_in_the_newest_checkpoint_is_told_and_a_good_one_goes_on(
    tmp_path: Path, never_stopped: dict[str, Any], keep: int, then: str
) -> None:
    trial, told = config(**STOPPABLE, keep_checkpoints=keep), []
    assert train(trial, stop_at(48), tmp_path) == Answer.STOP
    newest = max((tmp_path / "checkpoints").glob("*.pt"))
    flip_a_weight(newest)
    assert train(trial, told.append, tmp_path) == Answer.GO_ON
    notice = told[0].notice
    assert notice.kind is NoticeKind.DAMAGED_CHECKPOINT
    said = rf"{newest} is damaged: its checksum is [0-9a-f]{{8}}, .*; the run {then}, and the file is set aside in {tmp_path}/set_aside"
    assert re.fullmatch(said, notice.text)
    assert (tmp_path / "set_aside" / newest.name).exists()
    assert_equal_bit_by_bit(final_state(tmp_path), never_stopped)
    assert [report.notice for report in told[1:]] == [None] * len(told[1:])


DAMAGES = {"empty": b"", "text": b"not a checkpoint", "zeros": bytes(4096), "pickle": b"\x80\x02}q\x00."}


@pytest.mark.parametrize("damage", [*DAMAGES, "half"])
def test_every_kind_of_damage_is_passed_over(tmp_path: Path, damage: str) -> None:
    save_checkpoint(tmp_path / "own", "a", 8, {"number": torch.tensor(8)}, keep=2)
    newest = save_checkpoint(tmp_path / "own", "a", 16, {"number": torch.tensor(16)}, keep=2)
    whole = newest.read_bytes()
    newest.write_bytes(DAMAGES.get(damage, whole[: len(whole) // 2]))
    with pytest.warns(UserWarning, match="is damaged"):
        found = newest_state(tmp_path / "own")
    assert found == {"number": torch.tensor(8)}


def test_no_flipped_bit_changes_what_is_loaded(tmp_path: Path) -> None:
    path, weights = tmp_path / "some.pt", torch.arange(64.0)
    save_tensors(path, {"weights": weights, "seed": 3, "report": None})
    content = path.read_bytes()
    bits = random.Random(0).sample(range(8 * len(content)), 1000)
    num_found = 0
    for bit in bits:
        path.write_bytes(flipped(content, bit))
        try:
            loaded = load_tensors(path)
        except Damaged:
            num_found += 1
            continue
        assert torch.equal(loaded.pop("weights"), weights), f"bit {bit}"
        assert loaded == {"seed": 3, "report": None}, f"bit {bit}"
    assert num_found > 980, "a flip in the checksum itself may go unnoticed, and no other"


def test_running_out_of_memory_while_loading_is_no_damage(tmp_path: Path) -> None:
    save_checkpoint(tmp_path, "a", 8, {"weights": torch.zeros(256 * 2**20 // 4)}, keep=2)
    give_back()  # what tests before have left would make room inside the limit, and some of it may not be given back
    with memory_of(torch.device("cpu")).held_to(10 * 2**20), pytest.raises(RuntimeError, match="can't allocate memory"):
        load_newest(tmp_path)


def test_without_a_readable_checkpoint_there_is_nothing_to_go_on_from(tmp_path: Path) -> None:
    assert load_newest(tmp_path / "absent") is None
    path = save_checkpoint(tmp_path / "own", "a", 8, {}, keep=1)
    path.write_bytes(b"")
    with pytest.warns(UserWarning, match="is damaged"):
        assert load_newest(tmp_path / "own") is None


def test_a_half_written_file_is_not_a_checkpoint(tmp_path: Path) -> None:
    save_checkpoint(tmp_path, "a", 8, {"number": 8}, keep=1)
    (tmp_path / f".{16:012d}-a.pt.1234.partial").write_bytes(b"PK half of a file")
    assert newest_state(tmp_path) == {"number": 8}
    save_checkpoint(tmp_path, "a", 16, {"number": 16}, keep=1)
    assert newest_state(tmp_path) == {"number": 16}


class Unwritable:
    def __reduce__(self) -> str:
        raise RuntimeError("it cannot be written")


def test_a_write_that_fails_leaves_what_was_there(tmp_path: Path) -> None:
    before = save_checkpoint(tmp_path, "a", 8, {"number": 8}, keep=1)
    with pytest.raises(RuntimeError, match="cannot be written"):
        save_checkpoint(tmp_path, "a", 16, {"number": 16, "more": Unwritable()}, keep=1)
    assert list(tmp_path.iterdir()) == [before]


def test_keep_counts_all_older_files_whoever_wrote_them_and_leaves_newer_ones(tmp_path: Path) -> None:
    """A newer one is what a rank of a killed driver still writes."""
    newer = save_checkpoint(tmp_path, "theirs", 48, {}, keep=1)
    for samples in (8, 16):
        save_checkpoint(tmp_path, "theirs", samples, {}, keep=9)
    for samples in (16, 24, 32, 40):
        save_checkpoint(tmp_path, "ours", samples, {}, keep=2)
    assert sorted(tmp_path.iterdir()) == [tmp_path / f"{samples:012d}-ours.pt" for samples in (32, 40)] + [newer]
    save_checkpoint(tmp_path, "ours", 48, {}, keep=1)
    assert [path.name for path in tmp_path.iterdir()] == [f"{48:012d}-ours.pt"]


@pytest.mark.parametrize("keep", [1, 2])
def test_six_resumes_leave_as_many_checkpoints_as_are_to_be_kept(tmp_path: Path, keep: int) -> None:
    rungs = tuple(range(8, 56, 8))
    trial = config(**(STOPPABLE | {"rungs": rungs, "keep_checkpoints": keep}))
    answers = [train(trial, stop_at(rung), tmp_path, f"driver-{rung}") for rung in (*rungs, BUDGET)]
    assert answers == [Answer.STOP] * 6 + [Answer.GO_ON]
    kept = sorted(path.name for path in (tmp_path / "checkpoints").iterdir())
    assert kept == ["000000000048-driver-48.pt", "000000000096-driver-96.pt"][-keep:]


def test_the_newest_is_the_one_with_the_most_samples_whoever_wrote_it(tmp_path: Path) -> None:
    save_checkpoint(tmp_path, "z", 9_999, {"samples": 9_999}, keep=1)
    save_checkpoint(tmp_path, "a", 10_000, {"samples": 10_000}, keep=1)
    assert newest_state(tmp_path) == {"samples": 10_000}


def save_on_a_full_disk(directory: str) -> tuple[str, list[str]]:
    folder, state = Path(directory), {"w": torch.zeros(100_000)}
    save_checkpoint(folder, "a", 4, {"w": torch.ones(10)}, keep=1)
    resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, resource.RLIM_INFINITY))
    with pytest.raises(StorageLost) as raised:
        save_checkpoint(folder, "a", 8, state, keep=1)
    return str(raised.value), sorted(path.name for path in folder.iterdir())


@pytest.mark.slow
def test_a_full_disk_is_named_and_leaves_the_checkpoint_before(tmp_path: Path) -> None:
    said, names = in_fresh_process(save_on_a_full_disk, str(tmp_path))
    assert said == f"{tmp_path}/000000000008-a.pt could not be written: File too large"
    assert names == ["000000000004-a.pt"]
