"""Is a GPU's path right? Each check writes what it found as a JSON line, with `ok: false` where that is not what is expected.

    python benchmarks/gpu/check.py [--device cpu|cuda] [--tiny] [--out FILE] [--limit-seconds 540]

On a CPU the same lines run, but for what CUDA alone can do, which is skipped by its name.
"""

from __future__ import annotations

import importlib.util
import json
import logging
import math
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from lines import ROOT, Lines, NeedsCuda, ended, gpt, in_fresh_process, no_waiting, options, synchronize

MIB, GIB = 2**20, 2**30
PEERS = {"gradient_error": ("accelerate", "lightning", "transformers"), "communication": ()}
SPLITS = ((1, 16), (4, 4), (16, 1))
"""(micro-batch size, accumulation steps) of one effective batch."""
MODES = ("none", "selective", "full")


def main() -> None:
    chosen = options(__doc__, 540)
    lines = Lines(chosen.out, chosen.limit_seconds)
    for name, seconds, function in checks(chosen.device, chosen.tiny):
        lines.take(name, 1 if chosen.tiny else seconds, partial(function, chosen.device, chosen.tiny))
    ended(lines)


Check = Callable[[str, bool], dict[str, Any]]


def checks(device: str, tiny: bool) -> list[tuple[str, float, Check]]:
    """Return (name, seconds that it may take on a GPU, function) of each. The longest come last."""
    # With 0.05 GiB even the tiny model that is compiled runs out; with the most, what is left should do.
    ballasts = (0.0,) if device == "cpu" else (0.05, 0.2, 0.5, 1.0, 2.0)
    return [
        ("versions", 5, versions),
        ("product of 8192 x 8192 in bfloat16", 10, product),
        ("copy within the device", 5, copy),
        ("Ray sees the GPU", 40, ray_sees_it),
        ("float32 gradient of every split", 40, gradient_of_splits),
        ("bfloat16 gradient", 10, gradient_in_bfloat16),
        ("first loss and peak of every mode", 60, modes),
        ("float16 over 30 steps", 15, float16),
        ("no wait in a step", 10, steps_do_not_wait),
        ("sum of the timed steps against the clock", 20, clocks_agree),
        ("bitwise resume under deterministic algorithms", 30, partial(resumed, True)),
        ("resume", 20, partial(resumed, False)),
        ("memory is back after running out of it", 40, memory_comes_back),
        *((f"compiling with {gib:g} GiB left", 40, partial(little_is_left, gib)) for gib in ballasts),
        ("gradient_error.py", 90, partial(benchmark, "gradient_error")),
        ("communication.py", 90, partial(benchmark, "communication")),
    ]


# The device


def versions(device: str, _: bool) -> dict[str, Any]:
    import platform

    import torch

    found = {"python": platform.python_version(), "torch": torch.__version__, "cuda": torch.version.cuda}
    return found | {"device": torch.cuda.get_device_name() if device == "cuda" else platform.processor()}


def product(device: str, tiny: bool) -> dict[str, Any]:
    import torch

    size, rounds = (256, 2) if tiny else (8192, 50)
    square = torch.rand(size, size, device=device).bfloat16()
    seconds = fastest(lambda: torch.mm(square, square), torch.device(device), rounds)
    return {"tflops": 2 * size**3 / seconds / 1e12, "expected": "about 800 on an H100 SXM, whose peak is 989"}


def copy(device: str, tiny: bool) -> dict[str, Any]:
    import torch

    source = torch.zeros((MIB if tiny else 4 * GIB) // 4, device=device)
    target = torch.empty_like(source)
    seconds = fastest(lambda: target.copy_(source), torch.device(device), 5)
    return {"bytes_per_second": 2 * source.nbytes / seconds, "expected": "about 3e12 on an H100, read and written"}


def fastest(function: Callable[[], object], device: Any, rounds: int) -> float:
    seconds = []
    for _ in range(rounds + 1):
        synchronize(device)
        started = time.perf_counter()
        function()
        synchronize(device)
        seconds.append(time.perf_counter() - started)
    return min(seconds[1:])


def ray_sees_it(device: str, _: bool) -> dict[str, Any]:
    expected = 1.0 if device == "cuda" else 0.0
    found = in_fresh_process(__file__, "gpus_of_ray", {}, 120)
    return {"gpus": found, "expected": expected, "ok": found == expected}


def gpus_of_ray() -> float:
    from orchestrator.execution.local_cluster import protect_local_cluster

    protect_local_cluster()  # or Ray leaves a token in ~/.ray, which later clusters on this host then demand
    import ray

    ray.init("local", num_cpus=1, include_dashboard=False, log_to_driver=False, logging_level=logging.ERROR)
    try:
        return ray.cluster_resources().get("GPU", 0.0)
    finally:
        ray.shutdown()


# Steps


def trial(tiny: bool, **changes: Any) -> Any:
    from trainers.config import TrialConfig

    fields = {
        **gpt(tiny, seq_len=256), "micro_batch_size": 4, "compile": False, "learning_rate": 1e-3, "sample_budget": 10**6,
        "evaluation_samples": 4, "optimizer": {"max_gradient_norm": None},
    }  # fmt: skip
    return TrialConfig.model_validate(fields | changes)


def run_of(config: Any, device: str) -> Any:
    import torch

    from trainers.run import Run

    return Run(config, torch.device(device))


def gradient(config: Any, device: str, *, exact: bool = False) -> Any:
    """Return the gradient of the first step on the host; exact: in float64."""
    import torch

    run = run_of(config, device)
    if exact:
        run.module.double()
    seen: list[Any] = []
    run.optimizer.register_step_pre_hook(
        lambda *_: seen.append(torch.cat([p.grad.flatten().double().cpu() for p in run.parameters]))
    )
    run.step()
    return seen[0]


def relative(a: Any, b: Any) -> float:
    return ((a - b).norm() / b.norm()).item()


def exact_gradient(tiny: bool, num_micro_batches: int = 1) -> Any:
    return gradient(trial(tiny, gradient_accumulation_steps=num_micro_batches), "cpu", exact=True)


def gradient_of_splits(device: str, tiny: bool) -> dict[str, Any]:
    exact = exact_gradient(tiny, num_micro_batches=4)  # of 4 samples, as the trial has them
    errors = {
        f"{m}x{k}": relative(gradient(trial(tiny, micro_batch_size=m, gradient_accumulation_steps=k), device), exact)
        for m, k in SPLITS
    }
    return {"errors": errors, "expected": "at most 1e-5 against float64", "ok": max(errors.values()) <= 1e-5}


def gradient_in_bfloat16(device: str, tiny: bool) -> dict[str, Any]:
    error = relative(gradient(trial(tiny, precision="bfloat16"), device), exact_gradient(tiny))
    return {"error": error, "expected": "at most 1e-2 against float64", "ok": error <= 1e-2}


def modes(device: str, tiny: bool) -> dict[str, Any]:
    losses, peaks = {}, {}
    for compiled in (False, True, "whole"):
        for mode in MODES if not compiled else ("none",):
            name = f"{mode}, {compiled}"
            run = run_of(trial(tiny, activation_checkpointing=mode, compile=compiled, precision="bfloat16"), device)
            run.step()
            losses[name] = run.read()[0].loss
            run.meter.peak.forget()
            run.step()
            found = run.metrics()
            peaks[name] = found.get("peak_allocated_bytes", found["peak_memory_bytes"])
            del run
            give_back()
    none, selective, full = (peaks[f"{mode}, False"] for mode in MODES)
    spread = max(losses.values()) - min(losses.values())
    in_order = device != "cuda" or none > selective > full  # a CPU's peak is its process's
    return {
        "losses": losses, "peak_bytes": peaks, "expected": "losses within 1e-3; none > selective > full",
        "ok": spread <= 1e-3 and in_order,
    }  # fmt: skip


def give_back() -> None:
    from trainers.device import memory

    memory.give_back()


def float16(device: str, tiny: bool) -> dict[str, Any]:
    run = run_of(trial(tiny, precision="float16", learning_rate=1e-4, optimizer={"max_gradient_norm": 1.0}), device)
    scales = []
    for _ in range(30):
        run.step()
        scales.append(run.scaler.get_scale())
    losses = [step.loss for step in run.read()]
    skipped = sum(after < before for before, after in zip([65536.0, *scales], scales, strict=False))
    finite = all(map(math.isfinite, losses))
    return {"first": losses[0], "last": losses[-1], "num_skipped": skipped, "ok": finite and skipped <= 5}


def steps_do_not_wait(device: str, tiny: bool) -> dict[str, Any]:
    run = run_of(trial(tiny, gradient_accumulation_steps=2, precision="bfloat16"), device)
    run.step()
    run.read()
    with no_waiting(run.device):
        run.step()
    run.read()
    if device != "cuda":
        raise NeedsCuda("an error for whatever waits; the step itself ran")
    return {"ok": True}


def clocks_agree(device: str, tiny: bool) -> dict[str, Any]:
    config = trial(tiny, precision="bfloat16", statistics=False)  # which are read between the timed steps
    run, num_steps = run_of(config, device), 10 if tiny else 50
    for _ in range(3):
        run.step()
    run.read()
    run.meter.begin_pace()
    synchronize(run.device)
    run.meter.clock.start()
    started, reading = time.perf_counter(), 0.0
    for number in range(num_steps):
        run.step()
        if number % 10 == 9:
            synchronize(run.device)  # so that what follows is the reading alone
            began = time.perf_counter()
            run.read()
            reading += time.perf_counter() - began
    wall, timed = time.perf_counter() - started, run.meter.pace.total_seconds()
    return {
        "wall_seconds": wall, "timed_seconds": timed, "reading_seconds": reading,
        "expected": "at most 2 % apart, and what reading takes", "ok": abs(wall - timed) <= 0.02 * wall + reading,
    }  # fmt: skip


def resumed(deterministic: bool, device: str, tiny: bool) -> dict[str, Any]:
    """Train whole, and with a stop at half, both with dropout."""
    told = {"tiny": tiny, "deterministic": deterministic}
    with tempfile.TemporaryDirectory() as folder:
        ends = [
            in_fresh_process(
                __file__, "ended_of_run", told | {"folder": f"{folder}/{name}", "stops": name == "stopped"}, 300,
                CUBLAS_WORKSPACE_CONFIG=":4096:8",
            )
            for name in ("whole", "stopped")
        ]  # fmt: skip
    (whole, digest), (stopped, same) = ends
    bitwise = digest == same
    ok = bitwise if deterministic or device == "cpu" else abs(whole - stopped) <= 1e-3
    return {"losses": [whole, stopped], "bitwise": bitwise, "ok": ok}


def ended_of_run(tiny: bool, deterministic: bool, folder: str, stops: bool) -> tuple[float, str]:
    """Return the last loss of a run, and a digest of its weights."""
    import hashlib

    import torch

    from trainers.checkpoints.checkpoint import load_newest
    from trainers.loop import train
    from trainers.report import Answer

    fields = {"sample_budget": 64, "rungs": (32,), "evaluations": (64,), "deterministic": deterministic}
    config = trial(tiny, **fields, **gpt(tiny, seq_len=256, dropout=0.1))
    losses, left = [], [stops]

    def report(said: Any) -> Answer:
        losses.append(said.metrics.get("loss", 0.0))
        stop = bool(said.rungs) and left.pop() if left else False
        return Answer.STOP if stop else Answer.GO_ON

    while train(config, report, Path(folder)) is Answer.STOP:
        pass
    found = load_newest(Path(folder) / "checkpoints")
    assert found is not None
    digest = hashlib.sha256()
    for value in found[1]["model"].values():
        digest.update(value.cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes())
    return losses[-1], digest.hexdigest()


# Memory


def memory_comes_back(device: str, tiny: bool) -> dict[str, Any]:
    return in_fresh_process(__file__, "ran_out", {"device": device, "tiny": tiny}, 300, **malloc(device))


def malloc(device: str) -> dict[str, str]:
    from trainers.device.memory import MALLOC_ENVIRONMENT

    return MALLOC_ENVIRONMENT if device == "cpu" else {}


def ran_out(device: str, tiny: bool) -> dict[str, Any]:
    """Grow a batch under a limit until memory runs out, then run the small one again."""
    from trainers.device import memory
    from trainers.device.device import pick_device
    from trainers.device.out_of_memory import is_out_of_memory
    from trainers.loop import train

    limit, losses = (128 * MIB if tiny else 8 * GIB), list[float]()
    said, recognised, size = None, False, 4
    with tempfile.TemporaryDirectory() as folder:

        def one(micro_batch_size: int, name: str) -> None:
            fields = {"micro_batch_size": micro_batch_size, "sample_budget": micro_batch_size, "evaluation_samples": 0}
            config = trial(tiny, **fields, memory_limit_bytes=limit)
            train(config, lambda report: losses.append(report.metrics.get("loss", 0.0)), Path(folder) / name)

        one(4, "first")
        first, before = losses[-1], memory.bytes_kept(pick_device()) or 0
        while said is None:
            size *= 4
            try:
                one(size, f"m{size}")
            except (RuntimeError, MemoryError) as error:
                said, recognised = f"{type(error).__name__}: {error}"[:300], is_out_of_memory(error)
        after = memory.bytes_kept(pick_device()) or 0
        one(4, "again")
    found = {"ran_out_at": size, "said": said, "recognised": recognised, "more_bytes_kept": after - before}
    return found | {
        "losses": [first, losses[-1]],
        "ok": recognised and after - before <= 64 * MIB and first == losses[-1],
    }


def little_is_left(gib: float, device: str, tiny: bool) -> dict[str, Any]:
    """Compile in a fresh process while little of the GPU is left; keep what is said, whoever says it."""
    found = in_fresh_process(__file__, "compiled_with_little", {"gib": gib, "device": device, "tiny": tiny}, 300)
    if device != "cuda":
        raise NeedsCuda(f"ballast on the device; compiling without it: {found}")
    return found


def compiled_with_little(gib: float, device: str, tiny: bool) -> dict[str, Any]:
    import traceback

    import torch

    from trainers.before.compilation import warm_up
    from trainers.device import memory
    from trainers.device.out_of_memory import is_out_of_memory

    place = torch.device(device)
    ballast = ballast_that_leaves(int(gib * GIB), place) if device == "cuda" else None
    left = memory.free_bytes(place)
    texts, recognised = list[str](), list[bool]()
    for compiled in (True, "whole"):
        try:
            # A tiny model: what runs out is to be the compiler's and the driver's, not the room for the weights.
            warm_up(trial(True, compile=compiled, micro_batch_size=8, precision="bfloat16"), place)
        except Exception as error:  # all of them are what this check is after
            recognised.append(is_out_of_memory(error, memory.free_bytes(place)))
            texts.append("".join(traceback.format_exception_only(error))[:1000])
    del ballast
    return {"bytes_left": left, "texts": texts, "recognised": recognised, "ok": all(recognised)}


def ballast_that_leaves(left_bytes: int, device: Any) -> Any:
    """Fill the GPU but for so many bytes, or for a few more: not all that the driver calls free can be had at once."""
    import torch

    from trainers.device import memory

    size = max(0, (memory.free_bytes(device) or 0) - left_bytes)
    while True:
        try:
            return torch.empty(size, dtype=torch.uint8, device=device)
        except torch.OutOfMemoryError:
            size = max(0, size - 16 * MIB)


# Benchmarks


def benchmark(name: str, device: str, tiny: bool) -> dict[str, Any]:
    missing = [peer for peer in PEERS[name] if importlib.util.find_spec(peer) is None]
    if missing:
        return {"left_out": f"its peers are not installed: {', '.join(missing)}"}
    command = [sys.executable, str(ROOT / "benchmarks" / f"{name}.py"), "--device", device, "--quick"]
    done = subprocess.run(command, cwd=ROOT, env=os.environ, capture_output=True, text=True, timeout=240)
    if done.returncode:
        raise RuntimeError(done.stderr[-1500:])
    last = json.loads(done.stdout.splitlines()[-1])
    if name == "communication":
        return {"last_line": last, "ok": last["ratio_to_one_all_reduce"] == 1.0}
    return {"last_line": last, "ok": max(last["ours_1_rank"], last["ours_2_ranks"]) <= 1e-5}


if __name__ == "__main__":
    main()
