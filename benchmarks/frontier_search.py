"""The largest micro-batch that fits: probes, out-of-memory events, seconds and unused capacity of every finder.

    python benchmarks/frontier_search.py [--device cpu|cuda] [--quick]

Ours, Accelerate's find_executable_batch_size, Lightning's batch-size finder (both modes), and doubling then bisecting,
in every case (model, activation checkpointing, limit). Each has a fresh process, in which every probe is held to the limit:
on a CPU, with one thread, by RLIMIT_DATA above what the process needs when idle; on a GPU by the caching allocator. Then its
answer is trained for some steps more, which must not run out of memory. A probe is the same work for all: optimizer state,
3 optimizer steps of 2 accumulation steps, clipping, an evaluation batch; Lightning does it in its own loop, as its guide
shows. The true limit of a case is looked for around what is predicted, with a fresh process for every size. A finder that
dies leaves everything unused. What a run on a CPU needs differs from one time to the next by up to 0.5 MiB, whatever its
size: the interpreter's heap. So limits are large beside that, and ours leaves 1 % of them free, `headroom: 1%`, which counts
as unused; the others have no such thing. Its seconds include predicting the peaks with fake tensors, a fixed cost, large
beside probes as small as these. Seconds are those of a CPU's thread, and by the clock on a GPU.
"""

from __future__ import annotations

import contextlib
import functools
import json
import logging
import multiprocessing
import os
import statistics
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from typing import Any

from side_by_side import machine, options

from batchscout.orchestrator.stages.frontier.search import Probe, SearchEnd, next_probe
from batchscout.trainers.before.peak_memory import Line

MIB = 1 << 20
LARGEST = 512  # for the finders that ask for one; Accelerate's starts there, above every true limit
WARM_UP_SIZES = (2, 32)
STEPS, ACCUMULATION = 3, 2
LATER_STEPS = 25
TIMEOUT_SECONDS = 3600.0
HEADROOM = 0.01
PRELOADED = [
    "torch",
    "accelerate",
    "lightning.pytorch",
    "batchscout.trainers.run",
    "batchscout.trainers.reporting.evaluation",
]
MODELS: dict[str, dict[str, Any]] = {
    "narrow": {"num_layers": 2, "num_heads": 2, "hidden_dim": 32, "seq_len": 64},
    "words": {"num_layers": 1, "num_heads": 2, "hidden_dim": 16, "seq_len": 32, "vocab_size": 2048},
    "many words": {"num_layers": 1, "num_heads": 1, "hidden_dim": 8, "seq_len": 32, "vocab_size": 2048},
    "gpt 23M": {"num_layers": 6, "num_heads": 8, "hidden_dim": 512, "seq_len": 256, "vocab_size": 8192},
    "gpt 86M": {"num_layers": 12, "num_heads": 12, "hidden_dim": 768, "seq_len": 256, "vocab_size": 1024},
}


@dataclass(frozen=True)
class Case:
    model: str
    activation_checkpointing: str
    limit_mebibytes: int
    device: str = "cpu"

    def __str__(self) -> str:
        return f"{self.model}, {self.activation_checkpointing}, {self.limit_mebibytes} MiB"

    @property
    def limit_bytes(self) -> int:
        return self.limit_mebibytes * MIB


ON_CPU = (
    Case("narrow", "none", 48),
    Case("words", "none", 64),
    Case("many words", "full", 48),
    Case("narrow", "selective", 48),
    Case("narrow", "full", 48),
    Case("words", "full", 64),
    Case("words", "selective", 64),
    Case("many words", "none", 64),
    Case("many words", "selective", 48),
)
ON_GPU = (
    Case("gpt 23M", "none", 8 << 10, "cuda"),
    Case("gpt 86M", "none", 16 << 10, "cuda"),
    Case("gpt 86M", "full", 8 << 10, "cuda"),
)
CASES = {"cpu": ON_CPU, "cuda": ON_GPU}
QUICK = {"cpu": 2, "cuda": 1}
"""How many of the cases."""


@dataclass
class Search:
    """What a finder did; sent from its process to the one that prints."""

    tried: list[int] = field(default_factory=list)
    fitted: list[int] = field(default_factory=list)
    answer: int | None = None
    seconds: float = 0.0
    """CPU seconds of its one thread, as other work on the machine then does not count; on a GPU those of the clock."""
    died: str = ""
    later: str = ""
    """How training the answer went on: "fine", "out of memory" or the error."""

    @property
    def out_of_memory(self) -> int:
        return len(self.tried) - len(self.fitted)


def main() -> None:
    chosen = options(__doc__)
    cases = CASES[chosen.device]
    results: list[tuple[Case, int, dict[str, Search]]] = []
    for case in cases[: QUICK[chosen.device]] if chosen.quick else cases:
        true_limit = find_true_limit(case)
        found = {finder: search_of(finder, case) for finder in FINDERS}
        results.append((case, true_limit, found))
        print_case(case, true_limit, found)
    print_table(results)
    print(json.dumps(last_line(results)))


# Processes


def in_fresh_process(function: Callable[..., Any], *args: Any) -> Any:
    """Return function(*args), called in a process forked from one that has only imported.

    Raise RuntimeError if that process dies.
    """
    from batchscout.trainers.device.memory import MALLOC_ENVIRONMENT

    os.environ.update(MALLOC_ENVIRONMENT, OMP_NUM_THREADS="1", PYTORCH_ALLOC_CONF="expandable_segments:True")
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    receiving, sending = context.Pipe(duplex=False)
    process = context.Process(target=_send_result, args=(sending, function, args))
    process.start()
    sending.close()
    try:
        if not receiving.poll(TIMEOUT_SECONDS):
            process.kill()
            raise RuntimeError(f"no answer after {TIMEOUT_SECONDS:.0f} s")
        return receiving.recv()
    except EOFError:
        process.join()
        raise RuntimeError(f"its process ended with {process.exitcode}") from None
    finally:
        process.join()


def _send_result(sending: Connection, function: Callable[..., Any], args: tuple[Any, ...]) -> None:
    import torch

    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    sending.send(function(*args))


def warm_up(case: Case) -> None:
    """Touch every kernel once, so that only what a probe itself needs is left to count."""
    from batchscout.trainers.device.memory import give_back

    for size in WARM_UP_SIZES:
        probe(case, size)
    give_back()


# One probe


def config(case: Case, micro_batch_size: int) -> Any:
    from batchscout.trainers.config import TrialConfig

    model = dict(MODELS[case.model])
    seq_len = model.pop("seq_len")
    return TrialConfig.model_validate({
        "model": {"target": "gpt", "kwargs": model},
        "data": {
            "target": "python_stdlib",
            "kwargs": {"seq_len": seq_len, "tokenizer": "bytes", "max_text_bytes": 1_000_000},
        },
        "micro_batch_size": micro_batch_size,
        "gradient_accumulation_steps": ACCUMULATION,
        "activation_checkpointing": case.activation_checkpointing,
        "compile": False,
        "learning_rate": 1e-3,
        "schedule": {"type": "constant"},
        "sample_budget": 10**9,
        "precision": "bfloat16" if case.device == "cuda" else "float32",
        "evaluation_samples": micro_batch_size,
        "statistics": False,  # the others have none
    })  # fmt: skip


def held(case: Case, taken_bytes: int = 0) -> contextlib.AbstractContextManager[None]:
    """Hold this process to the case's limit while the block runs. It has taken `taken_bytes` of that limit already; a GPU's
    allocator knows that by itself."""
    from batchscout.trainers.device.memory import memory_of

    return memory_of(device_of(case)).held_to(case.limit_bytes - (0 if case.device == "cuda" else taken_bytes))


def device_of(case: Case) -> Any:
    import torch

    from batchscout.trainers.device.device import pick_device

    return pick_device() if case.device == "cuda" else torch.device("cpu")


def now(case: Case) -> float:
    return time.perf_counter() if case.device == "cuda" else time.process_time()


def probe(case: Case, micro_batch_size: int, steps: int = STEPS) -> float:
    """Return the peak in bytes of so many steps and an evaluation; raise the allocator's error if they do not fit."""
    from batchscout.trainers.reporting.evaluation import evaluate
    from batchscout.trainers.run import STEPS_PER_INTERVAL, Run

    run = Run(config(case, micro_batch_size), device_of(case))
    for number in range(1, steps + 1):
        run.step()
        if number % STEPS_PER_INTERVAL == 0 or number == steps:  # as the loop does
            run.read()
    evaluate(run)
    return run.meter.peak.peak_bytes()


def peak_or_none(case: Case, micro_batch_size: int) -> float | None:
    """Return None if it runs out of memory, after everything that it held was freed."""
    from batchscout.trainers.device.memory import give_back
    from batchscout.trainers.device.out_of_memory import is_out_of_memory

    peak = None
    try:
        with held(case):
            peak = probe(case, micro_batch_size)
    except Exception as error:
        if not is_out_of_memory(error):
            raise
    give_back()
    return peak


def logged_probe(case: Case, micro_batch_size: int, search: Search) -> float | None:
    search.tried.append(micro_batch_size)
    peak = peak_or_none(case, micro_batch_size)
    if peak is not None:
        search.fitted.append(micro_batch_size)
    return peak


# The true limit


def find_true_limit(case: Case) -> int:
    """Return the largest size that fits. Each size is tried in a process of its own."""
    prediction, _ = in_fresh_process(predict, case)
    expected = max(1, int((case.limit_bytes - prediction.base_bytes) / prediction.bytes_per_sample))
    fits, fails = enclosed(expected, lambda size: fits_alone(case, size))
    while fails - fits > 1:
        size = (fits + fails) // 2
        fits, fails = (size, fails) if fits_alone(case, size) else (fits, size)
    around = {size: fits_alone(case, size) for size in (fits - 1, fits, fits + 1, fits + 2)}
    if list(around.values()) != [True, True, False, False]:
        print(f"{case}: the limit is ragged: {around}")
    return fits


def enclosed(expected: int, fits: Callable[[int], bool]) -> tuple[int, int]:
    """Return a size that fits and a larger one that does not, of sizes that lie twice as far from `expected` each time."""
    away = 1
    if fits(expected):
        inside, outside = expected, expected + 1
        while fits(outside):
            inside, outside, away = outside, outside + 2 * away, 2 * away
    else:
        inside, outside = expected - 1, expected
        while inside and not fits(inside):
            inside, outside, away = max(0, inside - 2 * away), inside, 2 * away
    return inside, outside


@functools.cache
def fits_alone(case: Case, micro_batch_size: int) -> bool:
    return in_fresh_process(first_peak_or_none, case, micro_batch_size) is not None


def first_peak_or_none(case: Case, micro_batch_size: int) -> float | None:
    warm_up(case)
    return peak_or_none(case, micro_batch_size)


# The finders: each says its answer, and logs what it tried


def search_of(finder: str, case: Case) -> Search:
    """Return the finder's search, after 200 steps with its answer, all in a process of its own."""
    prediction, seconds = in_fresh_process(predict, case) if finder == "ours" else (None, 0.0)
    try:
        search = in_fresh_process(search_here, finder, case, prediction)
    except RuntimeError as error:
        search = Search(died=str(error))
    search.seconds += seconds
    return search


def predict(case: Case) -> tuple[Line, float]:
    from batchscout.trainers.before.prediction import predict

    started = now(case)
    return predict(config(case, 2)).lines[-1], now(case) - started


def search_here(finder: str, case: Case, prediction: Line | None) -> Search:
    search = Search()
    find, go_on = FINDERS[finder](case, search, prediction)
    warm_up(case)
    started = now(case)
    try:
        search.answer = find()
    except Exception as error:
        search.died = f"{type(error).__name__}: {error}"
    search.seconds = now(case) - started
    if search.answer:
        search.later = how_it_ends(go_on)
    return search


def train_on(case: Case, search: Search) -> None:
    with held(case):
        probe(case, search.answer or 0, LATER_STEPS)


def how_it_ends(train: Callable[[], object]) -> str:
    from batchscout.trainers.device.out_of_memory import is_out_of_memory

    try:
        train()
    except Exception as error:
        return "out of memory" if is_out_of_memory(error) else f"{type(error).__name__}: {error}"
    return "fine"


Finder = tuple[Callable[[], int | None], Callable[[], object]]
"""(the search, training its answer on)"""


def ours(case: Case, search: Search, prediction: Line | None) -> Finder:
    def find() -> int | None:
        probes: list[Probe] = []
        capacity = (1 - HEADROOM) * case.limit_bytes
        while not isinstance(step := next_probe(probes, capacity, prediction, largest=LARGEST), SearchEnd):
            peak = logged_probe(case, step.micro_batch_size, search)
            probes.append(Probe(step.micro_batch_size, peak is not None and peak <= capacity, peak))
        return step.micro_batch_size

    return find, lambda: train_on(case, search)


def doubling_and_bisecting(case: Case, search: Search, _: Line | None) -> Finder:
    def find() -> int:
        fits, fails, size = 0, LARGEST + 1, 1
        while fails - fits > 1:
            if logged_probe(case, size, search) is None:
                fails = size
            else:
                fits = size
            size = min(2 * fits, LARGEST) if fails > LARGEST else (fits + fails) // 2
        return fits

    return find, lambda: train_on(case, search)


def accelerate(case: Case, search: Search, _: Line | None) -> Finder:
    from accelerate.utils import find_executable_batch_size  # pyright: ignore[reportMissingImports]  (an extra)

    def find(batch_size: int) -> int:
        search.tried.append(batch_size)
        with held(case):
            probe(case, batch_size)
        search.fitted.append(batch_size)
        return batch_size

    return find_executable_batch_size(find, starting_batch_size=LARGEST), lambda: train_on(case, search)


def lightning_power(case: Case, search: Search, _: Line | None) -> Finder:
    return lightning(case, search, "power")


def lightning_binsearch(case: Case, search: Search, _: Line | None) -> Finder:
    return lightning(case, search, "binsearch")


def lightning(case: Case, search: Search, mode: str) -> Finder:
    """Call `Tuner.scale_batch_size` and then `fit`, as its guide does. A probe is one held run of the fit loop."""
    import lightning.pytorch as L  # pyright: ignore[reportMissingImports]  (an extra)
    from lightning.pytorch.tuner.tuning import Tuner  # pyright: ignore[reportMissingImports]  (an extra)

    trainer = L.Trainer(
        accelerator="gpu" if case.device == "cuda" else "cpu", devices=1, max_steps=LATER_STEPS,
        precision="bf16-mixed" if case.device == "cuda" else "32-true", accumulate_grad_batches=ACCUMULATION,
        val_check_interval=STEPS * ACCUMULATION, limit_val_batches=1, num_sanity_val_steps=0, logger=False,
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    made: list[Any] = []

    def find() -> int | None:
        made.append(lightning_module(case, search))
        return Tuner(trainer).scale_batch_size(made[0], mode=mode, steps_per_trial=STEPS)

    return find, lambda: trainer.fit(made[0])


def lightning_module(case: Case, search: Search) -> Any:
    import lightning.pytorch as L  # pyright: ignore[reportMissingImports]  (an extra)
    import torch
    from torch.utils.data import DataLoader

    from batchscout.trainers.data.samples import load_data
    from batchscout.trainers.model.activation_checkpointing import apply_to_blocks
    from batchscout.trainers.model.models import initial_module
    from batchscout.trainers.step.optimizers import build_optimizer

    trial = config(case, 2)

    class Module(L.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.batch_size = 2
            self.limits = contextlib.ExitStack()
            self.train_set: Any
            self.val_set: Any
            self.train_set, self.val_set = load_data(trial.data)
            self.model = apply_to_blocks(initial_module(trial, self.train_set), trial)

        def training_step(self, batch: Any) -> Any:
            loss_sum, num_targets = self.model(batch)
            return loss_sum / num_targets

        def validation_step(self, batch: Any) -> None:
            self.model(batch)

        def configure_optimizers(self) -> Any:
            return build_optimizer(self.model, trial)

        def configure_gradient_clipping(self, *_: Any, **__: Any) -> None:
            """Clip by torch's own function: under autocast Lightning refuses to, for any fused optimizer."""
            torch.nn.utils.clip_grad_norm_(self.parameters(), 1.0)

        def train_dataloader(self) -> Any:
            return DataLoader(self.train_set, batch_size=self.batch_size, shuffle=True, drop_last=True)

        def val_dataloader(self) -> Any:
            return DataLoader(self.val_set, batch_size=self.batch_size)

        def on_train_start(self) -> None:
            self.limits.close()  # a loop that ran out of memory did not end
            self.limits.enter_context(held(case, bytes_of(self.model, self.optimizers())))
            if search.answer is None:
                search.tried.append(self.batch_size)

        def on_train_end(self) -> None:
            self.limits.close()
            if search.answer is None:
                search.fitted.append(self.batch_size)

    return Module()


def bytes_of(model: Any, optimizer: Any) -> int:
    """Return the bytes of parameters and optimizer state: Lightning makes them before its loop and keeps them."""
    states = [value for state in optimizer.state.values() for value in state.values() if hasattr(value, "nbytes")]
    return sum(tensor.nbytes for tensor in [*model.parameters(), *states])


FINDERS: dict[str, Callable[[Case, Search, Line | None], Finder]] = {
    "ours": ours,
    "doubling and bisecting": doubling_and_bisecting,
    "accelerate": accelerate,
    "lightning power": lightning_power,
    "lightning binsearch": lightning_binsearch,
}


# Tables


def unused(search: Search, true_limit: int) -> float:
    """Return the unused share of the true limit; 0 if warm caches let a finder find more than a fresh process does."""
    return max(0.0, 1 - (search.answer or 0) / true_limit)


def print_case(case: Case, true_limit: int, found: dict[str, Search]) -> None:
    print(f"{case}: {true_limit} fit", flush=True)
    for finder, search in found.items():
        end = search.died or f"{search.answer}, {unused(search, true_limit):.1%} unused, then {search.later}"
        print(f"    {finder}: {' '.join(_marked(search))}: {end} ({search.seconds:.1f} s)", flush=True)


def _marked(search: Search) -> list[str]:
    """Return the sizes in the order in which they were tried, with a cross where memory ran out."""
    return [f"{size}{'' if size in search.fitted else 'x'}" for size in search.tried]


def print_table(results: list[tuple[Case, int, dict[str, Search]]]) -> None:
    from importlib.metadata import version

    print(f"{machine()}, accelerate {version('accelerate')}, lightning {version('lightning')}")
    print(f"means over {len(results)} cases")
    print(
        f"{'finder':>24} {'probes':>7} {'out of memory':>14} {'unused':>7} {'seconds':>8} {'later out of memory':>20} {'died':>5}"
    )
    for finder, line in means(results).items():
        print(
            f"{finder:>24} {line['probes']:>7.1f} {line['out_of_memory']:>14.1f} {line['unused']:>7.1%} "
            f"{line['seconds']:>8.1f} {line['later_out_of_memory']:>20} {line['died']:>5}"
        )


def means(results: list[tuple[Case, int, dict[str, Search]]]) -> dict[str, dict[str, float]]:
    return {finder: _means_of([(limit, found[finder]) for _, limit, found in results]) for finder in FINDERS}


def _means_of(searches: list[tuple[int, Search]]) -> dict[str, float]:
    return {
        "probes": statistics.mean(len(search.tried) for _, search in searches),
        "out_of_memory": statistics.mean(search.out_of_memory for _, search in searches),
        "unused": statistics.mean(unused(search, limit) for limit, search in searches),
        "seconds": statistics.mean(search.seconds for _, search in searches),
        "later_out_of_memory": sum(search.later not in ("", "fine") for _, search in searches),
        "died": sum(bool(search.died) for _, search in searches),
    }


def last_line(results: list[tuple[Case, int, dict[str, Search]]]) -> dict[str, Any]:
    return means(results) | {"cases": len(results)}


if __name__ == "__main__":
    main()
