"""Is a step as fast as the best loop's? Ours and a loop written by hand, as nanoGPT's is, take turns at a micro-batch size.

Every turn is a line with tokens/s, MFU, clock, power, throttle reasons and peaks; then come the medians of each side against that
of the loop by hand, of which the goal is 1.0 or more.
"""

from __future__ import annotations

import multiprocessing
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.connection import Connection
from typing import Any

from lines import Found, Setting, gpt, synchronize

ROUNDS, TURN_SECONDS = 3, 3.0
FIRST_TURN_SECONDS = 0.01
"""Long enough for ten steps, after which all is compiled."""
NUM_KERNELS = 15
BY_HAND = "by hand"
# What each side of ours compiles, how it takes its loss, and whether it measures statistics.
OURS: dict[str, tuple[bool | str, str, bool]] = {
    "ours, whole": ("whole", "whole", False),
    "ours, blocks": (True, "whole", False),
    "ours, whole, statistics": ("whole", "whole", True),
    "ours, blocks, statistics": (True, "whole", True),
    "ours, whole, chunked": ("whole", "chunked", False),
}
TOLD = (
    "mfu", "clock_hertz", "gpu_clock_ratio", "gpu_watts", "gpu_throttle_reasons", "peak_memory_bytes", "peak_allocated_bytes",
)  # fmt: skip
GIB_PER_SAMPLE = 1.1
"""More than GPT-2's step of 1,024 tokens takes; so many sides compile at once as fit."""


def turns(setting: Setting, size: int, names: Sequence[str]) -> Found:
    """The sides in turns. One that does not fit is named, and costs the others nothing.

    Each compiles first, as many at once as fit: what compiles is the CPU, and a side finds what those before it have compiled.
    """
    size, seconds = (2, 0.2) if setting.tiny else (size, TURN_SECONDS)
    sides = {name: Side(name, setting.device, setting.tiny, size) for name in (BY_HAND, *names)}
    found: dict[str, list[float]] = {}
    say = setting.lines.say
    try:
        with ThreadPoolExecutor(max(1, int(gib_of(setting) / (GIB_PER_SAMPLE * size)))) as threads:
            first = dict(
                zip(
                    sides, threads.map(lambda side: side.take(FIRST_TURN_SECONDS, setting), sides.values()), strict=True
                )
            )
        for name, figures in first.items():
            say("compiled", side=name, micro_batch_size=size, **figures)
        fit = [name for name, figures in first.items() if "tokens_per_second" in figures]
        for round_ in range(2 if setting.tiny else ROUNDS):
            for name in fit:
                figures = sides[name].take(seconds, setting)
                say("turn", side=name, micro_batch_size=size, round=round_, **figures)
                if "tokens_per_second" in figures:
                    found.setdefault(name, []).append(figures["tokens_per_second"])
    finally:
        for side in sides.values():
            side.finish()
    rates = {name: statistics.median(values) for name, values in found.items()}
    hand = rates.get(BY_HAND)
    against = {name: rate / hand for name, rate in rates.items()} if hand else {}
    failed = {name: figures["raised"] for name, figures in first.items() if "raised" in figures}
    return {
        "micro_batch_size": size, "tokens_per_second": rates, "times_by_hand": against, "failed": failed,
        "expected": "ours at 1.0 or more", "ok": bool(rates) and not failed,
    }  # fmt: skip


def gib_of(setting: Setting) -> float:
    """Return the memory of the GPU; on a CPU that of two of its sides."""
    if setting.device == "cpu":
        return 2 * 2 * GIB_PER_SAMPLE
    import pynvml

    pynvml.nvmlInit()
    return int(pynvml.nvmlDeviceGetMemoryInfo(pynvml.nvmlDeviceGetHandleByIndex(0)).total) / 2**30


class Side:
    """A process that has one side's model alone, so that its peaks are that side's, and waits for its turns."""

    def __init__(self, name: str, device: str, tiny: bool, size: int) -> None:
        spawn = multiprocessing.get_context("spawn")
        self._there, theirs = spawn.Pipe()
        self._process = spawn.Process(target=run_side, args=(theirs, name, device, tiny, size), daemon=True)
        self._process.start()

    def take(self, seconds: float, setting: Setting) -> dict[str, Any]:
        """Return the figures of a turn of so many seconds; {out_of_memory} where it does not fit, {raised} where it fails
        otherwise. Raises TimeoutError at the end of the line's time."""
        self._there.send(seconds)
        if not self._there.poll(setting.seconds_left()):
            raise TimeoutError("no answer from a side before the end of this line's time")
        return self._there.recv()

    def finish(self) -> None:
        self._process.kill()
        self._process.join()


def run_side(driver: Connection, name: str, device: str, tiny: bool, size: int) -> None:
    from batchscout.trainers.device import memory
    from batchscout.trainers.device.device import pick_device
    from batchscout.trainers.device.out_of_memory import is_out_of_memory

    place, turn = pick_device(), None
    while True:
        seconds = driver.recv()
        try:
            turn = turn or (by_hand if name == BY_HAND else ours)(config(name, tiny, size), place)
            driver.send(turn(seconds))
        except Exception as error:  # the other sides are to go on
            what = "out_of_memory" if is_out_of_memory(error, memory.memory_of(place).free_bytes()) else "raised"
            driver.send({what: f"{type(error).__name__}: {error}"[:300]})
        memory.give_back()


def config(name: str, tiny: bool, size: int) -> Any:
    from batchscout.trainers.config import TrialConfig

    compiled, cross_entropy, statistics_on = OURS.get(name, (False, "whole", False))
    return TrialConfig.model_validate({
        **gpt(tiny, cross_entropy=cross_entropy), "micro_batch_size": size, "compile": compiled, "learning_rate": 6e-4,
        "sample_budget": 10**9, "precision": "bfloat16", "statistics": statistics_on, "schedule": {"type": "constant"},
    })  # fmt: skip


def ours(trial: Any, place: Any) -> Callable[[float], dict[str, float]]:
    """Return what trains as a run does for so many seconds."""
    from batchscout.trainers.noise.gradient_noise import FIRST_STEPS
    from batchscout.trainers.run import STEPS_PER_INTERVAL, Run
    from batchscout.trainers.speed.throughput import NUM_WARMUP_STEPS

    run = Run(trial, place)
    run.num_steps = FIRST_STEPS  # of which it looks at every gradient; a run worth timing is past them

    def turn(seconds: float) -> dict[str, float]:
        for _ in range(NUM_WARMUP_STEPS):
            run.step()
        run.read()
        run.meter.begin_pace()
        run.meter.peak.forget()
        until = time.perf_counter() + seconds
        while time.perf_counter() < until:
            for _ in range(STEPS_PER_INTERVAL):  # as the loop does
                run.step()
            run.read()
        found = run.metrics()
        return {key: found[key] for key in ("tokens_per_second", *TOLD) if key in found}

    return turn


def by_hand(trial: Any, place: Any) -> Callable[[float], dict[str, float]]:
    """Return nanoGPT's loop: the model compiled as one graph, fused AdamW, batches pinned and copied while the GPU computes."""
    import torch

    from batchscout.trainers.data.samples import first_of, load_data
    from batchscout.trainers.device.device_peak import device_peak
    from batchscout.trainers.device.memory import memory_of
    from batchscout.trainers.model.models import initial_module
    from batchscout.trainers.speed.flops import work_of
    from batchscout.trainers.speed.throughput import StepClock, utilisation
    from batchscout.trainers.step.optimizers import build_optimizer

    train_set, _ = load_data(trial.data)
    module = initial_module(trial, train_set)
    work = work_of(trial, module, first_of(train_set, 1))
    module.to(place)
    optimizer, model = build_optimizer(module, trial), torch.compile(module, dynamic=False)
    meter, clock = memory_of(place).peak(), StepClock(place)
    tokens = trial.micro_batch_size * trial.data.kwargs["seq_len"]
    batches = random_batches(train_set, trial.micro_batch_size, place)
    batch = next(batches)

    def step() -> None:
        nonlocal batch
        with torch.autocast(place.type, torch.bfloat16):
            loss_sum, num_targets = model(batch)
            loss = loss_sum / num_targets
        batch = next(batches)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(module.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    def turn(seconds: float) -> dict[str, float]:
        median = statistics.median(timed(step, clock, meter, place, seconds))
        peak = device_peak(place, trial.precision)
        found = {"peak_memory_bytes": float(meter.peak_bytes()), **memory_of(place).metrics(), **clock.load.metrics()}
        found |= utilisation(work, peak, trial.micro_batch_size / median)
        return {"tokens_per_second": tokens / median} | {key: found[key] for key in TOLD if key in found}

    return turn


def timed(step: Callable[[], None], clock: Any, meter: Any, place: Any, seconds: float) -> list[float]:
    """Return the seconds of each step that began within so many; the first few, and their memory, do not count."""
    from batchscout.trainers.speed.throughput import NUM_WARMUP_STEPS

    for _ in range(NUM_WARMUP_STEPS):
        step()
    synchronize(place)
    meter.forget()
    clock.read()
    taken, until = list[float](), time.perf_counter() + seconds
    while time.perf_counter() < until:
        for _ in range(10):
            step()
            clock.end_of_step()
        taken += [step_time.seconds for step_time in clock.read()]
    return taken


def random_batches(train_set: Any, size: int, device: Any) -> Iterator[Any]:
    import torch

    from batchscout.trainers.data.batches import fetch

    generator = torch.Generator().manual_seed(0)
    while True:
        batch = fetch(train_set, torch.randint(len(train_set), (size,), generator=generator).tolist())
        if device.type == "cuda":
            batch = {key: value.pin_memory().to(device, non_blocking=True) for key, value in batch.items()}
        yield batch


def longest_kernels(device: str, tiny: bool, size: int) -> Found:
    """Return the operations of a step that take longest on the device, in microseconds a step."""
    from torch.profiler import ProfilerActivity, profile

    from batchscout.trainers.device.device import pick_device
    from batchscout.trainers.run import Run

    size = 2 if tiny else size  # which a side of `turns` has compiled
    run, num_steps = Run(config("ours, whole", tiny, size), pick_device()), 3
    for _ in range(3):
        run.step()
    run.read()
    cuda = [ProfilerActivity.CUDA] if device == "cuda" else []
    with profile(activities=[ProfilerActivity.CPU, *cuda]) as profiled:
        for _ in range(num_steps):
            run.step()
        synchronize(run.device)
    time_of = "self_device_time_total" if device == "cuda" else "self_cpu_time_total"
    rows = sorted(profiled.key_averages(), key=lambda row: getattr(row, time_of), reverse=True)[:NUM_KERNELS]
    return {"microseconds": {row.key[:120]: round(getattr(row, time_of) / num_steps, 1) for row in rows}}
