"""What the runs on a GPU share: options, checks that write a JSON line each, and a time limit that they end within."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

HERE, ROOT = Path(__file__).parent, Path(__file__).parents[2]

GPT2: dict[str, Any] = {"num_layers": 12, "num_heads": 12, "hidden_dim": 768, "vocab_size": 50_304}
TINY: dict[str, Any] = {"num_layers": 2, "num_heads": 2, "hidden_dim": 32, "vocab_size": 256}


class NeedsCuda(Exception):
    """What a CPU cannot show; the message says what."""


class Lines:
    """Writes every finding at once, so that a run which is cut off keeps what it has found."""

    def __init__(self, path: Path | None, limit_seconds: float) -> None:
        self._path, self._until = path, time.monotonic() + limit_seconds
        self.num_amiss = 0

    def seconds_left(self) -> float:
        return max(0.0, self._until - time.monotonic())

    def say(self, name: str, **figures: Any) -> None:
        line = json.dumps({"check": name, **figures}, default=str)
        print(line, flush=True)
        if self._path is not None:
            with self._path.open("a") as file:
                file.write(line + "\n")

    def take(self, name: str, seconds: float, function: Callable[[], dict[str, Any]]) -> None:
        """Run a check that takes about so many seconds, and say what it found, or why it found nothing: a failure of one
        costs no other."""
        if self.seconds_left() < seconds:
            return self.say(name, left_out=f"{self.seconds_left():.0f} s are left, and it takes about {seconds:.0f}")
        started = time.monotonic()
        try:
            found = function()
        except NeedsCuda as error:
            return self.say(name, skipped=f"needs CUDA: {error}")
        except Exception as error:  # whatever it is, the checks that follow are to run
            found = {"ok": False, "raised": f"{type(error).__name__}: {error}"[:2000]}
        self.num_amiss += found.get("ok") is False
        self.say(name, **found, seconds=round(time.monotonic() - started, 2))


def options(description: str | None, limit_seconds: int) -> argparse.Namespace:
    """Return the options that all runs have. Unless --device is cuda, no GPU is visible."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda")
    parser.add_argument(
        "--tiny", action="store_true", help="sizes that a CPU runs in a minute: to see that each line runs"
    )
    parser.add_argument("--out", type=Path, help="also append the lines to this file")
    parser.add_argument("--limit-seconds", type=float, default=limit_seconds, help="start nothing that would end later")
    chosen = parser.parse_args()
    if chosen.device == "cpu":
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
    path = [str(ROOT), str(HERE), str(ROOT / "benchmarks"), *filter(None, [os.environ.get("PYTHONPATH")])]
    os.environ["PYTHONPATH"] = os.pathsep.join(path)  # for the processes that it starts
    sys.path[:0] = [str(ROOT), str(ROOT / "benchmarks")]
    return chosen


def ended(lines: Lines) -> None:
    """Say that the run came to its end, and exit with 1 where a check was not as expected."""
    lines.say("end", num_amiss=lines.num_amiss)
    raise SystemExit(1 if lines.num_amiss else 0)


def gpt(tiny: bool, seq_len: int = 1024, **kwargs: Any) -> dict[str, Any]:
    """Return the keys `model` and `data` of a configuration: GPT-2's smallest shape on bytes, or a tiny one."""
    shape, length = (TINY, 64) if tiny else (GPT2, seq_len)
    text = {"seq_len": length, "tokenizer": "bytes", "max_text_bytes": 300_000 if tiny else 8_000_000}
    return {
        "model": {"target": "gpt", "kwargs": {**shape, **kwargs}},
        "data": {"target": "python_stdlib", "kwargs": text},
    }


def in_fresh_process(file: str, function: str, told: dict[str, Any], timeout: float, **environment: str) -> Any:
    """Return function(**told) of a file beside this one, called in a process of its own. Raises RuntimeError with its last
    words where it fails."""
    code = f"import json, sys, {Path(file).stem} as m; print(json.dumps(m.{function}(**json.loads(sys.argv[1]))))"
    command = [sys.executable, "-c", code, json.dumps(told)]
    done = subprocess.run(
        command, cwd=HERE, env={**os.environ, **environment}, capture_output=True, text=True, timeout=timeout
    )
    if done.returncode:
        raise RuntimeError(f"exit status {done.returncode}: {done.stderr[-1500:]}")
    return json.loads(done.stdout.splitlines()[-1])


def synchronize(device: Any) -> None:
    import torch

    if device.type == "cuda":
        torch.cuda.synchronize(device)


@contextlib.contextmanager
def no_waiting(device: Any) -> Iterator[None]:
    """Make whatever waits for the GPU an error."""
    import torch

    if device.type != "cuda":
        yield
        return
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")
