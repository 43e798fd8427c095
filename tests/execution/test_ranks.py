"""What a rank is told, and what it says of how its trial ended, without Ray."""

from __future__ import annotations

import errno
import inspect
import os
import re
import socket
import sys
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType, SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
import torch

from batchscout.orchestrator.config.trial import base_trial
from batchscout.orchestrator.execution import ranks
from batchscout.orchestrator.execution.group import require_cuda, use_its_gpu
from batchscout.orchestrator.execution.ranks import (
    MOST_OF_A_TRACEBACK,
    LaneRecycled,
    Place,
    memory_reason,
    run_trial,
    trials_read_by,
    where_a_gpu_failed,
    where_paths_begin,
    write_traceback,
)
from batchscout.orchestrator.study.messages import Assignment, Message
from batchscout.trainers import loop
from batchscout.trainers.checkpoints.made_with import code_when_first_asked
from batchscout.trainers.device.host_memory import HostMemory
from batchscout.trainers.files import StorageLost
from batchscout.trainers.user_code import code_of
from tests.support import tiny
from tests.support.silent_place import SilentPlace
from tests.support.studies import tiny_study


def test_out_of_memory_is_said_in_sizes() -> None:
    config = base_trial(tiny_study(memory_limit="128MiB"), 128 * 2**20)
    cpu = "DefaultCPUAllocator: can't allocate memory: you tried to allocate 8388608 bytes. Error code 12"
    assert memory_reason(cpu, config) == "8 MiB more did not fit into the limit of 128 MiB"
    cuda = "CUDA out of memory. Tried to allocate 2.50 GiB. GPU 0 has a total capacity of 79 GiB"
    on_device = config.model_copy(update={"memory_limit_bytes": None})
    assert memory_reason(cuda, on_device) == "2.50 GiB more did not fit into the device"


def test_the_traceback_of_an_exception_of_50_mb_keeps_its_beginning_and_its_end(tmp_path: Path) -> None:
    try:
        raise RuntimeError(f"it began {'x' * 50_000_000} and ended")
    except RuntimeError:
        write_traceback(Assignment("a", "{}", str(tmp_path), "token"), rank=1)
    kept = (tmp_path / "error-rank1.log").read_text()
    assert len(kept) <= MOST_OF_A_TRACEBACK
    assert "in test_the_traceback_of_an_exception_of_50_mb" in kept
    assert "RuntimeError: it began xxx" in kept
    assert kept.rstrip().endswith("xxx and ended")


def of_rank_0(directory: Path, code: Mapping[str, str] = MappingProxyType({}), **changes: Any) -> tuple[Message, bool]:
    """What it says of a trial last, and whether its process may go on."""
    assignment = Assignment("grid-a", tiny.config(**changes).model_dump_json(), str(directory), token="t")
    said, may_go_on = run_trial(assignment, SilentPlace(dispatcher=None, lane="lane", rank=0, code=code))
    assert said is not None
    return said, may_go_on


def last_word(directory: Path, **changes: Any) -> Message:
    return of_rank_0(directory, **changes)[0]


@pytest.mark.parametrize(
    ("error", "outcome", "reason"),
    [
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.50 GiB."),
         "out_of_memory", "2.50 GiB more did not fit into the device"),
        (StorageLost("there is no room for the checkpoint"), "no_storage", "there is no room for the checkpoint"),
        (OSError(errno.EIO, "of a disk"), "no_storage", "the storage failed under grid-a: [Errno 5] of a disk"),
    ],
)  # fmt: skip
@pytest.mark.parametrize("world_size", [1, 2])
def test_a_rank_alone_may_go_on_after_it_had_no_room_and_one_of_several_may_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, world_size: int, error: Exception, outcome: str, reason: str
) -> None:
    """Of several, the others wait in a collective for this one."""
    monkeypatch.setattr(loop, "warm_up", Mock(side_effect=error))
    said, may_go_on = of_rank_0(tmp_path, world_size=world_size)
    assert (said.outcome, said.reason, may_go_on) == (outcome, reason, world_size == 1)


@pytest.mark.parametrize(
    ("limit_bytes", "expected"),
    [(8 << 30, "out_of_memory"), (None, "failed")],
    ids=["limit nearly reached", "no limit"],
)
def test_what_cudnn_swallowed_is_out_of_memory_where_the_runs_own_limit_leaves_little(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, limit_bytes: int | None, expected: str
) -> None:
    """The device itself has plenty left, and cuDNN does not say that torch's allocator refused it."""
    without_engine = RuntimeError("GET was unable to find an engine to execute this computation")
    gpu = torch.device("cuda", 0)
    monkeypatch.setattr(loop, "train", Mock(side_effect=without_engine))
    monkeypatch.setattr("batchscout.trainers.device.device.pick_device", lambda: gpu)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (70 << 30, 80 << 30))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda _: (8 << 30) - (1 << 20))
    assert last_word(tmp_path, memory_limit_bytes=limit_bytes).outcome == expected


NCCL_WITHOUT_ROOM = (
    "NCCL error in: /pytorch/torch/csrc/distributed/c10d/NCCLUtils.cpp:94, unhandled cuda error (run with NCCL_DEBUG=INFO for "
    "details), NCCL version 2.27.5\nncclUnhandledCudaError: Call to CUDA function failed.\nLast error:\nCuda failure 2 'out of memory'"
)
NCCL_WITHOUT_PEER = (
    "NCCL error in: /pytorch/torch/csrc/distributed/c10d/NCCLUtils.cpp:94, remote process exited or there was a network error, "
    "NCCL version 2.27.5\nncclRemoteError: A call failed possibly due to a network error or a remote process exiting prematurely."
)


def test_a_collective_without_room_is_out_of_memory_and_one_without_a_peer_is_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """NCCL says both in an error of its own."""
    monkeypatch.setattr(ranks, "SECONDS_TO_TELL_OF_A_PEER", 0)
    both = [RuntimeError(text) for text in (NCCL_WITHOUT_ROOM, NCCL_WITHOUT_PEER)]
    monkeypatch.setattr(loop, "warm_up", Mock(side_effect=both))
    said, may_go_on = of_rank_0(tmp_path, world_size=2)
    assert (said.outcome, may_go_on) == ("out_of_memory", False)
    with pytest.raises(LaneRecycled, match="a collective failed: NCCL error in"):
        of_rank_0(tmp_path, world_size=2)


class NotedCalls:
    """Takes the calls of a Ray actor, and notes them."""

    def __init__(self) -> None:
        self.noted: list[tuple[str, tuple[Any, ...]]] = []

    def __getattr__(self, name: str) -> Any:
        return SimpleNamespace(remote=lambda *said, **more: self.noted.append((name, (*said, *more.items()))))


@pytest.mark.parametrize(("kept_bytes", "goes_on"), [(0, True), (None, False)])
def test_a_process_whose_device_no_longer_answers_says_its_last_word_and_takes_no_other_trial(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kept_bytes: int | None, goes_on: bool
) -> None:
    dispatcher = NotedCalls()
    monkeypatch.setattr(ranks.ray, "get", lambda answer: answer)
    monkeypatch.setattr(HostMemory, "bytes_kept", lambda _: kept_bytes)
    assignment = Assignment("a", tiny.config(sample_budget=4).model_dump_json(), str(tmp_path), token="t")
    assert ranks.run_and_say(assignment, Place(dispatcher=dispatcher, lane="lane", rank=0)) == goes_on
    (last, (_, said)), freed = dispatcher.noted[-2:]
    assert (last, said.outcome) == ("say", "complete")
    assert freed == ("freed", ("lane",))


@pytest.mark.parametrize(("kept_bytes", "calls"), [(0, []), (None, ["heartbeat", "until_freed"])])
def test_a_rank_that_is_not_fit_for_another_trial_lets_rank_0_say_what_came_of_this_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kept_bytes: int | None, calls: list[str]
) -> None:
    """Its own end is that of the whole group, and rank 0 may still be saving."""
    dispatcher = NotedCalls()
    monkeypatch.setattr(ranks.ray, "get", lambda answer: answer)
    monkeypatch.setattr(HostMemory, "bytes_kept", lambda _: kept_bytes)
    monkeypatch.setattr(ranks, "run_trial", lambda *_: (None, True))
    place = Place(dispatcher=dispatcher, lane="lane", rank=1)
    assert ranks.run_and_say(Assignment("a", "{}", str(tmp_path), token="t"), place) == (kept_bytes == 0)
    assert [name for name, _ in dispatcher.noted] == calls


def test_a_rank_that_ray_has_given_no_gpu_uses_none_and_sees_none(monkeypatch: pytest.MonkeyPatch) -> None:
    """Though torch could use one: Ray hides none from a process that has asked for none."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    monkeypatch.setenv("ACCELERATE_TORCH_DEVICE", "cuda:0")
    monkeypatch.setattr("ray.get_gpu_ids", list)
    use_its_gpu()
    assert (os.environ["CUDA_VISIBLE_DEVICES"], os.environ["ACCELERATE_TORCH_DEVICE"]) == ("", "cpu")


def test_a_gpu_that_torch_cannot_use_is_refused_with_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    said = rf"Ray has a GPU for this rank on \S+, and torch {re.escape(torch.__version__)} can use none there: install "
    with pytest.raises(ValueError, match=said):
        require_cuda()


def data_on_a_failed_disk() -> None:
    """Reads a file that the kernel refuses with EIO, as it does for a bad sector."""
    with open("/proc/self/mem", "rb") as file:
        file.read(1)


def data_that_is_not_there() -> None:
    Path("/absent/train.bin").read_bytes()


def test_a_trial_is_not_to_blame_for_storage(tmp_path: Path) -> None:
    """Neither for its own directory, which is a file here, nor for a disk that fails under its data."""
    (tmp_path / "file").write_text("")
    own = last_word(tmp_path / "file", sample_budget=8, evaluations=(4,))
    assert own.outcome == "no_storage"
    assert re.fullmatch(rf"{tmp_path}/file/\S+ could not be written: File exists", own.reason), own.reason
    failed = last_word(tmp_path, data={"target": f"{__name__}:data_on_a_failed_disk"})
    assert failed.outcome == "no_storage"
    assert failed.reason == "the storage failed under grid-a: [Errno 5] Input/output error"
    absent = last_word(tmp_path, data={"target": f"{__name__}:data_that_is_not_there"})
    assert absent.outcome == "failed", "a wrong path is the user's"


def test_a_new_process_runs_no_code_but_that_which_the_study_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A process that has run a trial goes on with what it has imported; a comment is no code."""
    (file := tmp_path / "my_data.py").write_text("from tests.support.tiny import data\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    found, keys = code_of(["my_data:data"]), {"data": {"target": "my_data:data"}, "sample_budget": 8}
    code_when_first_asked.cache_clear()
    assert of_rank_0(tmp_path / "a", found, **keys)[0].outcome == "complete"
    file.write_text("from tests.support.tiny import data  # of the tests\n\nDROPOUT = 0.1\n")
    assert of_rank_0(tmp_path / "b", found, **keys)[0].outcome == "complete"
    code_when_first_asked.cache_clear()
    said, may_go_on = of_rank_0(tmp_path / "c", found, **keys)
    assert (said.outcome, may_go_on) == ("other_code", True)
    assert said.reason.startswith(
        "my_data.py changed while this study ran, and trials of old and new code do not compare"
    )
    file.write_text("from tests.support.tiny import data  # of the tests\n")
    code_when_first_asked.cache_clear()
    assert of_rank_0(tmp_path / "d", found, **keys)[0].outcome == "complete"


def data_that_gives_up() -> None:
    sys.exit(3)


class Speechless(RuntimeError):
    def __str__(self) -> str:
        raise ValueError("it cannot be said")


def data_that_fails_without_words() -> None:
    raise Speechless


def data_that_interrupts() -> None:
    raise KeyboardInterrupt


LINE = inspect.getsourcelines(data_that_interrupts)[1] + 1


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        ("data_that_gives_up", "exited with status 3 (sys.exit)"),
        ("data_that_fails_without_words", "Speechless"),
        ("data_that_interrupts", f"KeyboardInterrupt (in {__file__}, line {LINE})"),
    ],
)
def test_whatever_the_users_code_raises_fails_its_trial_and_not_its_lane(
    tmp_path: Path, data: str, reason: str
) -> None:
    said = last_word(tmp_path, data={"target": f"{__name__}:{data}"})
    assert (said.outcome, said.reason) == ("failed", reason)
    assert f"in {data}" in (tmp_path / "error-rank0.log").read_text()


def test_a_relative_path_that_leads_nowhere_is_told_with_where_it_began(home: Path) -> None:
    for path, is_told in (("rel.txt", True), (home / "abs.txt", False)):
        with pytest.raises(FileNotFoundError) as raised:
            Path(path).read_text()
        told = where_paths_begin(raised.value)
        assert told.startswith(f" (relative paths begin at {home} on {socket.gethostname()}: ") == is_told
        assert bool(told) == is_told
    assert where_paths_begin(FileNotFoundError("no file, said by somebody")) == ""


def test_what_a_gpu_says_of_an_earlier_kernel_is_told_with_how_to_find_the_call() -> None:
    late = RuntimeError("CUDA error: CUBLAS_STATUS_EXECUTION_FAILED when calling `cublasGemmEx(...)`")
    assert "CUDA_LAUNCH_BLOCKING=1" in where_a_gpu_failed(late)
    assert "CUDA_LAUNCH_BLOCKING=1" in where_a_gpu_failed(torch.AcceleratorError("CUDA error: device-side assert"))
    assert where_a_gpu_failed(RuntimeError("mat1 and mat2 shapes cannot be multiplied")) == ""
    assert where_a_gpu_failed(ValueError("CUDA error: words of a user's own")) == ""


@pytest.mark.parametrize(
    ("changes", "read"),
    [
        ({}, set[str]()),
        ({"reference_weights": "../equivalence-m16k1/weights.pt"}, {"equivalence-m16k1"}),
        ({"branch_from": {"directory": "../train-m8k2", "samples": 32}}, {"train-m8k2"}),
        ({"branch_from": {"directory": "/mnt/other/run", "samples": 32}}, set[str]()),
    ],
)
def test_what_a_trial_reads_of_others_is_told_by_its_keys(changes: dict[str, Any], read: set[str]) -> None:
    assert trials_read_by(tiny.config(**changes)) == read
