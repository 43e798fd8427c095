"""Seconds per step without stalling the device, and what they say: tokens/s, MFU and HFU."""

from __future__ import annotations

import functools
import statistics
import time
from collections import deque

import torch
from torch import nn

from trainers.config import Precision, TrialConfig
from trainers.models import find_blocks

# The first step creates optimizer state, DDP rebuilds its buckets in the second, caches settle in the third.
NUM_WARMUP_STEPS = 3
# A run of days says how fast it is now, and reading that stays cheap.
RECENT_STEPS = 1000

# Dense peak TFLOP/s without sparsity, per device name and precision (vendors' data sheets).
_PEAK_TFLOPS = {
    "H100 PCIe": {"bfloat16": 756, "float16": 756, "float32": 51},
    "H100 NVL": {"bfloat16": 835, "float16": 835, "float32": 60},
    "A100": {"bfloat16": 312, "float16": 312, "float32": 19.5},
    "H100": {"bfloat16": 989, "float16": 989, "float32": 67},
    "H200 NVL": {"bfloat16": 835, "float16": 835, "float32": 60},
    "H200": {"bfloat16": 989, "float16": 989, "float32": 67},
    "L40S": {"bfloat16": 362, "float16": 362, "float32": 91.6},
    "RTX 4090": {"bfloat16": 165, "float16": 165, "float32": 82.6},
    "B200": {"bfloat16": 2250, "float16": 2250, "float32": 75},
}


class StepClock:
    """Measures how long steps take. On CUDA it uses events, which are read once per interval after one
    synchronisation."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._unread: list[float] = []
        self._marks: list[torch.cuda.Event] = []
        self._last = 0.0

    def start(self) -> None:
        """Begin a run of back-to-back steps; what lies before it (evaluation, saving, waiting) is not timed."""
        if self.device.type == "cuda":
            self._marks = [self._mark()]
        else:
            self._last = time.perf_counter()

    def end_of_step(self) -> None:
        if self.device.type == "cuda":
            self._marks.append(self._mark())
            return
        now = time.perf_counter()
        self._unread.append(now - self._last)
        self._last = now

    def read(self) -> list[float]:
        """Return the seconds of every step since the last read, and start again from here."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
            pairs = zip(self._marks, self._marks[1:], strict=False)
            self._unread = [before.elapsed_time(after) / 1000 for before, after in pairs]
        seconds, self._unread = self._unread, []
        self.start()
        return seconds

    @staticmethod
    def _mark() -> torch.cuda.Event:
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event


class Pace:
    """How long this process's steps take, and how much they get done. Medians are over the last RECENT_STEPS."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._all_seconds = 0.0
        self._warm_up: list[float] = []
        self._recent: deque[tuple[float, float]] = deque(maxlen=RECENT_STEPS)

    def add(self, seconds: float, amount: float) -> None:
        """Take in a step that took so many seconds and got so much done."""
        self._all_seconds += seconds
        if len(self._warm_up) < NUM_WARMUP_STEPS:
            self._warm_up.append(seconds)
        else:
            self._recent.append((seconds, amount))

    def total_seconds(self) -> float:
        """Return the seconds of all steps, without compiling."""
        return self._all_seconds - self.compile_seconds()

    def compile_seconds(self) -> float:
        """Return what the first step took beyond the median of the others. On CUDA it compiles, and on a CPU that was
        done before the clock ran."""
        others = self._warm_up[1:] + [seconds for seconds, _ in self._recent]
        if self.device.type != "cuda" or not others:
            return 0.0
        return max(0.0, self._warm_up[0] - statistics.median(others))

    def median_step_seconds(self) -> float | None:
        """Return the median, or None until there is a step beyond the warm-up."""
        return statistics.median(seconds for seconds, _ in self._recent) if self._recent else None

    def median_rate(self) -> float | None:
        """Return the median of the amount per second, over the same steps."""
        return statistics.median(amount / seconds for seconds, amount in self._recent) if self._recent else None


def peak_flops(device: torch.device, precision: Precision) -> float | None:
    """Return the dense peak in FLOP/s: for a GPU its data sheet's, for a CPU what matrix products reach on it now.

    None for a GPU that is not in the table, and then no utilisation is reported.
    """
    if device.type != "cuda":
        return matmul_flops_per_second(device, precision)
    name = torch.cuda.get_device_name(device)
    known = next((peaks for key, peaks in _PEAK_TFLOPS.items() if key in name), None)
    return known[precision] * 1e12 if known else None


@functools.cache
def matmul_flops_per_second(device: torch.device, precision: Precision, seconds: float = 0.3) -> float:
    """Return the FLOP/s of the fastest of many large square matrix products."""
    size = 8192 if device.type == "cuda" else 512
    square = torch.rand(size, size, device=device).to(getattr(torch, precision))
    fastest, until = float("inf"), time.perf_counter() + seconds
    while time.perf_counter() < until:
        started = time.perf_counter()
        torch.mm(square, square).sum().item()  # the sum is read, so the product is done
        fastest = min(fastest, time.perf_counter() - started)
    return 2.0 * size**3 / fastest


def model_flops_per_token(model: nn.Module) -> float:
    """6 FLOPs per parameter that multiplies (PaLM, arXiv 2204.02311, appendix B), attention's own product left out:
    for a user's model its shape is not known, so the utilisation is a lower bound."""
    return 6.0 * _num_multiplying(model)


def _num_multiplying(model: nn.Module) -> int:
    """Count the parameters, without tables that are only looked up in."""
    lookups = {id(m.weight) for m in model.modules() if isinstance(m, nn.Embedding)}
    heads = {id(m.weight) for m in model.modules() if isinstance(m, nn.Linear)}
    only_looked_up = lookups - heads
    return sum(p.numel() for p in model.parameters() if id(p) not in only_looked_up)


def recomputed_share(model: nn.Module, config: TrialConfig) -> float | None:
    """What checkpointing adds to the FLOPs of a step: full runs the blocks' forward, a third of their work, once
    more, but for the last product of each, whose result nothing else needs. None for selective and budgets, where
    it is not known."""
    if config.activation_checkpointing == "none":
        return 0.0
    blocks = find_blocks(model, config.model.blocks)
    if config.activation_checkpointing != "full" or blocks is None:
        return None
    matrices = [[p.numel() for p in block.parameters() if p.dim() >= 2] for block in blocks]
    last_of_each = sum(sizes[-1] for sizes in matrices if sizes)
    return (_num_multiplying(blocks) - last_of_each) / (3 * _num_multiplying(model))


def utilisation(
    model: nn.Module, config: TrialConfig, peak: float | None, tokens_per_second: float
) -> dict[str, float]:
    """Return {mfu, hfu} of one rank's device and the peak they assume; nothing where the peak is not known."""
    if peak is None:
        return {}
    mfu = model_flops_per_token(model) * tokens_per_second / config.world_size / peak
    recomputed = recomputed_share(model, config)
    return {"mfu": mfu, "assumed_peak_flops": peak} | ({} if recomputed is None else {"hfu": mfu * (1 + recomputed)})
