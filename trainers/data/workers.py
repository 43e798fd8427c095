"""Data workers: processes that fetch batches ahead of the run. What they are started with, and what is said when one fails.

They are torch's DataLoader's. A worker is forked, so it has the data set without a copy of it. Its memory is its own: it counts neither
in the rank's peak nor in its limit, which the kernel holds each process to by itself.
"""

from __future__ import annotations

import os
import resource
import signal
import time
import traceback
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from multiprocessing.process import BaseProcess
from typing import Any

import torch

from batchscout.trainers.descendants import end_with
from batchscout.trainers.errors import first_of, raised_where

MOST_NAMED = 8
SECONDS_BETWEEN_LOOKS = 0.005


@dataclass(frozen=True)
class Workers:
    """How batches are fetched; what a DataLoader of the user's says beside its number of workers is kept."""

    number: int = 0
    """0: the run's own process fetches them, when it needs them."""
    prefetch_factor: int = 2
    """The batches that each worker is ahead."""
    init: Callable[[int], Any] | None = None
    """Called in each worker when it begins, with its number."""
    context: Any = "fork"
    """How they are started."""
    timeout: float = 0
    """The seconds after which a batch that has not come is an error; 0: never."""
    dataset: Any = None
    """What a worker is told that it reads, which `init` may open files in: the set of the user's own DataLoader."""


class WorkerFault(Exception):
    """A data worker could not do its work. The message is in the user's words. Never taken for the run's own want of memory, whatever it
    quotes: a smaller batch would not help."""


@dataclass(frozen=True)
class Failure:
    """What the user's code raised in a worker, as it is sent to the run: the exception itself might not survive the way."""

    said: str
    trace: str


def failure_of(error: BaseException, indices: Sequence[int]) -> Failure:
    """indices: the samples at which it was raised."""
    return Failure(f"{named(indices)} raised {raised_where(error)}", "".join(traceback.format_exception(error)))


def raised_in_a_worker(failure: Failure) -> WorkerFault:
    return WorkerFault(
        f"{failure.said}, in a data worker; fix it, or debug it in the run's own process with data.workers: 0\n\n{failure.trace}"
    )


def named(indices: Sequence[int]) -> str:
    if len(indices) == 1:
        return f"sample {indices[0]}"
    return f"the batch of samples {first_of(indices, MOST_NAMED)}"


def codes_of_ended(workers: Iterable[BaseProcess], seconds: float) -> list[int]:
    """Return the exit codes of the workers that have ended, but for 0; wait at most so long for one.

    The connections of a process, its sentinel among them, may be closed a moment before it has an exit code.
    """
    deadline, workers = time.monotonic() + seconds, list(workers)
    while not (codes := [code for worker in workers if (code := worker.exitcode)]) and time.monotonic() < deadline:
        time.sleep(SECONDS_BETWEEN_LOOKS)
    return codes


def ended_early(exit_code: int, num_workers: int, *, ran_out: bool) -> WorkerFault:
    """exit_code: as `subprocess` has it. ran_out: true if the kernel has ended a process of this host or group for want of memory since
    the workers began."""
    if exit_code >= 0:
        how = f"exited with status {exit_code}: code of the data set ended its process"
        return WorkerFault(f"a data worker {how}; fix it, or debug it with data.workers: 0")
    known = {number.value: number.name for number in signal.Signals}
    how = f"a data worker was killed by {known.get(-exit_code, f'signal {-exit_code}')}"
    if exit_code == -signal.SIGBUS:
        return WorkerFault(
            f"{how}: /dev/shm is full, through which workers hand over their batches; give it more room (docker run --shm-size=8g), or lower "
            f"data.workers (now {num_workers})"
        )
    if exit_code == -signal.SIGKILL and ran_out:
        return WorkerFault(
            f"{how}: the host's memory had run out, and each worker takes some beyond its rank's limit; lower data.workers "
            f"(now {num_workers}), or let a sample need less"
        )
    return WorkerFault(f"{how}; see what ended it, or debug it with data.workers: 0")


def begin_worker(number: int, *, workers: Workers, parent: int) -> None:
    """Make this process a worker that ends with the run, and is not held to the rank's memory limit."""
    if not end_with(parent):
        os._exit(1)
    _, hard = resource.getrlimit(resource.RLIMIT_DATA)
    resource.setrlimit(resource.RLIMIT_DATA, (hard, hard))
    if workers.dataset is not None:  # torch names its own loader's, which is around it
        object.__setattr__(torch.utils.data.get_worker_info(), "dataset", workers.dataset)
    if workers.init is not None:
        workers.init(number)
