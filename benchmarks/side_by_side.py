"""What every benchmark here shares: its options, rounds in which each side has its turn, and ratios with their spread."""

from __future__ import annotations

import argparse
import os
import platform
import statistics
from collections.abc import Callable, Mapping


def options(description: str | None) -> argparse.Namespace:
    """--device and --quick; without a GPU asked for, none is seen."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--quick", action="store_true", help="fewer rounds: to see that it runs, not to quote it")
    chosen = parser.parse_args()
    if chosen.device == "cpu":
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
    return chosen


def interleaved(sides: Mapping[str, Callable[[], float]], rounds: int) -> dict[str, list[float]]:
    """What each side measures, round after round: {side: one figure a round}. The order turns with every round."""
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
    """(median, lowest, highest) of ours / theirs within a round: what the machine did to both cancels."""
    ratios = sorted(a / b for a, b in zip(ours, theirs, strict=True))
    return statistics.median(ratios), ratios[0], ratios[-1]


def machine() -> str:
    """One line for the head of a table."""
    import torch

    device = torch.cuda.get_device_name() if torch.cuda.is_available() else f"{os.cpu_count()} CPUs"
    return f"{platform.machine()}, {device}, Python {platform.python_version()}, torch {torch.__version__}"
