"""Bytes of gradient that a rank all-reduces per optimizer step: one gradient's worth, whatever the accumulation.

    python benchmarks/communication.py [--device cpu|cuda] [--model small|gpt2-124m] [--quick]

Two ranks (gloo on a CPU and on one GPU, NCCL on two); a communication hook counts what DDP hands to its all-reduce.
"""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

from side_by_side import join_two_ranks, machine, options

RANKS = 2
ACCUMULATIONS = (1, 2, 8)
SMALL = {
    "model": {"target": "gpt", "kwargs": {"num_layers": 4, "num_heads": 4, "hidden_dim": 128}},
    "data": {
        "target": "python_stdlib",
        "kwargs": {"seq_len": 64, "tokenizer": "bytes", "max_text_bytes": 500_000},
    },
}


def main() -> None:
    import torch.multiprocessing

    chosen = options(__doc__, small=SMALL)
    with tempfile.TemporaryDirectory() as folder:
        torch.multiprocessing.spawn(rank_of, (chosen.device, folder, chosen.trial), nprocs=RANKS)  # pyright: ignore[reportPrivateImportUsage]  (it is documented)
        found = json.loads((Path(folder) / "found.json").read_text())
    gradient_bytes, sent = found["gradient_bytes"], found["bytes_per_step"]
    print(machine())
    print(f"{'accumulation':>12} {'bytes per step':>16} {'x one gradient':>16}")
    for accumulation, count in sent.items():
        print(f"{accumulation:>12} {count:>16,.0f} {count / gradient_bytes:>16.3f}")
    worst = max(sent.values()) / gradient_bytes
    print(json.dumps({"bytes_per_step": sent, "ratio_to_one_all_reduce": worst}))


def rank_of(rank: int, device: str, folder: str, gpt: dict[str, Any]) -> None:
    import torch.distributed as dist

    join_two_ranks(rank, device, folder)
    counted = {accumulation: bytes_per_step(gpt, accumulation) for accumulation in ACCUMULATIONS}
    if rank == 0:
        found = {"bytes_per_step": {k: sent for k, (sent, _) in counted.items()}, "gradient_bytes": counted[1][1]}
        (Path(folder) / "found.json").write_text(json.dumps(found))
    dist.destroy_process_group()


def bytes_per_step(gpt: dict[str, Any], accumulation: int, steps: int = 5) -> tuple[float, int]:
    """Return (bytes all-reduced per step, bytes of the whole gradient)."""
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel

    from batchscout.trainers.config import TrialConfig
    from batchscout.trainers.device.device import pick_device
    from batchscout.trainers.run import Run

    config = TrialConfig.model_validate({
        **gpt,
        "micro_batch_size": 2, "gradient_accumulation_steps": accumulation, "world_size": RANKS, "compile": False,
        "learning_rate": 1e-3, "sample_budget": 10**6,
    })  # fmt: skip
    run, sent = Run(config, pick_device()), 0

    def count(state: Any, bucket):  # DDP refuses annotations that are strings
        nonlocal sent
        sent += bucket.buffer().nbytes
        work = dist.all_reduce(bucket.buffer().div_(RANKS), async_op=True)
        assert work is not None
        return work.get_future().then(lambda future: future.value()[0])

    assert isinstance(run.model, DistributedDataParallel)
    run.model.register_comm_hook(None, count)
    for _ in range(steps):
        run.step()
    return sent / steps, sum(p.numel() * p.element_size() for p in run.parameters)


if __name__ == "__main__":
    main()
