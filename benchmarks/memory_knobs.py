"""Tokens per second and peak memory of every memory knob, and of the pairs that go together, against accumulation in the same memory.

    python benchmarks/memory_knobs.py [--device cpu|cuda] [--model small|gpt2-124m] [--quick]

The memory is what plain training takes at a micro-batch of 4. Each side runs the largest micro-batch that two measured peaks put within
it, without accumulation; plain training, beside it in the same round, accumulates micro-batches of 4 to at least as many samples.
`against_accumulation` is the ratio of their tokens/s. Full checkpointing is a side, too: a knob has to beat it. On a CPU, seconds are
those of the CPU, which others on the machine do not lengthen, and code is eager. Each turn is a process of its own. Knobs that need a GPU
or a library which is not there are left out, and named.
"""

from __future__ import annotations

import itertools
import json
import math
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from side_by_side import in_fresh_process, machine, options, ratio_by_round

MICRO_BATCH = 4
MOST = 16 * MICRO_BATCH
WARM_UP, STEPS = 2, 4
FULL = "full checkpointing"
SMALL = {
    "model": {"target": "gpt", "kwargs": {"num_layers": 4, "num_heads": 4, "hidden_dim": 192, "vocab_size": 8192}},
    "data": {
        "target": "python_stdlib",
        "kwargs": {"seq_len": 192, "tokenizer": "bytes", "max_text_bytes": 2_000_000},
    },
}


@dataclass(frozen=True)
class Side:
    knobs: tuple[str, ...]
    precision: str
    checkpointing: str = "none"

    @property
    def name(self) -> str:
        return " + ".join(self.knobs) or FULL

    def told(self, size: int, steps: int, device: str, trial: dict[str, Any]) -> dict[str, Any]:
        changes = {"memory_knobs": self.knobs, "activation_checkpointing": self.checkpointing}
        return plain(self.precision, size, steps, device, trial) | changes


def plain(precision: str, size: int, steps: int, device: str, trial: dict[str, Any]) -> dict[str, Any]:
    """Return what a turn of plain training is told."""
    return {
        **trial, "device": device, "micro_batch_size": size, "gradient_accumulation_steps": steps, "precision": precision,
        "compile": device == "cuda", "learning_rate": 1e-4, "sample_budget": 10**6, "statistics": False,
        "optimizer": {"max_gradient_norm": None},
    }  # fmt: skip


def main() -> None:
    if len(sys.argv) > 1 and sys.argv[1] == "--one":
        return print(json.dumps(one_turn(json.loads(sys.argv[2]))))
    chosen = options(__doc__, small=SMALL)
    print(machine())
    sides, left_out = sides_of(chosen.device)
    print("\n".join(f"left out: {name}: {why}" for name, why in left_out.items()))
    with tempfile.TemporaryDirectory() as folder:
        measured = {side.name: measure(side, chosen, folder) for side in sides}
    print_table(measured)
    print(json.dumps({name: figures for name, (figures, _) in measured.items()}))


def sides_of(device: str) -> tuple[list[Side], dict[str, str]]:
    """Return (full checkpointing, each knob and each pair that runs here; why other knobs do not)."""
    from batchscout.trainers.config import TrialConfig
    from batchscout.trainers.knobs import KNOBS, bfloat16_weights, excluding

    usual = "bfloat16" if device == "cuda" else "float32"
    config = TrialConfig.model_validate(
        {key: value for key, value in plain("bfloat16", 1, 1, device, SMALL).items() if key != "device"}
    )
    reasons = {one.name: one.incompatible_with(config) or one.missing(device) for one in KNOBS}
    usable = [name for name, why in reasons.items() if not why]
    pairs = [pair for pair in itertools.combinations(usable, 2) if excluding(pair) is None]
    sets = [*((name,) for name in usable), *pairs]
    knobs = [Side(names, "bfloat16" if bfloat16_weights.NAME in names else usual) for names in sets]
    return [Side((), usual, "full"), *knobs], {name: why for name, why in reasons.items() if why}


def measure(side: Side, chosen: Any, folder: str) -> tuple[dict[str, float], str]:
    """Return (the figures of a side; its micro-batch and its ratio with the interval, in words)."""

    def turn(told: dict[str, Any]) -> dict[str, float]:
        return in_fresh_process(__file__, told, folder)

    def alone(size: int) -> dict[str, Any]:
        return side.told(size, 1, chosen.device, chosen.trial)

    limit = turn(plain(side.precision, MICRO_BATCH, 2, chosen.device, chosen.trial))["peak_memory_bytes"]
    peaks = [turn(alone(size))["peak_memory_bytes"] for size in (MICRO_BATCH, 2 * MICRO_BATCH)]
    size = largest_within(limit, peaks)
    accumulated = plain(side.precision, MICRO_BATCH, math.ceil(size / MICRO_BATCH), chosen.device, chosen.trial)
    ours, theirs = list[dict[str, float]](), list[dict[str, float]]()
    for number in range(1 if chosen.quick else 3):
        both = [(ours, alone(size)), (theirs, accumulated)]
        for found, told in both if number % 2 else reversed(both):
            found.append(turn(told))
    rates = [[one["tokens_per_second"] for one in found] for found in (ours, theirs)]
    ratio, low, high = ratio_by_round(*rates)
    figures = {
        "peak_memory_bytes": statistics.median(one["peak_memory_bytes"] for one in ours),
        "tokens_per_second": statistics.median(rates[0]),
        "against_accumulation": ratio,
    }
    said = f"{size} against {MICRO_BATCH} x {math.ceil(size / MICRO_BATCH)}: {ratio:.2f} [{low:.2f}, {high:.2f}]"
    print(f"{side.name}: micro-batch {said}, limit {limit / 2**20:,.0f} MiB", flush=True)
    return figures, said


def largest_within(limit: float, peaks: Sequence[float]) -> int:
    """Return the largest micro-batch, of at most MOST, that the line through the peaks at MICRO_BATCH and twice that puts within the
    limit; at least 1, though even that may exceed it."""
    slope = (peaks[1] - peaks[0]) / MICRO_BATCH
    if slope <= 0:
        return MOST
    return max(1, min(MOST, math.floor(MICRO_BATCH + (limit - peaks[0]) / slope)))


def one_turn(told: dict[str, Any]) -> dict[str, float]:
    import torch

    from batchscout.trainers.before.compilation import warm_up
    from batchscout.trainers.config import TrialConfig
    from batchscout.trainers.run import Run

    device = torch.device(told.pop("device"))
    if device.type == "cpu":
        torch.set_num_threads(1)
    config = TrialConfig.model_validate(told)
    warm_up(config, device)
    run = Run(config, device)
    clock = time.perf_counter if device.type == "cuda" else time.process_time
    seconds = list[float]()
    for _ in range(WARM_UP + STEPS):
        started = clock()
        run.step()
        run.read()
        seconds.append(clock() - started)
    tokens = config.effective_batch_size * config.data.kwargs["seq_len"]
    return {
        "peak_memory_bytes": run.metrics()["peak_memory_bytes"],
        "tokens_per_second": tokens / statistics.median(seconds[WARM_UP:]),
    }


def print_table(measured: dict[str, tuple[dict[str, float], str]]) -> None:
    print(f"{'side':>48} {'peak, MiB':>10} {'tokens/s':>10}  micro-batch against accumulation")
    for name, (figures, said) in measured.items():
        peak, rate = figures["peak_memory_bytes"] / 2**20, figures["tokens_per_second"]
        print(f"{name:>48} {peak:>10.1f} {rate:>10,.0f}  {said}")


if __name__ == "__main__":
    main()
