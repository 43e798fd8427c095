"""Peak memory and seconds of a step in every activation checkpointing mode, compiled and eager.

    python benchmarks/activation_checkpointing.py [--device cpu|cuda] [--model small|gpt2-124m] [--quick]

The modes take turns, round after round. Each peak is that of a process that runs this mode alone.
"""

from __future__ import annotations

import json
import statistics
import sys
import tempfile
from typing import Any

from side_by_side import in_fresh_process, machine, options

MODES: tuple[tuple[str | float, bool], ...] = (
    ("none", False), ("selective", False), ("full", False),
    ("none", True), ("selective", True), ("full", True), (0.5, True), (0.1, True),
)  # fmt: skip
STEPS = 12
SMALL = {
    "model": {"target": "gpt", "kwargs": {"num_layers": 4, "num_heads": 4, "hidden_dim": 192}},
    "data": {
        "target": "python_stdlib",
        "kwargs": {"seq_len": 192, "tokenizer": {"train_bpe": 2048}, "max_text_bytes": 2_000_000},
    },
}


def main() -> None:
    if len(sys.argv) > 1 and sys.argv[1] == "--one":
        return print(json.dumps(one_mode(json.loads(sys.argv[2]))))
    chosen = options(__doc__, small=SMALL)
    found: dict[str, list[dict[str, float]]] = {}
    with tempfile.TemporaryDirectory() as folder:
        for round_ in range(1 if chosen.quick else 3):
            for mode, compiled in MODES:
                name = f"{mode}{'' if compiled else ', eager'}"
                told = {"mode": mode, "compiled": compiled, "device": chosen.device, "gpt": chosen.trial}
                found.setdefault(name, []).append(in_fresh_process(__file__, told, folder))
            print(
                f"round {round_ + 1}: " + ", ".join(f"{n} {v[-1]['step_seconds']:.3f} s" for n, v in found.items()),
                flush=True,
            )
    medians = {
        name: {key: statistics.median(v[key] for v in values) for key in values[0]} for name, values in found.items()
    }
    print_table(medians, found)
    print(json.dumps(medians))


def one_mode(told: dict[str, Any]) -> dict[str, float]:
    import torch

    from batchscout.trainers.before.compilation import warm_up
    from batchscout.trainers.config import TrialConfig
    from batchscout.trainers.run import Run

    device = torch.device(told["device"])
    config = TrialConfig.model_validate({
        **told["gpt"],
        "micro_batch_size": 8, "gradient_accumulation_steps": 2, "compile": told["compiled"],
        "activation_checkpointing": told["mode"], "learning_rate": 1e-3, "sample_budget": 10**6,
        "precision": "bfloat16" if device.type == "cuda" else "float32",
    })  # fmt: skip
    warm_up(config, device)
    run = Run(config, device)
    for _ in range(STEPS):
        run.step()
    run.read()
    metrics = run.metrics()
    return {key: metrics[key] for key in ("peak_memory_bytes", "step_seconds")}


def print_table(medians: dict[str, dict[str, float]], found: dict[str, list[dict[str, float]]]) -> None:
    print(machine())
    print(f"{'mode':>18} {'peak, MiB':>10} {'seconds per step, lowest to highest':>38}")
    for name, values in medians.items():
        times = [one["step_seconds"] for one in found[name]]
        spread = f"{values['step_seconds']:.3f} [{min(times):.3f}, {max(times):.3f}]"
        print(f"{name:>18} {values['peak_memory_bytes'] / 2**20:>10.1f} {spread:>38}")


if __name__ == "__main__":
    main()
