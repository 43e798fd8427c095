"""Predicted against measured peak memory, eager and compiled, in every activation checkpointing mode, of four models.

    python benchmarks/memory_prediction.py [--device cpu|cuda] [--quick]

Each model and mode is measured in a process of its own, one micro-batch size after the other as a lane does it; on a GPU the
models are GPT-2's smallest and one more, and the peak is that of its tensors, as what the allocator reserves beside them is not
predicted. A compiled mode is predicted as eager code, then corrected by its first measurement (`calibrated`, of the sizes after it).
"""

from __future__ import annotations

import json
import sys
import tempfile
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from side_by_side import in_fresh_process, machine, options

if TYPE_CHECKING:
    from trainers.before.peak_memory import PeakMemory

MODES: tuple[tuple[str | float, bool], ...] = (
    ("none", False), ("selective", False), ("full", False),
    ("none", True), ("selective", True), ("full", True), (0.5, True),
)  # fmt: skip
SIZES = (3, 8, 16)
STEPS = 2  # the optimizer's state is made in the first


def gpt(num_layers: int, hidden_dim: int, seq_len: int, vocab_size: int) -> dict[str, Any]:
    kwargs = {"num_layers": num_layers, "num_heads": 4, "hidden_dim": hidden_dim}
    return {"model": {"target": "gpt", "kwargs": kwargs}, "data": text(seq_len, vocab_size)}


def text(seq_len: int, vocab_size: int) -> dict[str, Any]:
    kwargs = {"seq_len": seq_len, "tokenizer": {"train_bpe": vocab_size}, "max_text_bytes": 2_000_000}
    return {"target": "python_stdlib", "kwargs": kwargs}


LLAMA = {"num_hidden_layers": 4, "hidden_size": 192, "intermediate_size": 512, "num_attention_heads": 4}
GPT2_124M = {
    "model": {"target": "gpt", "kwargs": {"num_layers": 12, "num_heads": 12, "hidden_dim": 768, "vocab_size": 50_304}},
    "data": {
        "target": "python_stdlib",
        "kwargs": {"seq_len": 1024, "tokenizer": "bytes", "max_text_bytes": 8_000_000},
    },
}
MODELS = {
    "gpt 0.8M": gpt(2, 128, 128, 2048),
    "gpt 5M": gpt(4, 256, 192, 8192),
    "gpt 14M": gpt(6, 384, 128, 8192),
    "llama 2.6M": {
        "model": {"target": "hf", "kwargs": {"model_type": "llama", "config": LLAMA}},
        "data": text(192, 2048),
    },
    "gpt 124M": GPT2_124M,
}
ON = {"cpu": ("gpt 0.8M", "gpt 5M", "gpt 14M", "llama 2.6M"), "cuda": ("gpt 124M", "llama 2.6M")}
"""The models for each kind of device. The first is that of --quick."""


@dataclass(frozen=True)
class Compared:
    model: str
    mode: str
    compiled: bool
    micro_batch_size: int
    measured_bytes: float
    predicted_bytes: float
    calibrated_bytes: float | None
    """None for the size that it was calibrated with."""

    @property
    def error(self) -> float:
        return self.predicted_bytes / self.measured_bytes - 1

    @property
    def calibrated_error(self) -> float | None:
        return None if self.calibrated_bytes is None else self.calibrated_bytes / self.measured_bytes - 1


def main() -> None:
    if len(sys.argv) > 1 and sys.argv[1] == "--one":
        return print(json.dumps(measured(**json.loads(sys.argv[2]))))
    chosen = options(__doc__)
    models = ON[chosen.device][:1] if chosen.quick else ON[chosen.device]
    sizes = SIZES[:2] if chosen.quick else SIZES
    found: list[Compared] = []
    print(machine())
    print(f"{'':>24} {'m':>3} {'measured':>10} {'predicted':>10} {'error':>7} {'calibrated':>10}")
    with tempfile.TemporaryDirectory() as folder:
        for name in models:
            found += compared(name, sizes, chosen.device, folder)
    print(json.dumps(summary(found)))


def compared(name: str, sizes: tuple[int, ...], device: str, folder: str) -> list[Compared]:
    """Every mode of this model, all predicted in one process."""
    from trainers.before.peak_memory import PeakMemory
    from trainers.before.prediction import predict_in_own_process

    found: list[Compared] = []
    predictions = predict_in_own_process([trial(name, *mode, sizes[0], device) for mode in MODES])
    for (mode, compiled), predicted in zip(MODES, predictions, strict=True):
        assert isinstance(predicted, PeakMemory), predicted
        told = {"model": name, "mode": mode, "compiled": compiled, "sizes": sizes, "device": device}
        rows = rows_of(told, predicted, in_fresh_process(__file__, told, folder))
        for one in rows:
            print_row(one)
        found += rows
    return found


def rows_of(told: dict[str, Any], predicted: PeakMemory, peaks: list[float]) -> list[Compared]:
    from trainers.before.peak_memory import calibrated

    first, *_ = told["sizes"]
    corrected = calibrated(predicted, {first: peaks[0]})
    return [
        Compared(
            told["model"], str(told["mode"]), told["compiled"], size, peak, predicted.bytes_at(size),
            None if size == first else corrected.bytes_at(size),
        )
        for size, peak in zip(told["sizes"], peaks, strict=True)
    ]  # fmt: skip


def trial(name: str, mode: str | float, compiled: bool, micro_batch_size: int, device: str) -> Any:
    from trainers.config import TrialConfig

    return TrialConfig.model_validate({
        **MODELS[name],
        "micro_batch_size": micro_batch_size, "gradient_accumulation_steps": 2, "activation_checkpointing": mode,
        "compile": compiled, "dynamic_micro_batch": True, "learning_rate": 1e-3, "sample_budget": 10**6,
        "precision": "bfloat16" if device == "cuda" else "float32",
    })  # fmt: skip


def measured(model: str, mode: str | float, compiled: bool, sizes: list[int], device: str) -> list[float]:
    """The peak of a short run at each size, as the trial would report it."""
    import torch

    from trainers.before.compilation import warm_up
    from trainers.device.memory import give_back
    from trainers.run import Run

    peaks = []
    for size in sizes:
        config = trial(model, mode, compiled, size, device)
        warm_up(config, torch.device(device))
        run = Run(config, torch.device(device))
        for _ in range(STEPS):
            run.step()
        run.read()
        found = run.metrics()
        peaks.append(found.get("peak_allocated_bytes", found["peak_memory_bytes"]))
        del run
        give_back()
    return peaks


def print_row(one: Compared) -> None:
    name = f"{one.model} {one.mode}{'' if one.compiled else ', eager'}"
    corrected = "" if one.calibrated_error is None else f"{one.calibrated_error:+.1%}"
    measured_mib, predicted_mib = one.measured_bytes / 2**20, one.predicted_bytes / 2**20
    print(
        f"{name:>24} {one.micro_batch_size:>3} {measured_mib:>10.1f} {predicted_mib:>10.1f} {one.error:>+7.1%} {corrected:>10}",
        flush=True,
    )


def summary(found: list[Compared]) -> dict[str, float]:
    """The worst errors; a memory budget's is apart, as it has no prediction of its own."""
    budgets = [one for one in found if one.mode not in ("none", "selective", "full")]
    own = [one for one in found if one not in budgets]
    corrected = [abs(one.calibrated_error) for one in found if one.compiled and one.calibrated_error is not None]
    return {
        "worst_eager_error": max(abs(one.error) for one in own if not one.compiled),
        "worst_compiled_error": max(abs(one.error) for one in own if one.compiled),
        "worst_memory_budget_error": max(abs(one.error) for one in budgets),
        "worst_compiled_error_calibrated": max(corrected),
    }


if __name__ == "__main__":
    main()
