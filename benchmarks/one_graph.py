"""CPU seconds and peak memory of a step by what is compiled, and by how its cross-entropy is computed.

    python benchmarks/one_graph.py [--device cpu|cuda] [--model small|gpt2-124m] [--quick]

Eager code, compiled blocks and the model as one graph, each with its logits held whole and in chunks. They take turns, round
after round; each turn is a process that runs its side alone, for a while on the shared cache of compiled code. Seconds are those
of the CPU, which others on the machine do not lengthen; on a GPU they are those of the clock. The small model has a head as large
beside its blocks as GPT-2's.
"""

from __future__ import annotations

import json
import statistics
import sys
import tempfile
import time
from typing import Any

from side_by_side import in_fresh_process, machine, options, ratio_by_round

SIDES: dict[str, tuple[bool | str, str]] = {
    "eager": (False, "whole"),
    "eager, chunked": (False, "chunked"),
    "blocks": (True, "whole"),
    "blocks, chunked": (True, "chunked"),
    "whole": ("whole", "whole"),
    "whole, chunked": ("whole", "chunked"),
}
HELD_AGAINST = "blocks"
WARM_UP, STEPS = 3, 12
SMALL = {
    "model": {"target": "gpt", "kwargs": {"num_layers": 4, "num_heads": 4, "hidden_dim": 192, "vocab_size": 8192}},
    "data": {
        "target": "python_stdlib",
        "kwargs": {"seq_len": 192, "tokenizer": "bytes", "max_text_bytes": 2_000_000},
    },
}


def main() -> None:
    if len(sys.argv) > 1 and sys.argv[1] == "--one":
        return print(json.dumps(one_side(json.loads(sys.argv[2]))))
    chosen = options(__doc__, small=SMALL)
    found: dict[str, list[dict[str, float]]] = {}
    with tempfile.TemporaryDirectory() as folder:
        for round_ in range(2 if chosen.quick else 4):
            for name in SIDES:
                told = {"side": name, "device": chosen.device, "gpt": chosen.trial}
                found.setdefault(name, []).append(in_fresh_process(__file__, told, folder))
            print(
                f"round {round_ + 1}: " + ", ".join(f"{n} {v[-1]['seconds']:.3f} s" for n, v in found.items()),
                flush=True,
            )
    print(machine())
    print(json.dumps(print_table(found)))


def one_side(told: dict[str, Any]) -> dict[str, float]:
    import torch

    from batchscout.trainers.before.compilation import warm_up
    from batchscout.trainers.config import TrialConfig
    from batchscout.trainers.run import Run

    device, gpt = torch.device(told["device"]), told["gpt"]
    compiled, cross_entropy = SIDES[told["side"]]
    if device.type == "cpu":
        torch.set_num_threads(1)
    config = TrialConfig.model_validate({
        **gpt, "model": {**gpt["model"], "kwargs": {**gpt["model"]["kwargs"], "cross_entropy": cross_entropy}},
        "micro_batch_size": 8, "compile": compiled, "learning_rate": 1e-3, "sample_budget": 10**6,
        "statistics": False, "precision": "bfloat16" if device.type == "cuda" else "float32",
    })  # fmt: skip
    compile_seconds = warm_up(config, device)
    run = Run(config, device)
    clock = time.perf_counter if device.type == "cuda" else time.process_time
    seconds = []
    for _ in range(WARM_UP + STEPS):
        started = clock()
        run.step()
        run.read()
        seconds.append(clock() - started)
    peak = run.metrics()["peak_memory_bytes"]
    return {"seconds": statistics.median(seconds[WARM_UP:]), "peak_bytes": peak, "compile_seconds": compile_seconds}


def print_table(found: dict[str, list[dict[str, float]]]) -> dict[str, dict[str, float]]:
    """Print a row for each side, and return its figures. Ratios are to compiled blocks, within a round."""
    print(f"{'side':>16} {'seconds a step':>15} {'x blocks, 95 % interval':>24} {'peak, MiB':>10} {'x blocks':>9}")
    figures = {}
    base = [one["seconds"] for one in found[HELD_AGAINST]]
    base_peak = statistics.median(one["peak_bytes"] for one in found[HELD_AGAINST])
    for name, values in found.items():
        seconds, peak = (statistics.median(one[key] for one in values) for key in ("seconds", "peak_bytes"))
        ratio, low, high = ratio_by_round([one["seconds"] for one in values], base)
        spread = f"{ratio:.3f} [{low:.3f}, {high:.3f}]"
        print(f"{name:>16} {seconds:>15.4f} {spread:>24} {peak / 2**20:>10.1f} {peak / base_peak:>9.2f}")
        first = values[0]["compile_seconds"]  # later processes find its code in the cache
        figures[name] = {
            "step_seconds": seconds,
            "ratio_to_blocks": ratio,
            "peak_bytes": peak,
            "compile_seconds": first,
        }
    return figures


if __name__ == "__main__":
    main()
