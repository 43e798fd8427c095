"""Predicted against measured peak memory, eager and compiled, of models of many kinds, on one rank and on two.

    python benchmarks/memory_prediction.py [--device cpu|cuda] [--quick] [--only NAME ...]

The models are in `memory_models.py`, with the modes in which each is measured: --quick takes the smallest, on one rank and in
shards on two, without checkpointing. Each is measured in a process of its own (or one for each rank), a mode and a micro-batch size after the other
as a lane does it; on a GPU the models are GPT-2's smallest and one more, and the peak is that of its tensors, as what the allocator
reserves beside them is not predicted. A compiled mode is predicted as eager code.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from memory_models import ON_A_CPU, ON_A_GPU, QUICK, Mode
from side_by_side import in_fresh_process, join_two_ranks, machine, options

MODELS = {**ON_A_CPU, **ON_A_GPU}
SIZES = (3, 12)
STEPS = 3  # the optimizer's state is made in the first, DDP's buckets anew in the second


@dataclass(frozen=True)
class Compared:
    model: str
    mode: str
    compiled: bool
    micro_batch_size: int
    measured_bytes: float
    predicted_bytes: float

    @property
    def error(self) -> float:
        return self.predicted_bytes / self.measured_bytes - 1


def main() -> None:
    if len(sys.argv) > 1 and sys.argv[1] == "--one":
        return print(json.dumps(measured(**json.loads(sys.argv[2]))))
    chosen = options(__doc__, parts=MODELS)
    print(machine())
    print(f"{'':>34} {'m':>3} {'measured':>10} {'predicted':>10} {'error':>7}")
    with tempfile.TemporaryDirectory() as folder:
        found = [one for name, modes in asked_for(chosen) for one in compared(name, modes, chosen.device, folder)]
    print(json.dumps(summary(found)))


def asked_for(chosen: argparse.Namespace) -> list[tuple[str, Sequence[Mode]]]:
    """Return (name, modes) of each model that is to be measured."""
    on_device = ON_A_GPU if chosen.device == "cuda" else ON_A_CPU
    if chosen.only:
        return [(name, MODELS[name].modes) for name in chosen.only]
    if chosen.quick:
        return [
            (name, [mode for mode in model.modes if mode[0] == "none"])
            for name, model in on_device.items()
            if name in QUICK
        ]
    return [(name, model.modes) for name, model in on_device.items()]


def compared(name: str, modes: Sequence[Mode], device: str, folder: str) -> list[Compared]:
    """Return this model's figures in each mode, all predicted in one process."""
    from batchscout.trainers.before.peak_memory import PeakMemory
    from batchscout.trainers.before.prediction import predict_in_own_process

    predictions = predict_in_own_process([trial(name, *mode, SIZES[0], device) for mode in modes])
    peaks = highest_of_ranks(name, modes, device, folder)
    found: list[Compared] = []
    for mode, predicted, of_sizes in zip(modes, predictions, peaks, strict=True):
        assert isinstance(predicted, PeakMemory), predicted
        found += [
            Compared(name, str(mode[0]), mode[1], size, peak, predicted.bytes_at(size))
            for size, peak in zip(SIZES, of_sizes, strict=True)
        ]
    for one in found:
        print_row(one)
    return found


def highest_of_ranks(name: str, modes: Sequence[Mode], device: str, folder: str) -> list[list[float]]:
    """Return the peaks at SIZES in each mode, of the rank that takes most."""
    meet = tempfile.mkdtemp(dir=folder)
    told = [
        {"name": name, "modes": modes, "rank": rank, "meet": meet, "device": device}
        for rank in range(MODELS[name].world_size)
    ]
    with ThreadPoolExecutor(len(told)) as threads:
        of_ranks = list(threads.map(lambda one: in_fresh_process(__file__, one, folder), told))
    return [[max(peaks) for peaks in zip(*of_mode, strict=True)] for of_mode in zip(*of_ranks, strict=True)]


def trial(name: str, mode: str | float, compiled: bool, micro_batch_size: int, device: str) -> Any:
    from batchscout.trainers.config import TrialConfig

    return TrialConfig.model_validate({
        **MODELS[name].trial,
        "micro_batch_size": micro_batch_size, "gradient_accumulation_steps": 2, "activation_checkpointing": mode,
        "compile": compiled, "dynamic_micro_batch": True, "learning_rate": 1e-3, "sample_budget": 10**6,
        "precision": "bfloat16" if device == "cuda" else "float32",
    })  # fmt: skip


def measured(name: str, modes: list[Mode], rank: int, meet: str, device: str) -> list[list[float]]:
    """The peaks of short runs in each mode and at each size, as a rank's trials would report them."""
    if MODELS[name].world_size > 1:
        join_two_ranks(rank, device, meet)
    return [[peak(trial(name, *mode, size, device), device) for size in SIZES] for mode in modes]


def peak(config: Any, device: str) -> float:
    import torch

    from batchscout.trainers.before.compilation import warm_up
    from batchscout.trainers.device.memory import give_back
    from batchscout.trainers.run import Run

    warm_up(config, torch.device(device))
    run = Run(config, torch.device(device))
    for _ in range(STEPS):
        run.step()
    run.read()
    found = run.metrics()
    del run
    give_back()
    return found.get("peak_allocated_bytes", found["peak_memory_bytes"])


def print_row(one: Compared) -> None:
    name = f"{one.model} {one.mode}{'' if one.compiled else ', eager'}"
    measured_mib, predicted_mib = one.measured_bytes / 2**20, one.predicted_bytes / 2**20
    print(
        f"{name:>34} {one.micro_batch_size:>3} {measured_mib:>10.1f} {predicted_mib:>10.1f} {one.error:>+7.1%}",
        flush=True,
    )


def summary(found: list[Compared]) -> dict[str, float | None]:
    """Return the worst errors, None where nothing of the kind was measured. A memory budget's is apart, as it has no prediction of
    its own."""
    budgets = [one for one in found if one.mode not in ("none", "selective", "full")]
    own = [one for one in found if one not in budgets]
    several = [one for one in own if MODELS[one.model].world_size > 1]
    return {
        "worst_eager_error": worst(one.error for one in own if not one.compiled),
        "worst_error_of_two_ranks": worst(one.error for one in several),
        "worst_compiled_error": worst(one.error for one in own if one.compiled),
        "worst_memory_budget_error": worst(one.error for one in budgets),
    }


def worst(errors: Iterable[float]) -> float | None:
    return max(map(abs, errors), default=None)


if __name__ == "__main__":
    main()
