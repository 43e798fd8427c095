"""What the lines of a GPU's run share: where they run, until when, and a process of its own for each."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

HERE, ROOT = Path(__file__).parent, Path(__file__).parents[2]

GPT2: dict[str, Any] = {"num_layers": 12, "num_heads": 12, "hidden_dim": 768, "vocab_size": 50_304}
TINY: dict[str, Any] = {"num_layers": 2, "num_heads": 2, "hidden_dim": 32, "vocab_size": 256}

Found = dict[str, Any]


class Lines:
    """Writes every finding at once, so that a run which is cut off keeps what it has found."""

    def __init__(self, path: Path | None) -> None:
        self._path, self._one_at_a_time = path, threading.Lock()
        self.num_amiss = 0

    def say(self, name: str, **figures: Any) -> None:
        line = json.dumps({"line": name, **figures}, default=str)
        with self._one_at_a_time:
            self.num_amiss += figures.get("ok") is False
            print(line, flush=True)
            if self._path is not None:
                with self._path.open("a") as file:
                    file.write(line + "\n")


@dataclass(frozen=True)
class Setting:
    """Where a line runs, and until when."""

    device: Literal["cpu", "cuda"]
    tiny: bool
    folder: Path
    """Studies and caches lie here."""
    lines: Lines
    until: float
    """By time.monotonic(), when whatever still runs is ended."""
    running: set[int]
    """The process groups that the lines have started."""

    def seconds_left(self) -> float:
        return max(0.0, self.until - time.monotonic())

    def in_fresh_process(
        self, module: str, function: str, environment: dict[str, str] | None = None, **told: Any
    ) -> Any:
        """Return function(device, tiny, **told) of a module beside this one, called in a process of its own: what crashes or
        hangs there costs no other line. Raises RuntimeError with its last words where it fails."""
        code = f"import json, sys, {module}; print(json.dumps({module}.{function}(**json.loads(sys.argv[1]))))"
        told = {"device": self.device, "tiny": self.tiny, **told}
        done = self.command([sys.executable, "-c", code, json.dumps(told)], environment)
        if done.returncode:
            raise RuntimeError(f"exit status {done.returncode}: {done.stderr[-1500:]}")
        return json.loads(done.stdout.splitlines()[-1])

    def command(
        self, command: list[str], environment: dict[str, str] | None = None
    ) -> subprocess.CompletedProcess[str]:
        """Run a command until its end, or until this line's; then it is interrupted as by Ctrl-C, and killed 15 s later."""
        process = subprocess.Popen(
            command, cwd=HERE, env=os.environ | (environment or {}), stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True,
        )  # fmt: skip
        self.running.add(process.pid)
        out = err = ""
        for seconds, then in ((self.seconds_left(), signal.SIGINT), (15.0, signal.SIGKILL), (5.0, None)):
            try:
                out, err = process.communicate(timeout=seconds)
                break
            except subprocess.TimeoutExpired:
                if then is not None:
                    end(process.pid, then)
        self.running.discard(process.pid)
        code = process.poll()
        return subprocess.CompletedProcess(command, -signal.SIGKILL if code is None else code, out, err)


def end(group: int, by: signal.Signals) -> None:
    with suppress(ProcessLookupError):
        os.killpg(group, by)


@dataclass(frozen=True)
class Line:
    """One thing to find out. seconds: what it takes on a GPU, as far as is known."""

    name: str
    seconds: float
    run: Callable[[Setting], Found]
    alone: bool = True
    """False: nothing of it is timed, nor does it fill the GPU, so that it runs beside its neighbours of this kind."""

    def take(self, setting: Setting) -> None:
        """Say what it found, or why it found nothing: a failure of one costs no other. One that takes twice as long as is known,
        and half a minute more, is ended."""
        left, say = setting.seconds_left(), setting.lines.say
        if left < (1.0 if setting.tiny else self.seconds):
            return say(self.name, left_out=f"{left:.0f} s are left, and it takes about {self.seconds:.0f}")
        started = time.monotonic()
        if not setting.tiny:
            setting = replace(setting, until=min(setting.until, started + 2 * self.seconds + 30))
        try:
            found = self.run(setting)
        except Exception as error:  # whatever it is, the lines that follow are to run
            found = {"ok": False, "raised": f"{type(error).__name__}: {error}"[:2000]}
        say(self.name, **found, seconds=round(time.monotonic() - started, 2))


def needs_cuda(what: str) -> Found:
    """Return the finding of a line that a CPU cannot show."""
    return {"skipped": f"needs CUDA: {what}"}


def gpt(tiny: bool, seq_len: int = 1024, **kwargs: Any) -> dict[str, Any]:
    """Return the keys `model` and `data` of a configuration: GPT-2's smallest shape on bytes, or a tiny one."""
    shape, length = (TINY, 64) if tiny else (GPT2, seq_len)
    text = {"seq_len": length, "tokenizer": "bytes", "max_text_bytes": 300_000 if tiny else 8_000_000}
    return {
        "model": {"target": "gpt", "kwargs": {**shape, **kwargs}},
        "data": {"target": "python_stdlib", "kwargs": text},
    }


def synchronize(device: Any) -> None:
    import torch

    if device.type == "cuda":
        torch.cuda.synchronize(device)
