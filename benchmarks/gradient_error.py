"""Relative error of the first gradient on padded data, against one process on the whole batch: ours and its peers.

    python benchmarks/gradient_error.py [--device cpu|cuda] [--model small|gpt2-124m] [--quick]

16 sequences of uneven length, 4 micro-batches of 4. Each side is written as its own guide writes accumulation: a mean
loss per micro-batch, which it averages; transformers is told the number of targets of the whole batch, as its own
models are. The gradient is what the optimizer has stepped with (Lightning computes the last part of it within the
step).
"""

from __future__ import annotations

import json
import tempfile
import warnings
from pathlib import Path
from typing import Any

from side_by_side import join_two_ranks, machine, options

NUM_SAMPLES, SEQ_LEN, VOCAB_SIZE = 16, 64, 128
MICRO_BATCH_SIZE, ACCUMULATION = 4, 4
SMALL = {"model": {"target": "gpt", "kwargs": {"num_layers": 2, "num_heads": 2, "hidden_dim": 64}}}
SIDES = ("ours_1_rank", "ours_2_ranks", "plain", "accelerate", "lightning", "transformers")


def main() -> None:
    chosen = options(__doc__, small=SMALL)
    warnings.simplefilter("ignore")
    errors = {side: error_of(side, chosen.device, chosen.trial["model"]) for side in SIDES}
    print(machine())
    for side, error in errors.items():
        print(f"{side:>14} {error:>10.1e}")
    print(json.dumps(errors))


def padded(num_samples: int = NUM_SAMPLES) -> tuple[Any, Any]:
    """Return (train, val): random tokens. The first 1 to T of each sample are targets, T drawn anew for each."""
    import torch

    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(VOCAB_SIZE, (num_samples, SEQ_LEN + 1), generator=generator)
    targets = tokens[:, 1:].clone()
    lengths = torch.randint(1, SEQ_LEN + 1, (num_samples, 1), generator=generator)
    targets[torch.arange(SEQ_LEN) >= lengths] = -100
    samples = [{"input_ids": i, "targets": t} for i, t in zip(tokens[:, :-1], targets, strict=True)]
    return samples, samples[:1]


def config(gpt: dict[str, Any], world_size: int = 1) -> Any:
    from batchscout.trainers.config import TrialConfig

    size = gpt["kwargs"] | {"vocab_size": VOCAB_SIZE, "seq_len": SEQ_LEN}
    return TrialConfig.model_validate({
        "model": gpt | {"kwargs": size},
        "data": {"target": "gradient_error:padded"},
        "micro_batch_size": MICRO_BATCH_SIZE, "gradient_accumulation_steps": ACCUMULATION // world_size,
        "world_size": world_size, "compile": False, "learning_rate": 1e-3, "sample_budget": NUM_SAMPLES,
        "optimizer": {"max_gradient_norm": None},
    })  # fmt: skip


def error_of(side: str, device: str, gpt: dict[str, Any]) -> float:
    import torch

    reference = whole_batch_gradient(device, gpt)
    gradient = {
        "ours_1_rank": lambda: ours(device, gpt),
        "ours_2_ranks": lambda: ours_2_ranks(device, gpt),
        "plain": lambda: plain(device, gpt),
        "accelerate": lambda: accelerate(device, gpt),
        "lightning": lambda: lightning(device, gpt),
        "transformers": lambda: transformers(device, gpt),
    }[side]()
    return (torch.linalg.vector_norm(gradient - reference) / torch.linalg.vector_norm(reference)).item()


def parts(device: str, gpt: dict[str, Any]) -> tuple[Any, Any, Any, list[Any]]:
    """Return (model, optimizer, data loader, the list that will hold the gradient of the first step)."""
    import torch
    from torch.utils.data import DataLoader

    from batchscout.trainers.model.models import initial_module
    from batchscout.trainers.step.optimizers import build_optimizer

    samples, _ = padded()
    model = initial_module(config(gpt), None).to(torch.device(device))
    optimizer, seen = build_optimizer(model, config(gpt)), []
    optimizer.register_step_post_hook(lambda *_: seen.append(flat(model)))
    return model, optimizer, DataLoader(samples, batch_size=MICRO_BATCH_SIZE), seen


def flat(model: Any) -> Any:
    import torch

    return torch.cat([p.grad.flatten().double().cpu() for p in model.parameters()])


def mean_loss(model: Any, batch: Any) -> Any:
    loss_sum, num_targets = model(batch)
    return loss_sum / num_targets


def whole_batch_gradient(device: str, gpt: dict[str, Any]) -> Any:
    import torch

    model, *_ = parts(device, gpt)
    samples, _ = padded()
    mean_loss(model, {key: torch.stack([s[key] for s in samples]).to(device) for key in samples[0]}).backward()
    return flat(model)


def first_gradient(trial: Any, device: Any) -> Any:
    from batchscout.trainers.run import Run

    run, seen = Run(trial, device), []
    run.optimizer.register_step_post_hook(lambda *_: seen.append(flat(run.module)))
    run.step()
    return seen[0]


def ours(device: str, gpt: dict[str, Any]) -> Any:
    import torch

    return first_gradient(config(gpt), torch.device(device))


def ours_2_ranks(device: str, gpt: dict[str, Any]) -> Any:
    import torch
    import torch.multiprocessing

    with tempfile.TemporaryDirectory() as folder:
        torch.multiprocessing.spawn(rank_of, (device, folder, gpt), nprocs=2)  # pyright: ignore[reportPrivateImportUsage]  (it is documented)
        return torch.load(Path(folder) / "gradient.pt")


def rank_of(rank: int, device: str, folder: str, gpt: dict[str, Any]) -> None:
    import torch
    import torch.distributed as dist

    from batchscout.trainers.device.device import pick_device

    join_two_ranks(rank, device, folder)
    gradient = first_gradient(config(gpt, world_size=2), pick_device())
    if rank == 0:
        torch.save(gradient, Path(folder) / "gradient.pt")
    dist.barrier()
    dist.destroy_process_group()


def plain(device: str, gpt: dict[str, Any]) -> Any:
    model, optimizer, batches, seen = parts(device, gpt)
    for batch in batches:
        (mean_loss(model, {key: value.to(device) for key, value in batch.items()}) / ACCUMULATION).backward()
    optimizer.step()
    return seen[0]


def accelerate(device: str, gpt: dict[str, Any]) -> Any:
    from accelerate import Accelerator  # pyright: ignore[reportMissingImports]  (an extra)

    accelerator = Accelerator(cpu=device == "cpu", gradient_accumulation_steps=ACCUMULATION)
    model, optimizer, batches, seen = parts(device, gpt)
    model, optimizer, batches = accelerator.prepare(model, optimizer, batches)
    for batch in batches:
        with accelerator.accumulate(model):
            accelerator.backward(mean_loss(model, batch))
            optimizer.step()
            optimizer.zero_grad()
    return seen[0]


def lightning(device: str, gpt: dict[str, Any]) -> Any:
    import lightning as L  # pyright: ignore[reportMissingImports]  (an extra)

    inner, optimizer, batches, seen = parts(device, gpt)

    class Module(L.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model = inner

        def training_step(self, batch: Any) -> Any:
            return mean_loss(self.model, batch)

        def configure_optimizers(self) -> Any:
            return optimizer

    with tempfile.TemporaryDirectory() as folder:
        L.Trainer(
            accelerator="gpu" if device == "cuda" else "cpu", devices=1, max_steps=1, default_root_dir=folder,
            accumulate_grad_batches=ACCUMULATION, logger=False, enable_checkpointing=False, enable_progress_bar=False,
            enable_model_summary=False,
        ).fit(Module(), batches)  # fmt: skip
    return seen[0]


def transformers(device: str, gpt: dict[str, Any]) -> Any:
    import torch
    from transformers import Trainer, TrainingArguments

    inner, optimizer, _, seen = parts(device, gpt)
    samples, _ = padded()

    class Wrapped(torch.nn.Module):
        accepts_loss_kwargs = True

        def __init__(self) -> None:
            super().__init__()
            self.model = inner

        def forward(self, input_ids: Any, labels: Any, num_items_in_batch: Any = None) -> dict[str, Any]:
            loss_sum, num_targets = self.model({"input_ids": input_ids, "targets": labels})
            return {"loss": loss_sum / (num_targets if num_items_in_batch is None else num_items_in_batch)}

    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            folder, per_device_train_batch_size=MICRO_BATCH_SIZE, gradient_accumulation_steps=ACCUMULATION, max_steps=1,
            max_grad_norm=0.0, report_to=[], logging_strategy="no", save_strategy="no", disable_tqdm=True,
            use_cpu=device == "cpu",
        )  # fmt: skip
        labelled: Any = [{"input_ids": s["input_ids"], "labels": s["targets"]} for s in samples]
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)
        Trainer(Wrapped(), arguments, train_dataset=labelled, optimizers=(optimizer, schedule)).train()
    return seen[0]


if __name__ == "__main__":
    main()
