"""One real forward and backward pass before anything is started, in a process of its own.

What a user's code does wrong there is said in seconds, and code that crashes, exits or hangs ends that process alone.
`python -m trainers.first_pass` is the other end of `first_pass`.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import signal
import subprocess
import sys
import threading
import warnings
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from typing import Literal, get_args

from torch import nn

from trainers import cgroup
from trainers.config import TrialConfig
from trainers.contract import check_adding_up, check_loss, check_shapes, check_sum
from trainers.data.batches import fetch, move
from trainers.data.samples import SampleSet, load_data
from trainers.device import pick_device
from trainers.errors import LossFault, first_line, users_frame
from trainers.losses import loss_function
from trainers.memory import free_bytes
from trainers.models import build_model
from trainers.out_of_memory import is_out_of_memory
from trainers.run import autocasting

SAMPLES = 2
"""Of the pass. BatchNorm takes no single one."""
BYTES_PER_WEIGHT_BYTE = 3
"""What the pass takes at least: weights, gradients and activations. A model for which there is not as much is followed with
fake tensors alone."""
_PR_SET_PDEATHSIG = 1

Part = Literal["data", "model", "pass"]
PARTS: tuple[Part, ...] = get_args(Part)
"""Loading the data, building the model, and the pass."""


@dataclass(frozen=True)
class FirstPass:
    outcome: Literal["passed", "refused", "raised", "ended", "slow", "too_large"]
    """refused: the loss is not what a run can train on. raised: the user's code raised something. ended: the process crashed or
    exited. slow: the pass had not come to an end in time. too_large: there was no room for a real one."""
    part: Part
    """Where it came to that."""
    said: str = ""
    """refused: the message. raised: the exception, with its file and line."""
    exit_code: int = 0
    """ended: how, as `subprocess` has it."""


def first_pass(config: TrialConfig, seconds: float, began: Callable[[Part], object] = lambda _: None) -> FirstPass:
    """Return what came of a forward and a backward pass of the trial's model, on the device that this machine has.

    seconds: how long the pass may take, without data and model. began: called as each part begins.
    """
    ran_out, part = threading.Event(), PARTS[0]
    with _child(config) as process, contextlib.ExitStack() as deadline:

        def end() -> None:
            ran_out.set()
            process.kill()

        assert process.stdout
        for line in process.stdout:
            told = json.loads(line)
            if "outcome" in told:
                return FirstPass(**told)
            part = told["part"]
            began(part)
            if part == "pass":
                timer = threading.Timer(seconds, end)
                timer.start()
                deadline.callback(timer.cancel)
        return FirstPass("slow" if ran_out.is_set() else "ended", part, exit_code=process.wait())


@contextlib.contextmanager
def _child(config: TrialConfig) -> Iterator[subprocess.Popen[str]]:
    """Start the other end, which imports what this process does; end it with this block."""
    process = subprocess.Popen(
        [sys.executable, "-P", "-m", "trainers.first_pass"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(map(os.path.abspath, sys.path))},
        text=True,
    )
    assert process.stdin
    assert process.stdout
    try:
        with process.stdin:
            process.stdin.write(config.model_dump_json())
        with process.stdout:
            yield process
    finally:
        process.kill()
        process.wait()


def main() -> None:
    """Read a TrialConfig from stdin; write a line of JSON to stdout as each part begins, and what came of the last."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)  # whoever asked may be killed
    with os.fdopen(os.dup(1), "w") as out:
        os.dup2(2, 1)  # a user's code may print
        for told in _parts(TrialConfig.model_validate_json(sys.stdin.read())):
            line = {"part": told} if isinstance(told, str) else asdict(told)
            print(json.dumps(line), file=out, flush=True)


def _parts(config: TrialConfig) -> Iterator[Part | FirstPass]:
    """Do one part after the other: yield each as it begins, and then what came of it all."""
    device, part = pick_device(), PARTS[0]
    try:
        yield part
        train_set, _ = load_data(config.data)
        yield (part := "model")
        module = build_model(config.model, train_set)
        yield (part := "pass")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield FirstPass("passed" if _take(config, module, train_set) else "too_large", part)
    except LossFault as error:
        yield FirstPass("refused", part, str(error))
    except (Exception, SystemExit) as error:
        if is_out_of_memory(error, free_bytes(device)):
            yield FirstPass("too_large", part)
        else:
            file, line = users_frame(error)
            yield FirstPass("raised", part, f"{type(error).__name__}: {first_line(error)} (in {file}, line {line})")


def _take(config: TrialConfig, module: nn.Module, train_set: SampleSet) -> bool:
    """Take the pass, and look whether the loss is a sum; False where fake tensors had to do."""
    device = pick_device()
    weight_bytes = sum(parameter.numel() * parameter.element_size() for parameter in module.parameters())
    if weight_bytes * BYTES_PER_WEIGHT_BYTE > (free_bytes(device) or cgroup.available_bytes()):
        check_shapes(config, train_set)
        return False
    module.to(device).train()
    loss = autocasting(loss_function(config.loss), config, device)
    indices = [number % len(train_set) for number in range(SAMPLES)]
    loss_sum, _ = check_loss(loss(module, move(fetch(train_set, indices), device)))
    loss_sum.backward()
    check_sum(module, loss, train_set, device)
    check_adding_up(module, loss, train_set, device)
    return True


if __name__ == "__main__":
    main()
