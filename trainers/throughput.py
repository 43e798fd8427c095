"""Seconds per step without stalling the device, and what they say: tokens/s, MFU and HFU."""

from __future__ import annotations

import functools
import statistics
import time

import torch
from torch import nn

from trainers.config import Precision, TrialConfig
from trainers.models import find_blocks

# The first step creates optimizer state, DDP rebuilds its buckets in the second, caches settle in the third.
NUM_WARMUP_STEPS = 3

# Dense peak TFLOP/s without sparsity, per device name and precision (vendors' data sheets).
_PEAK_TFLOPS = {
    "H100 PCIe": {"bfloat16": 756, "float16": 756, "float32": 51},
    "A100": {"bfloat16": 312, "float16": 312, "float32": 19.5},
    "H100": {"bfloat16": 989, "float16": 989, "float32": 67},
    "H200": {"bfloat16": 989, "float16": 989, "float32": 67},
    "L40S": {"bfloat16": 362, "float16": 362, "float32": 91.6},
    "RTX 4090": {"bfloat16": 165, "float16": 165, "float32": 82.6},
    "B200": {"bfloat16": 2250, "float16": 2250, "float32": 75},
}


class StepClock:
    """Durations of steps. On CUDA by events, read once per interval after a single synchronisation."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.step_seconds: list[float] = []
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
        self.step_seconds.append(now - self._last)
        self._last = now

    def read(self) -> None:
        """Bring what is pending to the host, and start again from here."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
            pairs = zip(self._marks, self._marks[1:], strict=False)
            self.step_seconds += [before.elapsed_time(after) / 1000 for before, after in pairs]
        self.start()

    def total_seconds(self) -> float:
        """Of all steps, compiling left out."""
        return sum(self.step_seconds) - self.compile_seconds()

    def compile_seconds(self) -> float:
        """On CUDA the first step of the process compiles: what it took beyond the median of the others. On a CPU that
        was done before the clock ran."""
        first, others = self.step_seconds[:1], self.step_seconds[1:]
        if self.device.type != "cuda" or not others:
            return 0.0
        return max(0.0, first[0] - statistics.median(others))

    def median_step_seconds(self) -> float | None:
        """Over all steps but the first few of the process; None until there is one to count."""
        counted = self.step_seconds[NUM_WARMUP_STEPS:]
        return statistics.median(counted) if counted else None

    def median_rate(self, amounts: list[float]) -> float | None:
        """The median of amount per second, over the same steps; `amounts` has one for every step."""
        rates = [n / s for n, s in zip(amounts, self.step_seconds, strict=True)][NUM_WARMUP_STEPS:]
        return statistics.median(rates) if rates else None

    @staticmethod
    def _mark() -> torch.cuda.Event:
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event


def peak_flops(device: torch.device, precision: Precision) -> float | None:
    """Dense peak in FLOP/s: of a GPU its data sheet's, of a CPU what matrix products reach on it now.

    None for a GPU that is not in the table, and then no utilisation is reported.
    """
    if device.type != "cuda":
        return matmul_flops_per_second(device, precision)
    name = torch.cuda.get_device_name(device)
    known = next((peaks for key, peaks in _PEAK_TFLOPS.items() if key in name), None)
    return known[precision] * 1e12 if known else None


@functools.cache
def matmul_flops_per_second(device: torch.device, precision: Precision, seconds: float = 0.3) -> float:
    """Of the fastest of many large square matrix products."""
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
    """Parameters, but for tables that are only looked up in."""
    lookups = {id(m.weight) for m in model.modules() if isinstance(m, nn.Embedding)}
    heads = {id(m.weight) for m in model.modules() if isinstance(m, nn.Linear)}
    only_looked_up = lookups - heads
    return sum(p.numel() for p in model.parameters() if id(p) not in only_looked_up)


def recomputed_share(model: nn.Module, config: TrialConfig) -> float | None:
    """What checkpointing adds to the FLOPs of a step: full runs the blocks' forward, a third of their work, once more, but for
    the last product of each, whose result nothing else needs. None for selective and budgets, where it is not known."""
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
    """{mfu, hfu} of one rank's device and the peak they assume; empty where it is not known."""
    if peak is None:
        return {}
    mfu = model_flops_per_token(model) * tokens_per_second / config.world_size / peak
    recomputed = recomputed_share(model, config)
    return {"mfu": mfu, "assumed_peak_flops": peak} | ({} if recomputed is None else {"hfu": mfu * (1 + recomputed)})
