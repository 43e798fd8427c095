"""Tokens/s of one optimizer step: ours, against a plain loop, Accelerate, Lightning and the transformers Trainer.

    python benchmarks/step_throughput.py [--device cpu|cuda] [--model small|gpt2-124m] [--quick]

Every side trains the same GPT (its blocks compiled alike; those called `whole` as one graph) on the same packed text with the
same split of the batch, fused AdamW and clipping, each in a process of its own, of which one runs at a time, for a window of 50 steps (20 with --quick). The
windows of a round so lie seconds apart, and what else the machine does meets all sides alike. `ours` reports loss, norm
and speed only; `ours, all statistics` everything that a run can report (of 50 steps it looks at the micro-gradients of
ten, and at the update of one).
"""

from __future__ import annotations

import json
import multiprocessing
import os
import statistics
import tempfile
import time
import warnings
from collections.abc import Iterator
from functools import partial
from multiprocessing.connection import Connection
from typing import Any

from side_by_side import interleaved, machine, options, ratio_by_round

SPLITS = {"cpu": (4, 4), "cuda": (16, 2)}  # a GPU is not busy with 4 samples
"""(micro-batch size, accumulation steps) on each kind of device."""
# A turn's first step finds the caches full of another side's data, and is not timed. A window is so long that the
# statistics that are taken now and then fall as often into each; a median of shorter windows would miss them.
LEAD_IN, WINDOW, QUICK_WINDOW = (
    {"cpu": 1, "cuda": 3},
    50,
    20,
)  # on a GPU a side also gets back the memory that it left to the others
# These settings (glibc's largest threshold, and 4 GiB) make the heap keep its memory. A heap that gives memory back
# takes 2,000 to 6,000 page faults a step, depending on where it lies, and slows a process by up to four percent for as
# long as it lives.
STEADY_HEAP = {"MALLOC_MMAP_THRESHOLD_": str(32 * 2**20), "MALLOC_TRIM_THRESHOLD_": str(4 * 2**30)}
# Where a process's memory comes to lie is chance, so all processes are started anew this often.
BLOCKS, ROUNDS = {"cpu": 2, "cuda": 1}, 3
QUICK_BLOCKS, QUICK_ROUNDS = 1, {"cpu": 2, "cuda": 1}
SMALL = {
    "model": {"target": "gpt", "kwargs": {"num_layers": 4, "num_heads": 4, "hidden_dim": 128}},
    "data": {
        "target": "python_stdlib",
        "kwargs": {"seq_len": 128, "tokenizer": {"train_bpe": 1024}, "max_text_bytes": 2_000_000},
    },
}
LEARNING_RATE = 1e-3
PEERS = ("plain", "plain, whole", "accelerate", "lightning", "transformers")


def main() -> None:
    chosen = options(__doc__, small=SMALL)
    os.environ.update(STEADY_HEAP)  # for the sides, which are processes of their own
    device, gpt = chosen.device, chosen.trial
    blocks, rounds = (QUICK_BLOCKS, QUICK_ROUNDS[device]) if chosen.quick else (BLOCKS[device], ROUNDS)
    window = QUICK_WINDOW if chosen.quick else WINDOW
    found: dict[str, list[float]] = {}
    for number in range(blocks):
        print(f"block {number + 1} of {blocks}")
        for name, values in block(device, gpt, rounds, window).items():
            found.setdefault(name, []).extend(values)
    tokens = samples_per_step(device) * gpt["data"]["kwargs"]["seq_len"]
    print_table(found, tokens, device)
    without, with_all = found["ours"], found["ours, all statistics"]
    line = {
        "ratio": {peer: ratio_by_round(without, found[peer])[0] for peer in PEERS},
        "ratio_whole": {peer: ratio_by_round(found["ours, whole"], found[peer])[0] for peer in PEERS},
        "ratio_all_statistics": {peer: ratio_by_round(with_all, found[peer])[0] for peer in PEERS},
        "metrics_overhead": 1 - ratio_by_round(with_all, without)[0],
        "tokens_per_second": {name: tokens * statistics.median(values) for name, values in found.items()},
    }
    print(json.dumps(line))


def block(device: str, gpt: dict[str, Any], rounds: int, window: int) -> dict[str, list[float]]:
    """Steps per second of every side in each round, in processes of their own. window: the steps that are timed of each."""
    sides = {name: Side(name, device, gpt) for name in ("ours", "ours, whole", "ours, all statistics", *PEERS)}
    for side in sides.values():
        side.take(1)  # whatever is imported, compiled or created once is behind us
    found = interleaved({name: partial(side.take, window) for name, side in sides.items()}, rounds)
    for side in sides.values():
        side.finish()
    return found


def samples_per_step(device: str) -> int:
    micro_batch_size, accumulation = SPLITS[device]
    return micro_batch_size * accumulation


def config(device: str, gpt: dict[str, Any], *, statistics_on: bool = True, whole: bool = False) -> Any:
    from batchscout.trainers.config import TrialConfig

    micro_batch_size, accumulation = SPLITS[device]
    return TrialConfig.model_validate({
        **gpt,
        "micro_batch_size": micro_batch_size,
        "gradient_accumulation_steps": accumulation,
        "compile": "whole" if whole else True,
        "precision": "bfloat16" if device == "cuda" else "float32",
        "learning_rate": LEARNING_RATE,
        "schedule": {"type": "constant"},
        "sample_budget": 10**9,
        "statistics": statistics_on,
    })  # fmt: skip


class Side:
    """A process that trains for ever, and waits wherever it is when its turn is over."""

    def __init__(self, name: str, device: str, gpt: dict[str, Any]) -> None:
        spawn = multiprocessing.get_context("spawn")
        self._there, theirs = spawn.Pipe()
        self._process = spawn.Process(target=run_side, args=(theirs, name, device, gpt), daemon=True)
        self._process.start()

    def take(self, window: int) -> float:
        """Let it run for a turn, and return the steps per second of the turn's window of so many steps."""
        self._there.send(window)
        return self._there.recv()

    def finish(self) -> None:
        self._there.send(0)
        self._process.join()


def run_side(driver: Connection, name: str, device: str, gpt: dict[str, Any]) -> None:
    warnings.simplefilter("ignore")  # of the peers, about loggers and workers that are left out on purpose
    train = {
        "ours": without_statistics,
        "ours, whole": in_one_graph,
        "ours, all statistics": with_statistics,
        "plain": plain,
        "plain, whole": plain_in_one_graph,
        "accelerate": accelerate,
        "lightning": lightning,
        "transformers": transformers,
    }[name]
    train(Turns(driver, device), device, gpt)


class Turns:
    """The turns that a side's process is given, seen from within it."""

    def __init__(self, driver: Connection, device: str) -> None:
        import torch

        from batchscout.trainers.speed.throughput import StepClock

        self._driver, self._steps, self._clock = driver, 0, StepClock(torch.device(device))
        self._lead_in, self._gives_back = LEAD_IN[device], device == "cuda"
        self._window: int = driver.recv()

    @property
    def over(self) -> bool:
        return self._window == 0

    def step(self) -> None:
        """Call after every optimizer step. After the last step of a turn, return only when the next turn begins."""
        self._steps += 1
        if self._steps == self._lead_in:
            self._clock.read()
        elif self._steps == self._lead_in + self._window:
            self._clock.end_of_step()
            rate = self._window / sum(taken.seconds for taken in self._clock.read())
            if self._gives_back:
                give_back()
            self._driver.send(rate)
            self._steps, self._window = 0, self._driver.recv()


def give_back() -> None:
    """Leave the GPU's memory to the next side: all of them together would not fit."""
    from batchscout.trainers.device import memory

    memory.give_back()


def in_one_graph(turns: Turns, device: str, gpt: dict[str, Any]) -> None:
    ours(turns, device, gpt, statistics_on=False, whole=True)


def plain_in_one_graph(turns: Turns, device: str, gpt: dict[str, Any]) -> None:
    plain(turns, device, gpt, whole=True)


def without_statistics(turns: Turns, device: str, gpt: dict[str, Any]) -> None:
    ours(turns, device, gpt, statistics_on=False)


def with_statistics(turns: Turns, device: str, gpt: dict[str, Any]) -> None:
    ours(turns, device, gpt, statistics_on=True)


def ours(turns: Turns, device: str, gpt: dict[str, Any], *, statistics_on: bool, whole: bool = False) -> None:
    import torch

    from batchscout.trainers.noise.gradient_noise import FIRST_STEPS
    from batchscout.trainers.reporting.reporter import SECONDS_BETWEEN_PROGRESS_REPORTS
    from batchscout.trainers.run import STEPS_PER_INTERVAL, Run

    run = Run(config(device, gpt, statistics_on=statistics_on, whole=whole), torch.device(device))
    run.num_steps = FIRST_STEPS  # of which it looks at every gradient; a run worth timing is past them
    # On a GPU a process's first report waits 2 to 20 s for what others give back of its memory, and starts NVML. It
    # would fall into the first timed window.
    run.metrics()
    last_report = time.monotonic()
    while not turns.over:
        run.step()
        if run.num_steps % STEPS_PER_INTERVAL == 0:  # as the loop does
            run.read()
            if time.monotonic() - last_report >= SECONDS_BETWEEN_PROGRESS_REPORTS:
                run.metrics()
                last_report = time.monotonic()
        turns.step()


def parts(device: str, gpt: dict[str, Any], *, whole: bool = False) -> tuple[Any, Any, Any]:
    """(a compiled model, its optimizer, the training samples): the same for every peer."""
    import torch

    from batchscout.trainers.data.samples import load_data
    from batchscout.trainers.model.activation_checkpointing import apply_to_blocks
    from batchscout.trainers.model.models import initial_module
    from batchscout.trainers.step.optimizers import build_optimizer

    trial = config(device, gpt, whole=whole)
    train_set, _ = load_data(trial.data)
    model = apply_to_blocks(initial_module(trial, train_set).to(torch.device(device)), trial)
    return model, build_optimizer(model, trial), train_set


def mean_loss(model: Any, batch: Any) -> Any:
    loss_sum, num_targets = model(batch)
    return loss_sum / num_targets


def loader(train_set: Any, device: str) -> Any:
    from torch.utils.data import DataLoader, Subset

    micro_batch_size, _ = SPLITS[device]
    whole_steps = len(train_set) // samples_per_step(device) * samples_per_step(device)
    samples = Subset(train_set, range(whole_steps))
    return DataLoader(samples, batch_size=micro_batch_size, shuffle=True, pin_memory=device == "cuda")


def endless(batches: Any) -> Iterator[Any]:
    while True:
        yield from batches


def plain(turns: Turns, device: str, gpt: dict[str, Any], *, whole: bool = False) -> None:
    """What one would write by hand."""
    import torch

    model, optimizer, train_set = parts(device, gpt, whole=whole)
    batches = endless(loader(train_set, device))
    _, accumulation = SPLITS[device]
    while not turns.over:
        for _ in range(accumulation):
            batch = {key: value.to(device, non_blocking=True) for key, value in next(batches).items()}
            with torch.autocast(device, torch.bfloat16, enabled=device == "cuda"):
                loss = mean_loss(model, batch) / accumulation
            loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        turns.step()


def accelerate(turns: Turns, device: str, gpt: dict[str, Any]) -> None:
    """As in Accelerate's guide to gradient accumulation."""
    from accelerate import Accelerator  # pyright: ignore[reportMissingImports]  (an extra)

    accelerator = Accelerator(
        cpu=device == "cpu",
        gradient_accumulation_steps=SPLITS[device][1],
        mixed_precision="bf16" if device == "cuda" else "no",
    )
    model, optimizer, train_set = parts(device, gpt)
    model, optimizer, batches = accelerator.prepare(model, optimizer, loader(train_set, device))
    for batch in endless(batches):
        with accelerator.accumulate(model):
            accelerator.backward(mean_loss(model, batch))
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
        if accelerator.sync_gradients:
            turns.step()
        if turns.over:
            return


def lightning(turns: Turns, device: str, gpt: dict[str, Any]) -> None:
    """A LightningModule with automatic optimization; no logger, checkpoint or progress bar."""
    import lightning as L  # pyright: ignore[reportMissingImports]  (an extra)
    import torch

    _, accumulation = SPLITS[device]

    class Module(L.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model, self.made, self.train_set = parts(device, gpt)

        def training_step(self, batch: Any) -> Any:
            return mean_loss(self.model, batch)

        def configure_optimizers(self) -> Any:
            return self.made

        def configure_gradient_clipping(
            self, optimizer: Any, gradient_clip_val: Any = None, *_: Any, **__: Any
        ) -> None:
            """Clip by torch's own function: under autocast Lightning refuses to, for any fused optimizer."""
            torch.nn.utils.clip_grad_norm_(self.parameters(), gradient_clip_val)

        def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
            if (batch_idx + 1) % accumulation == 0:
                turns.step()
            self.trainer.should_stop = turns.over

    module = Module()
    with tempfile.TemporaryDirectory() as folder:
        L.Trainer(
            accelerator="gpu" if device == "cuda" else "cpu", devices=1, max_epochs=-1,
            accumulate_grad_batches=accumulation, gradient_clip_val=1.0, default_root_dir=folder,
            precision="bf16-mixed" if device == "cuda" else "32-true", logger=False, barebones=False,
            enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
        ).fit(module, loader(module.train_set, device))  # fmt: skip


def transformers(turns: Turns, device: str, gpt: dict[str, Any]) -> None:
    """The Trainer with a model that returns its loss; nothing logged or saved."""
    import torch
    from transformers import Trainer, TrainerCallback, TrainingArguments

    model, optimizer, train_set = parts(device, gpt)
    micro_batch_size, accumulation = SPLITS[device]

    class Wrapped(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = model

        def forward(self, input_ids: Any, targets: Any) -> dict[str, Any]:
            return {"loss": mean_loss(self.model, {"input_ids": input_ids, "targets": targets})}

    class EndOfStep(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            turns.step()
            control.should_training_stop = turns.over

    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            folder, per_device_train_batch_size=micro_batch_size, gradient_accumulation_steps=accumulation,
            max_steps=10**6, max_grad_norm=1.0, lr_scheduler_type="constant", report_to=[],
            logging_strategy="no", save_strategy="no", disable_tqdm=True, use_cpu=device == "cpu",
            bf16=device == "cuda", remove_unused_columns=False, label_names=[],
        )  # fmt: skip
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)
        batches = loader(train_set, device)
        Trainer(
            Wrapped(),
            arguments,
            train_dataset=batches.dataset,
            optimizers=(optimizer, schedule),
            callbacks=[EndOfStep()],
        ).train()


def print_table(found: dict[str, list[float]], tokens: int, device: str) -> None:
    """Print a row for each side; `tokens` is how many one step trains on."""
    print(machine())
    print(
        f"tokens/s at {' x '.join(map(str, SPLITS[device]))} samples, {tokens:,} tokens a step; "
        "median of the ratios within a round and its 95 % interval"
    )
    print(f"{'side':>22} {'tokens/s':>10} {'ours / it':>26} {'ours with all statistics / it':>32}")
    for name, values in found.items():
        ratios = []
        for side in ("ours", "ours, all statistics"):
            median, low, high = ratio_by_round(found[side], values)
            ratios.append(f"{median:.3f} [{low:.3f}, {high:.3f}]")
        print(f"{name:>22} {tokens * statistics.median(values):>10,.0f} {ratios[0]:>26} {ratios[1]:>32}")


if __name__ == "__main__":
    main()
