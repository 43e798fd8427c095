"""A run with data workers is the run without them, bit by bit; they end with it; and what goes wrong in one is said in plain words."""

from __future__ import annotations

import multiprocessing
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset

from batchscout.trainers.config import TrialConfig
from batchscout.trainers.data.draws import drawing_apart, drawing_from
from batchscout.trainers.data.feed import Ask, Feed
from batchscout.trainers.data.loaders import read_by, workers_of
from batchscout.trainers.data.workers import WorkerFault, codes_of_ended, ended_early
from batchscout.trainers.device.out_of_memory import is_out_of_memory
from batchscout.trainers.loop import train
from batchscout.trainers.report import Answer, Report
from batchscout.trainers.reporting.evaluation import evaluate
from batchscout.trainers.sources.held_out import held_out
from batchscout.trainers.speed import throughput
from batchscout.trainers.speed.throughput import NUM_WARMUP_STEPS, Pace, StepClock
from tests.support import fed
from tests.support.processes import HANGS_AFTER_SECONDS, until
from tests.support.tiny import ROOT, assert_equal_bit_by_bit, config, cpu_run, in_fresh_process, newest_state, stop_at

pytestmark = pytest.mark.slow


def trial(target: str = "drawing", workers: int | None = None, **changes: Any) -> TrialConfig:
    kwargs = changes.pop("kwargs", {})
    data = {"target": f"tests.support.fed:{target}", "kwargs": kwargs, "workers": workers}
    return config(data=data, **changes)


RAMP = [{"from_samples": 40, "gradient_accumulation_steps": 3, "learning_rate": 2e-2}]
LONG: dict[str, Any] = {
    "micro_batch_size": 2, "gradient_accumulation_steps": 2, "sample_budget": 400, "evaluations": (100,),
    "rungs": (32, 220), "ramp": RAMP, "noise_snapshots": (240,), "dropout": 0.1,
}  # fmt: skip


@pytest.mark.parametrize("workers", [1, 2])
def test_any_number_of_workers_trains_what_none_does(workers: int, tmp_path: Path) -> None:
    """Over phases, passes, evaluations, a snapshot and a stop, with a set that draws from all generators and dropout in the model."""
    for name, number in (("none", 0), ("some", workers)):
        one = trial(workers=number, **LONG)
        listener = stop_at(32)
        assert train(one, listener, tmp_path / name) == Answer.STOP
        assert train(one, listener, tmp_path / name) == Answer.GO_ON
    assert_equal_bit_by_bit(newest_state(tmp_path / "none/checkpoints"), newest_state(tmp_path / "some/checkpoints"))
    assert data_workers() == []


def data_workers() -> list[Any]:
    """The workers that live, of all children of this process: other tests' ranks may wait for more to do."""
    return [child for child in multiprocessing.active_children() if not child.name.startswith("Spawn")]


def test_a_run_may_go_on_with_other_workers(tmp_path: Path) -> None:
    train(trial(workers=0, **LONG), lambda report: None, tmp_path / "whole")
    assert train(trial(workers=2, **LONG), stop_at(32), tmp_path / "parts") == Answer.STOP
    train(trial(workers=1, **LONG), lambda report: None, tmp_path / "parts")
    assert_equal_bit_by_bit(newest_state(tmp_path / "whole/checkpoints"), newest_state(tmp_path / "parts/checkpoints"))


def test_an_evaluation_is_the_same_each_time_with_any_number_of_workers() -> None:
    found = []
    for workers in (0, 2):
        run = cpu_run(trial(workers=workers, micro_batch_size=3, evaluation_samples=8))
        run.val_set = run.train_set  # which draws
        found += [evaluate(run)["val_loss"] for _ in range(2)]
        assert data_workers() == []
    assert len(set(found)) == 1


def test_what_a_set_draws_is_left_to_no_other() -> None:
    torch.manual_seed(3)
    before = torch.get_rng_state()
    with drawing_from(5):
        first = fed.drawn({"input_ids": torch.zeros(4, dtype=torch.long)}, 100)["input_ids"]
    assert torch.equal(torch.get_rng_state(), before)
    with drawing_apart(), drawing_from(5):
        assert torch.equal(fed.drawn({"input_ids": torch.zeros(4, dtype=torch.long)}, 100)["input_ids"], first)


@pytest.mark.parametrize(("has", "asked", "gets"), [(2, None, 2), (0, None, 0), (2, 0, 0), (0, 1, 1)])
def test_a_loaders_workers_are_kept_unless_the_study_file_says_otherwise(
    has: int, asked: int | None, gets: int
) -> None:
    run = cpu_run(trial("loaders", asked, kwargs={"num_workers": has}))
    assert run.feed.workers.number == gets
    assert run.metrics()["data_workers"] == gets
    assert run.feed.workers.prefetch_factor == (3 if has else 2)


class OpenedInItsWorker(Dataset[Any]):
    """Each worker opens what it reads, as a file of HDF5, which no fork survives."""

    def __init__(self, kind: str) -> None:
        self.kind, self.opened = kind, 0

    def __len__(self) -> int:
        return 40

    def __getitem__(self, index: int) -> int:
        info = torch.utils.data.get_worker_info()
        assert info is not None
        assert info.dataset is self
        return index + self.opened


class StreamOpenedInItsWorker(OpenedInItsWorker, IterableDataset[Any]):
    def __iter__(self) -> Iterator[int]:
        return (index + self.opened for index in range(40))


def opens(worker: int) -> None:
    info = torch.utils.data.get_worker_info()
    assert info is not None
    own: Any = info.dataset
    own.opened = {"a set": 1000, "a stream": 1000}[own.kind]


@pytest.mark.parametrize("holds_out", [False, True])
@pytest.mark.parametrize("samples", [OpenedInItsWorker("a set"), StreamOpenedInItsWorker("a stream")])
def test_what_begins_a_worker_finds_the_set_of_its_loader(samples: Any, holds_out: bool) -> None:
    loader: DataLoader[Any] = DataLoader(samples, 4, num_workers=1, worker_init_fn=opens)
    if holds_out:
        loader, _ = held_out(loader)
    found = read_by(loader, "the loader")
    ask = Ask([3, 4], 0, 2, 0, is_last=True, seed=0)
    feed = Feed(found, lambda _: iter([ask]), workers_of(None, found), torch.device("cpu"), seed=0)
    assert feed.batch(0, 0).tolist() == [1003, 1004]
    feed.close()


@pytest.mark.parametrize("how", ["raises", "raises, and has run out of memory"])
def test_what_a_worker_raises_names_the_sample_and_the_line(how: str, tmp_path: Path) -> None:
    with pytest.raises(WorkerFault) as raised:
        train(trial("failing", 2, kwargs={"how": how}), lambda report: None, tmp_path)
    said = str(raised.value).splitlines()[0]
    error = "KeyError: 'label'" if how == "raises" else "RuntimeError: DefaultCPUAllocator: can't allocate memory"
    assert said.startswith(f"sample 5 raised {error} (in {fed.__file__}, line ")
    assert said.endswith("), in a data worker; fix it, or debug it in the run's own process with data.workers: 0")
    assert "in __getitem__" in str(raised.value), "the worker's own traceback follows"
    assert not is_out_of_memory(raised.value), "a smaller batch would not help a worker"
    assert data_workers() == []


@pytest.mark.parametrize(
    ("how", "said"),
    [
        ("exits", "a data worker exited with status 3: code of the data set ended its process; fix it, or debug it with data.workers: 0"),
        ("is killed", "a data worker was killed by SIGKILL; see what ended it, or debug it with data.workers: 0"),
    ],
)  # fmt: skip
def test_a_worker_that_ends_early_is_told_as_such(how: str, said: str, tmp_path: Path) -> None:
    with pytest.raises(WorkerFault) as raised:
        train(trial("failing", 1, kwargs={"how": how}), lambda report: None, tmp_path)
    assert str(raised.value) == said
    assert data_workers() == []


def closes_its_connections_and_then_ends() -> None:
    os.closerange(3, 1024)
    time.sleep(0.3)
    os._exit(3)


def test_a_worker_is_waited_for_that_is_about_to_end() -> None:
    """The kernel closes what a process has open before it tells its parent how the process ended."""
    worker = multiprocessing.get_context("fork").Process(target=closes_its_connections_and_then_ends)
    worker.start()
    assert wait([worker.sentinel], timeout=HANGS_AFTER_SECONDS)
    assert codes_of_ended([worker], seconds=HANGS_AFTER_SECONDS) == [3]
    assert codes_of_ended([], seconds=0.01) == []


def test_a_worker_that_the_host_had_no_memory_for_is_told_with_the_number_of_workers() -> None:
    assert str(ended_early(-signal.SIGKILL, 4, ran_out=True)).endswith(
        "lower data.workers (now 4), or let a sample need less"
    )
    assert "/dev/shm is full" in str(ended_early(-signal.SIGBUS, 4, ran_out=False))


RUN_UNTIL_KILLED = """
import multiprocessing, sys
from pathlib import Path
from tests.trainers.data.test_feed import trial
from batchscout.trainers.loop import train

def tell(report):
    print(*[child.pid for child in multiprocessing.active_children()], flush=True)

train(trial("slow", 2, kwargs={"seconds": 0.01}, sample_budget=10**6, evaluations=(8,)), tell, Path(sys.argv[1]))
"""


def test_a_rank_that_is_killed_leaves_no_worker(tmp_path: Path) -> None:
    rank = subprocess.Popen(
        [sys.executable, "-c", RUN_UNTIL_KILLED, str(tmp_path)], cwd=ROOT, stdout=subprocess.PIPE, text=True
    )
    with rank:
        assert rank.stdout
        workers = [int(pid) for pid in rank.stdout.readline().split()]
        rank.kill()
    assert len(workers) == 2
    until(lambda: not any(map(is_running, workers)), "no worker outlives its rank", HANGS_AFTER_SECONDS)


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


class Hungry(fed.Drawing):
    """Takes 300 MB for a moment to make a sample."""

    def __getitem__(self, index: int) -> fed.Sample:
        assert len(bytearray(b"x") * 300_000_000)
        return self.samples[index]


def hungry() -> tuple[Hungry, fed.Samples]:
    samples, val = fed.drawing()
    return Hungry(samples.samples), val


def peak_of_a_hungry_set(workers: int, folder: str) -> float:
    """Of a run that may take 200 MB; -1 where it ran out of memory."""
    reports: list[Report] = []
    data = {"target": f"{__name__}:hungry", "workers": workers}
    warm = trial(workers=0, sample_budget=8)
    train(warm, lambda report: None, Path(folder) / "warm")
    try:
        train(config(data=data, sample_budget=8, memory_limit_bytes=200_000_000), reports.append, Path(folder))
    except Exception as error:
        if is_out_of_memory(error):
            return -1.0
        raise
    return reports[-1].metrics["peak_memory_bytes"]


@pytest.mark.slow
def test_a_workers_memory_is_its_own(tmp_path: Path) -> None:
    assert in_fresh_process(peak_of_a_hungry_set, 0, str(tmp_path / "none")) == -1.0
    assert 0 <= in_fresh_process(peak_of_a_hungry_set, 1, str(tmp_path / "one")) < 100_000_000


def test_the_time_that_a_step_waits_for_data_is_counted_and_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr(throughput.time, "perf_counter", lambda: now[0])
    clock, pace = StepClock(torch.device("cpu")), Pace()
    clock.start()
    for _ in range(NUM_WARMUP_STEPS + 4):
        for _ in range(2):
            with clock.waiting():
                now[0] += 0.5
            now[0] += 1.5
        clock.end_of_step()
    times = clock.read()
    assert all(taken == (4.0, 1.0) for taken in times)
    for taken in times:
        pace.add(taken.seconds, 1.0, taken.data_seconds)
    assert pace.data_wait() == 0.25


def test_a_slow_set_is_waited_for_less_with_workers(tmp_path: Path) -> None:
    waits = {}
    for workers in (0, 2):
        reports: list[Report] = []
        one = trial("slow", workers, kwargs={"seconds": 0.004}, sample_budget=80, evaluation_samples=0)
        train(one, reports.append, tmp_path / str(workers))
        waits[workers] = reports[-1].metrics["data_wait"]
    assert 0.0 < waits[2] < waits[0] < 1.0
