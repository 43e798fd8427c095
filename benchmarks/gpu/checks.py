"""Is a GPU's path right? What a line of all.py finds out in a process of its own, as a dict with `ok: false` where that is not
what is expected. On a CPU the same code runs, but for what CUDA alone can do."""

from __future__ import annotations

import json
import logging
import math
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from lines import ROOT, Found, Setting, gpt, needs_cuda, synchronize

MIB, GIB = 2**20, 2**30
SPLITS = ((1, 16), (4, 4), (16, 1))
"""(micro-batch size, accumulation steps) of one effective batch."""
MODES = ("none", "selective", "full")


# The device


def versions(device: str, tiny: bool) -> Found:
    import importlib.metadata
    import platform
    from datetime import UTC, datetime

    import torch

    found: Found = {
        "date": datetime.now(UTC).date().isoformat(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
    }
    found["ray"] = importlib.metadata.version("ray")
    if device == "cpu":
        return found | {"device": platform.processor()}
    import pynvml

    pynvml.nvmlInit()
    free, total = torch.cuda.mem_get_info()
    return found | {
        "device": torch.cuda.get_device_name(), "driver": pynvml.nvmlSystemGetDriverVersion(), "free_gib": free / GIB,
        "total_gib": total / GIB,
    }  # fmt: skip


def product(device: str, tiny: bool) -> Found:
    import torch

    size, rounds = (256, 2) if tiny else (8192, 50)
    square = torch.rand(size, size, device=device).bfloat16()
    seconds = fastest(lambda: torch.mm(square, square), torch.device(device), rounds)
    return {"tflops": 2 * size**3 / seconds / 1e12, "expected": "about 800 on an H100 SXM, whose peak is 989"}


def fastest(function: Callable[[], object], device: Any, rounds: int) -> float:
    seconds = []
    for _ in range(rounds + 1):
        synchronize(device)
        started = time.perf_counter()
        function()
        synchronize(device)
        seconds.append(time.perf_counter() - started)
    return min(seconds[1:])


def ray_sees_it(device: str, tiny: bool) -> Found:
    from batchscout.orchestrator.execution.local_cluster import protect_local_cluster

    protect_local_cluster()  # or Ray leaves a token in ~/.ray, which later clusters on this host then demand
    import ray

    expected = 1.0 if device == "cuda" else 0.0
    ray.init("local", num_cpus=1, include_dashboard=False, log_to_driver=False, logging_level=logging.ERROR)
    try:
        found = ray.cluster_resources().get("GPU", 0.0)
    finally:
        ray.shutdown()
    return {"gpus": found, "expected": expected, "ok": found == expected}


# Steps


def trial(tiny: bool, **changes: Any) -> Any:
    from batchscout.trainers.config import TrialConfig

    fields = {
        **gpt(tiny, seq_len=256), "micro_batch_size": 4, "compile": False, "learning_rate": 1e-3, "sample_budget": 10**6,
        "evaluation_samples": 4, "optimizer": {"max_gradient_norm": None},
    }  # fmt: skip
    return TrialConfig.model_validate(fields | changes)


def run_of(config: Any, device: str) -> Any:
    import torch

    from batchscout.trainers.run import Run

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


def gradient_of_splits(device: str, tiny: bool) -> Found:
    exact = exact_gradient(tiny, num_micro_batches=4)  # of 4 samples, as the trial has them
    errors = {
        f"{m}x{k}": relative(gradient(trial(tiny, micro_batch_size=m, gradient_accumulation_steps=k), device), exact)
        for m, k in SPLITS
    }
    return {"errors": errors, "expected": "at most 1e-5 against float64", "ok": max(errors.values()) <= 1e-5}


def gradient_in_bfloat16(device: str, tiny: bool) -> Found:
    error = relative(gradient(trial(tiny, precision="bfloat16"), device), exact_gradient(tiny))
    return {"error": error, "expected": "at most 1e-2 against float64", "ok": error <= 1e-2}


def modes(device: str, tiny: bool) -> Found:
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
    from batchscout.trainers.device import memory

    memory.give_back()


def float16(device: str, tiny: bool) -> Found:
    run = run_of(trial(tiny, precision="float16", learning_rate=1e-4, optimizer={"max_gradient_norm": 1.0}), device)
    scales = []
    for _ in range(30):
        run.step()
        scales.append(run.scaler.get_scale())
    losses = [step.loss for step in run.read()]
    skipped = sum(after < before for before, after in zip([65536.0, *scales], scales, strict=False))
    finite = all(map(math.isfinite, losses))
    return {"first": losses[0], "last": losses[-1], "num_skipped": skipped, "ok": finite and skipped <= 5}


def steps_do_not_wait(device: str, tiny: bool) -> Found:
    import torch

    run = run_of(trial(tiny, gradient_accumulation_steps=2, precision="bfloat16"), device)
    run.step()
    run.read()
    if device == "cuda":
        torch.cuda.set_sync_debug_mode("error")
    run.step()
    if device == "cuda":
        torch.cuda.set_sync_debug_mode("default")
    run.read()
    return {"ok": True} if device == "cuda" else needs_cuda("an error for whatever waits; the step itself ran")


def clocks_agree(device: str, tiny: bool) -> Found:
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


def resumed(setting: Setting, deterministic: bool) -> Found:
    """Train whole, and with a stop at half, both with dropout; side by side, as nothing of it is timed."""

    def ended(name: str) -> Any:
        told = {"deterministic": deterministic, "folder": f"{folder}/{name}", "stops": name == "stopped"}
        return setting.in_fresh_process(
            "checks", "ended_of_run", {"CUBLAS_WORKSPACE_CONFIG": ":4096:8"} if deterministic else None, **told
        )

    with tempfile.TemporaryDirectory(dir=setting.folder) as folder, ThreadPoolExecutor(2) as threads:
        (whole, digest), (stopped, same) = threads.map(ended, ("whole", "stopped"))
    bitwise = digest == same
    ok = bitwise if deterministic or setting.device == "cpu" else abs(whole - stopped) <= 1e-3
    return {"losses": [whole, stopped], "bitwise": bitwise, "ok": ok}


def ended_of_run(device: str, tiny: bool, deterministic: bool, folder: str, stops: bool) -> tuple[float, str]:
    """Return the last loss of a run, and a digest of its weights."""
    import hashlib

    import torch

    from batchscout.trainers.checkpoints.checkpoint import load_newest
    from batchscout.trainers.loop import train
    from batchscout.trainers.report import Answer

    fields = {"sample_budget": 64, "rungs": (32,), "evaluations": (64,), "deterministic": deterministic}
    config = trial(tiny, **fields, **gpt(tiny, seq_len=256, dropout=0.1))
    losses, left = [], [stops]

    def report(said: Any) -> Answer:
        losses.append(said.metrics.get("final_loss", 0.0))
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


def memory_comes_back(setting: Setting) -> Found:
    from batchscout.trainers.device.memory import MALLOC_ENVIRONMENT

    return setting.in_fresh_process("checks", "ran_out", MALLOC_ENVIRONMENT if setting.device == "cpu" else None)


def ran_out(device: str, tiny: bool) -> Found:
    """Grow a batch under a limit until memory runs out, then run the small one again."""
    from batchscout.trainers.device import memory
    from batchscout.trainers.device.device import pick_device
    from batchscout.trainers.device.out_of_memory import is_out_of_memory
    from batchscout.trainers.loop import train

    limit, losses = (128 * MIB if tiny else 8 * GIB), list[float]()
    said, recognised, size = None, False, 4
    with tempfile.TemporaryDirectory() as folder:

        def one(micro_batch_size: int, name: str) -> None:
            fields = {"micro_batch_size": micro_batch_size, "sample_budget": micro_batch_size, "evaluation_samples": 0}
            config = trial(tiny, **fields, memory_limit_bytes=limit)
            train(config, lambda report: losses.append(report.metrics.get("loss", 0.0)), Path(folder) / name)

        one(4, "first")
        first, before = losses[-1], memory.memory_of(pick_device()).bytes_kept() or 0
        while said is None:
            size *= 4
            try:
                one(size, f"m{size}")
            except (RuntimeError, MemoryError) as error:
                said, recognised = f"{type(error).__name__}: {error}"[:300], is_out_of_memory(error)
        after = memory.memory_of(pick_device()).bytes_kept() or 0
        one(4, "again")
    found = {"ran_out_at": size, "said": said, "recognised": recognised, "more_bytes_kept": after - before}
    return found | {
        "losses": [first, losses[-1]],
        "ok": recognised and after - before <= 64 * MIB and first == losses[-1],
    }


def little_is_left(setting: Setting, gib: float) -> Found:
    """Compile in a fresh process while little of the GPU is left, with nothing compiled before; keep what is said, whoever says
    it."""
    with tempfile.TemporaryDirectory(dir=setting.folder) as folder:
        # A CPU runs out of nothing there, and would compile the C++ headers anew.
        nothing_compiled = {"TORCHINDUCTOR_CACHE_DIR": folder} if setting.device == "cuda" else None
        return setting.in_fresh_process("checks", "compiled_with_little", nothing_compiled, gib=gib)


def compiled_with_little(device: str, tiny: bool, gib: float) -> Found:
    import traceback

    import torch

    from batchscout.trainers.before.compilation import warm_up
    from batchscout.trainers.device import memory
    from batchscout.trainers.device.out_of_memory import is_out_of_memory

    place = torch.device(device)
    ballast = ballast_that_leaves(int(gib * GIB), place) if device == "cuda" else None
    left = memory.memory_of(place).free_bytes()
    texts, recognised = list[str](), list[bool]()
    for compiled in (True, "whole") if device == "cuda" else (True,):
        try:
            # A tiny model: what runs out is to be the compiler's and the driver's, not the room for the weights.
            warm_up(trial(True, compile=compiled, micro_batch_size=8, precision="bfloat16"), place)
        except Exception as error:  # all of them are what this check is after
            recognised.append(is_out_of_memory(error, memory.memory_of(place).free_bytes()))
            texts.append("".join(traceback.format_exception_only(error))[:1000])
    del ballast
    if device != "cuda":
        return needs_cuda(f"ballast on the device; compiling without it: {texts or 'fine'}")
    return {"bytes_left": left, "texts": texts, "recognised": recognised, "ok": all(recognised)}


def ballast_that_leaves(left_bytes: int, device: Any) -> Any:
    """Fill the GPU but for so many bytes, or for a few more: not all that the driver calls free can be had at once."""
    import torch

    from batchscout.trainers.device import memory

    size = max(0, (memory.memory_of(device).free_bytes() or 0) - left_bytes)
    while True:
        try:
            return torch.empty(size, dtype=torch.uint8, device=device)
        except torch.OutOfMemoryError:
            size = max(0, size - 16 * MIB)


# Benchmarks


def gradient_error(setting: Setting) -> Found:
    last = last_line_of("gradient_error", setting)
    return {"last_line": last, "ok": max(last["ours_1_rank"], last["ours_2_ranks"]) <= 1e-5}


def communication(setting: Setting) -> Found:
    last = last_line_of("communication", setting)
    return {"last_line": last, "ok": last["ratio_to_one_all_reduce"] == 1.0}


def last_line_of(name: str, setting: Setting) -> Any:
    done = setting.command([
        sys.executable, str(ROOT / "benchmarks" / f"{name}.py"), "--device", setting.device, "--quick",
    ])  # fmt: skip
    if done.returncode:
        raise RuntimeError(f"exit status {done.returncode}: {done.stderr[-1500:]}")
    return json.loads(done.stdout.splitlines()[-1])
