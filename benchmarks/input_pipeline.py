"""The share of a step that waits for data: ours, against a DataLoader loop by hand and Lightning.

    python benchmarks/input_pipeline.py [--device cpu|cuda] [--quick]

Every side trains the same GPT on the same packed text in the same split of the batch, each in a process of its own (with --quick all in
one), and one at a time. A throttled set takes some milliseconds more for each sample, in which it waits, as a disk or a network would make it; with workers
these pass beside the steps. Of the peers, what they spend in the next() of their loader is counted; of ours, what a run tells as data_wait.
"""

from __future__ import annotations

import itertools
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from typing import Any

from side_by_side import in_fresh_process, machine, options

MICRO_BATCH_SIZE, ACCUMULATION = 8, 2
SECONDS_PER_SAMPLE = 0.004
"""What the throttled set takes more."""
WORKERS = (0, 2)
LEAD_IN, STEPS, QUICK_STEPS = 5, 60, 15
"""The first steps start workers and fill queues, and do not count."""
ROUNDS, QUICK_ROUNDS = 3, 1
SIDES = ("ours", "by hand", "lightning")
GPT = {"num_layers": 2, "num_heads": 4, "hidden_dim": 128}
TEXT = {"seq_len": 64, "tokenizer": "bytes", "max_text_bytes": 500_000}


def main() -> None:
    if len(sys.argv) > 1 and sys.argv[1] == "--one":
        return print(json.dumps(one_side(json.loads(sys.argv[2]))))
    chosen = options(__doc__)
    os.environ["OMP_NUM_THREADS"] = "1"  # a core computes, and others are left to the workers
    rounds, steps = (QUICK_ROUNDS, QUICK_STEPS) if chosen.quick else (ROUNDS, STEPS)
    found: dict[str, list[dict[str, float]]] = {}
    with tempfile.TemporaryDirectory() as folder:
        for number in range(rounds):
            for seconds, workers, side in itertools.product((0.0, SECONDS_PER_SAMPLE), WORKERS, SIDES):
                told = {"side": side, "workers": workers, "seconds": seconds, "steps": steps, "device": chosen.device}
                figures = one_side(told) if chosen.quick else in_fresh_process(__file__, told, folder)
                found.setdefault(name_of(side, workers, seconds), []).append(figures)
                print(name_of(side, workers, seconds), figures, file=sys.stderr, flush=True)
            print(f"round {number + 1} of {rounds}", flush=True)
    medians = {
        name: {key: statistics.median(v[key] for v in values) for key in values[0]} for name, values in found.items()
    }
    print_table(medians, found)
    print(json.dumps(medians))


def name_of(side: str, workers: int, seconds: float) -> str:
    return f"{side}, {workers} workers{', throttled' if seconds else ''}"


def one_side(told: dict[str, Any]) -> dict[str, float]:
    run = {"ours": ours, "by hand": by_hand, "lightning": lightning}[told["side"]]
    seconds, data_seconds = run(told)
    samples = told["steps"] * MICRO_BATCH_SIZE * ACCUMULATION
    return {"data_wait": data_seconds / seconds, "samples_per_second": samples / seconds}


class Throttled:
    """A set that waits before it hands out a sample. It has no `__getitems__`, so its samples come one by one."""

    def __init__(self, samples: Any, seconds: float) -> None:
        self.samples, self.seconds = samples, seconds
        self.vocab_size, self.seq_len = samples.vocab_size, samples.seq_len

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int) -> Any:
        if self.seconds:
            time.sleep(self.seconds)
        return self.samples[index]


def data(seconds: float) -> tuple[Throttled, Any]:
    from batchscout.trainers.data.text import python_stdlib

    train, val = python_stdlib(**TEXT)
    return Throttled(train, seconds), val


def config(told: dict[str, Any]) -> Any:
    from batchscout.trainers.config import TrialConfig

    return TrialConfig.model_validate({
        "model": {"target": "gpt", "kwargs": GPT},
        "data": {"target": "input_pipeline:data", "kwargs": {"seconds": told["seconds"]}, "workers": told["workers"]},
        "micro_batch_size": MICRO_BATCH_SIZE, "gradient_accumulation_steps": ACCUMULATION, "compile": False,
        "precision": "bfloat16" if told["device"] == "cuda" else "float32", "learning_rate": 1e-3,
        "schedule": {"type": "constant"}, "sample_budget": 10**6, "statistics": False, "evaluation_samples": 0,
    })  # fmt: skip


def ours(told: dict[str, Any]) -> tuple[float, float]:
    import torch

    from batchscout.trainers.run import STEPS_PER_INTERVAL, Run

    run = Run(config(told), torch.device(told["device"]))
    for _ in range(LEAD_IN):
        run.step()
    run.read()
    run.meter.begin_pace()
    begin = time.perf_counter()
    for number in range(1, told["steps"] + 1):
        run.step()
        if number % STEPS_PER_INTERVAL == 0:  # as the loop does
            run.read()
    run.read()
    seconds = time.perf_counter() - begin
    run.close()
    return seconds, seconds * run.metrics()["data_wait"]


class Timed:
    """A loader that counts what is spent in its next(), once it is told to."""

    def __init__(self, loader: Any) -> None:
        self.loader, self.data_seconds = loader, 0.0

    def __iter__(self) -> Iterator[Any]:
        while True:
            batches = iter(self.loader)
            while True:
                begin = time.perf_counter()
                batch = next(batches, None)
                self.data_seconds += time.perf_counter() - begin
                if batch is None:
                    break
                yield batch


def parts(told: dict[str, Any]) -> tuple[Any, Any, Timed]:
    """(the model, its optimizer, its batches): the same for each peer."""
    import torch
    from torch.utils.data import DataLoader

    from batchscout.trainers.data.samples import load_data
    from batchscout.trainers.model.models import initial_module
    from batchscout.trainers.step.optimizers import build_optimizer

    trial, on_gpu = config(told), told["device"] == "cuda"
    train_set: Any = load_data(trial.data)[0]
    model = initial_module(trial, train_set).to(torch.device(told["device"]))
    batches: Any = DataLoader(
        train_set, MICRO_BATCH_SIZE, shuffle=True, drop_last=True, num_workers=told["workers"], pin_memory=on_gpu
    )
    return model, build_optimizer(model, trial), Timed(batches)


class Window:
    """Counts steps, and what a loader waited in those that count."""

    def __init__(self, batches: Timed, steps: int, synchronize: Callable[[], object]) -> None:
        self._batches, self._steps, self._synchronize = batches, steps, synchronize
        self._taken, self.result = 0, (0.0, 0.0)

    def end_of_step(self) -> bool:
        """Return True after the last one."""
        self._taken += 1
        if self._taken == LEAD_IN:
            self._synchronize()
            self._begin, self._batches.data_seconds = time.perf_counter(), 0.0
        if self._taken < LEAD_IN + self._steps:
            return False
        self._synchronize()
        self.result = (time.perf_counter() - self._begin, self._batches.data_seconds)
        return True


def window_of(batches: Timed, told: dict[str, Any]) -> Window:
    import torch

    return Window(batches, told["steps"], torch.cuda.synchronize if told["device"] == "cuda" else lambda: None)


def mean_loss(model: Any, batch: Any) -> Any:
    loss_sum, num_targets = model(batch)
    return loss_sum / num_targets


def by_hand(told: dict[str, Any]) -> tuple[float, float]:
    """What one would write."""
    import torch

    model, optimizer, batches = parts(told)
    window, device, endless = window_of(batches, told), told["device"], iter(batches)
    while True:
        for _ in range(ACCUMULATION):
            batch = {key: value.to(device, non_blocking=True) for key, value in next(endless).items()}
            with torch.autocast(device, torch.bfloat16, enabled=device == "cuda"):
                loss = mean_loss(model, batch) / ACCUMULATION
            loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        if window.end_of_step():
            return window.result


def lightning(told: dict[str, Any]) -> tuple[float, float]:
    """A LightningModule with automatic optimization; no logger, checkpoint or progress bar."""
    import lightning as L  # pyright: ignore[reportMissingImports]  (an extra)

    model, optimizer, batches = parts(told)
    window = window_of(batches, told)

    class Module(L.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model = model

        def training_step(self, batch: Any) -> Any:
            return mean_loss(self.model, batch)

        def configure_optimizers(self) -> Any:
            return optimizer

        def configure_gradient_clipping(
            self, optimizer: Any, gradient_clip_val: Any = None, *_: Any, **__: Any
        ) -> None:
            """Clip by torch's own function: under autocast Lightning refuses to, for any fused optimizer."""
            import torch

            torch.nn.utils.clip_grad_norm_(self.parameters(), gradient_clip_val)

        def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
            if (batch_idx + 1) % ACCUMULATION == 0:
                self.trainer.should_stop = window.end_of_step()

    with tempfile.TemporaryDirectory() as folder:
        L.Trainer(
            accelerator="gpu" if told["device"] == "cuda" else "cpu", devices=1, max_epochs=1, min_epochs=0,
            accumulate_grad_batches=ACCUMULATION, gradient_clip_val=1.0, default_root_dir=folder, logger=False,
            precision="bf16-mixed" if told["device"] == "cuda" else "32-true", barebones=False,
            enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
        ).fit(Module(), batches)  # fmt: skip
    return window.result


def print_table(medians: dict[str, dict[str, float]], found: dict[str, list[dict[str, float]]]) -> None:
    print(machine())
    print(
        f"{MICRO_BATCH_SIZE} x {ACCUMULATION} samples a step; a throttled set takes {1000 * SECONDS_PER_SAMPLE:g} ms more for each"
    )
    print(f"{'side':>34} {'waits for data, lowest to highest':>36} {'samples/s':>10}")
    for name, values in medians.items():
        waits = [one["data_wait"] for one in found[name]]
        spread = f"{values['data_wait']:.1%} [{min(waits):.1%}, {max(waits):.1%}]"
        print(f"{name:>34} {spread:>36} {values['samples_per_second']:>10,.0f}")


if __name__ == "__main__":
    main()
