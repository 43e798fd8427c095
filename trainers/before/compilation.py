"""Compile before a memory limit holds, and before memory and time are measured.

Under a limit the compiler fails in odd ways (threads that cannot start, MemoryError inside dynamo), and on a GPU it times
its kernels on buffers of its own, which are no part of training. So a throw-away copy of the model takes one step first. A
process that runs trial after trial pays once per shape and mode.
"""

from __future__ import annotations

import time

import torch

from batchscout.trainers.config import Decides, TrialConfig, fields_that_decide
from batchscout.trainers.device.memory import give_back
from batchscout.trainers.model.adding_up import check_sum
from batchscout.trainers.run import Run

_warm: set[str] = set()
MOST_KEPT = 32
"""Shapes and modes whose code is kept: it takes memory, and the compiler looks through it at every call."""


def warm_up(config: TrialConfig, device: torch.device) -> float:
    """Compile and run every kernel that `config` will use, and check what the model returns. Return the seconds it took,
    0 where that was done before."""
    return sum(_warmed_up(small, device) for small in _smallest_of_same_code(config))


def _warmed_up(small: TrialConfig, device: torch.device) -> float:
    key = small.model_dump_json(include=fields_that_decide(Decides.CODE)) + small.optimizer.code
    if key in _warm:
        return 0.0
    if len(_warm) >= MOST_KEPT:
        torch.compiler.reset()
        _warm.clear()
    started = time.perf_counter()
    run = Run(small, device)
    check_sum(run.module, run.loss_function, run.first_samples, run.device)
    run.step()
    del run
    give_back()
    _warm.add(key)
    return time.perf_counter() - started


def _smallest_of_same_code(config: TrialConfig) -> list[TrialConfig]:
    """Return the smallest trials of which one step each compiles all that the whole run needs. They fetch their samples themselves.

    The compiler treats a micro-batch of 1 apart from all other sizes, and where they are cut by tokens both occur; eager code is the same for
    every size.
    """
    any_size = config.dynamic_micro_batch or not config.compile
    sizes = [min(config.micro_batch_size, 2) if any_size else config.micro_batch_size]
    if config.compile and config.micro_batch is not None:
        sizes = [2, 1]
    data = config.data.model_copy(update={"workers": 0})
    changes = {"micro_batch": None, "gradient_accumulation_steps": 1, "data": data}
    return [config.model_copy(update={"micro_batch_size": size, **changes}) for size in sizes]
