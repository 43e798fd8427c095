"""What all benchmarks share: options, rounds in which each side has its turn, and ratios with their intervals."""

from __future__ import annotations

import argparse
import json
import math
import os
import platform
import statistics
import subprocess
import sys
from collections.abc import Callable, Iterable, Mapping
from typing import Any

# GPT-2's smallest shape (Radford et al. 2019), its vocabulary rounded up to a multiple of 128; the text is any text.
GPT2_124M: dict[str, Any] = {
    "model": {
        "target": "gpt",
        "kwargs": {"num_layers": 12, "num_heads": 12, "hidden_dim": 768, "vocab_size": 50_304},
    },
    "data": {
        "target": "python_stdlib",
        "kwargs": {"seq_len": 1024, "tokenizer": "bytes", "max_text_bytes": 8_000_000},
    },
}


def options(
    description: str | None, *, small: Mapping[str, Any] | None = None, parts: Iterable[str] = ()
) -> argparse.Namespace:
    """Return the parsed --device and --quick. Unless --device is cuda, no GPU is visible.

    A benchmark that passes `small`, its own model and data, gets --model too; `trial` is then `small` or GPT-2. One that passes
    the names of its parts gets --only.
    """
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--quick", action="store_true", help="fewer rounds: to see that it runs, not to quote it")
    if small is not None:
        parser.add_argument("--model", choices=("small", "gpt2-124m"), default="small")
    if parts:
        parser.add_argument("--only", nargs="+", choices=tuple(parts), metavar="NAME", help="these alone")
    chosen = parser.parse_args()
    if small is not None:
        chosen.trial = GPT2_124M if chosen.model == "gpt2-124m" else small
    if chosen.device == "cpu":
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
    return chosen


def interleaved(sides: Mapping[str, Callable[[], float]], rounds: int) -> dict[str, list[float]]:
    """Return {side: one figure a round}. The sides take turns in each round, and the order shifts with every round."""
    found: dict[str, list[float]] = {name: [] for name in sides}
    names = list(sides)
    for number in range(rounds):
        for name in names[number % len(names) :] + names[: number % len(names)]:
            found[name].append(sides[name]())
        print(
            f"round {number + 1} of {rounds}: " + ", ".join(f"{n} {v[-1]:,.4g}" for n, v in found.items()), flush=True
        )
    return found


def ratio_by_round(ours: list[float], theirs: list[float]) -> tuple[float, float, float]:
    """Return (median, low, high) of ours / theirs within a round, where what the machine did to both cancels out."""
    ratios = [a / b for a, b in zip(ours, theirs, strict=True)]
    return (statistics.median(ratios), *interval_of_median(ratios))


def interval_of_median(values: list[float]) -> tuple[float, float]:
    """Return the order statistics that hold the median with at least 95 %; the extremes of fewer than 6 values."""
    ordered, left_out = sorted(values), 0
    while 2 * _share_at_most(left_out, len(values)) <= 0.05:
        left_out += 1
    left_out = max(0, left_out - 1)
    return ordered[left_out], ordered[-1 - left_out]


def _share_at_most(count: int, tosses: int) -> float:
    """Return the probability of at most `count` heads in so many tosses of a fair coin."""
    return sum(math.comb(tosses, k) for k in range(count + 1)) / 2**tosses


def join_two_ranks(rank: int, device: str, folder: str) -> None:
    """Join two processes into one group. They share a single GPU through gloo, since NCCL wants a GPU for each."""
    import torch
    import torch.distributed as dist

    os.environ.update(MASTER_ADDR="127.0.0.1")
    gpus = torch.cuda.device_count() if device == "cuda" else 0
    if gpus:
        torch.cuda.set_device(rank % gpus)
    backend = "nccl" if gpus >= 2 else "gloo"
    dist.init_process_group(backend, init_method=f"file://{folder}/store", rank=rank, world_size=2)


def machine() -> str:
    """Return one line for the head of a table."""
    import torch

    device = torch.cuda.get_device_name() if torch.cuda.is_available() else f"{os.cpu_count()} CPUs"
    return f"{platform.machine()}, {device}, Python {platform.python_version()}, torch {torch.__version__}"


def in_fresh_process(file: str, told: Mapping[str, Any], folder: str) -> Any:
    """Return what `python FILE --one TOLD` prints last, as JSON: a side on its own, with a warm process's allocator, and the
    compiled code of those before it in the folder."""
    from batchscout.trainers.device.memory import MALLOC_ENVIRONMENT

    environment = {**os.environ, **MALLOC_ENVIRONMENT, "TORCHINDUCTOR_CACHE_DIR": f"{folder}/inductor"}
    done = subprocess.run(
        [sys.executable, file, "--one", json.dumps(told)], env=environment, capture_output=True, text=True
    )
    if done.returncode:
        raise SystemExit(done.stderr)
    return json.loads(done.stdout.splitlines()[-1])
