"""Peak memory of a training step without taking it: fake tensors on the CPU, and their bytes counted.

Eager code only: what is counted is what is dispatched, and a compiled graph plans its buffers by itself. Until
`trainers.before.peak_memory.calibrated` has one measurement of it, the eager prediction is the estimate of a compiled
mode. A memory budget is the compiler's alone: its peak lies between that of `full` and that of `none`, which is what is
predicted. The kernels are a CPU's: what CUDA's allocator rounds up and its libraries work in is for a measurement to
add.

`python -m trainers.before.prediction` is the other end of `predict_in_own_process`.
"""

from __future__ import annotations

import contextlib
import gc
import json
import os
import subprocess
import sys
import warnings
import weakref
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only

from trainers.before.peak_memory import Line, PeakMemory, peak_of
from trainers.config import TrialConfig
from trainers.data.batches import fetch
from trainers.data.order import longest
from trainers.data.samples import load_data
from trainers.errors import said_by
from trainers.knobs import activation_offload, optimizer_offload, with_settings
from trainers.model.activation_checkpointing import apply_to_blocks
from trainers.model.contract import fake_batch
from trainers.model.knobs import head_if_wanted, with_knobs
from trainers.model.losses import autocasting
from trainers.model.models import build_model
from trainers.noise.gradient_noise import MicroGradientNorms
from trainers.noise.step_statistics import parameters_moved, sums_of_step
from trainers.step.accumulation import accumulate_gradient
from trainers.step.optimizers import build_optimizer
from trainers.step.update import update_of
from trainers.step.weight_average import WeightAverage

ON_THE_HOST = (activation_offload.NAME, optimizer_offload.NAME)
"""The knobs that leave bytes in the memory of the host, where this prediction's tensors are, too."""
# Any two sizes say the same; 1 is left out, as torch takes a dimension of one element apart from all others.
TRACED_SIZES = (2, 8)

# What a warm CPU process takes beside its tensors: the ends of pages, small blocks of the heap. Measured minus traced
# peaks of a 2.2M-parameter GPT at 2 and 16 samples: 0.4 to 0.8 MiB in every mode, 1.6 at most in a process's first run.
# Libraries keep more, once for every larger or new shape, so it shows in the first run at it alone: MKL packing buffers
# of 1 to 2 MiB a thread (none with MKL_DISABLE_FAST_MM=1), oneDNN its kernels for low precision, 10 MiB (4 with
# ONEDNN_PRIMITIVE_CACHE_CAPACITY=0).
PROCESS_BYTES = 1 << 20


class NotPredictable(Exception):
    """Fake tensors cannot follow this configuration; the message says why."""


def predict_in_own_process(configs: Sequence[TrialConfig]) -> list[PeakMemory | NotPredictable | ValueError]:
    """Return `predict` of each, or what it raised.

    A process of its own does it, which imports what this one does: neither the models nor a crash reach this one.
    """
    if not configs:
        return []
    done = subprocess.run(
        [sys.executable, "-P", "-m", "trainers.before.prediction"],
        input=json.dumps([config.model_dump(mode="json") for config in configs]),
        env={**os.environ, "PYTHONPATH": os.pathsep.join(map(os.path.abspath, sys.path)), "CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
    )
    answers = [_read(json.loads(line)) for line in done.stdout.splitlines()]
    if len(answers) == len(configs):
        return answers
    said = next(iter(done.stderr.strip().splitlines()[-1:]), "nothing said")
    crashed = NotPredictable(f"the process that followed it ended with exit code {done.returncode}: {said}")
    return [*answers, crashed, *predict_in_own_process(configs[len(answers) + 1 :])]


def _read(answer: dict[str, Any]) -> PeakMemory | NotPredictable | ValueError:
    if "bad_input" in answer:
        return ValueError(answer["bad_input"])
    if "not_predictable" in answer:
        return NotPredictable(answer["not_predictable"])
    return PeakMemory(tuple(Line(*line) for line in answer["lines"]))


def main() -> None:
    """Read [TrialConfig, ...] from stdin, and write for each a line of JSON to stdout as soon as it is known."""
    for told in json.load(sys.stdin):
        with contextlib.redirect_stdout(sys.stderr):  # a user's code may print
            answer = _answer(TrialConfig.model_validate(told))
        print(json.dumps(answer), flush=True)


def _answer(config: TrialConfig) -> dict[str, Any]:
    try:
        return {"lines": [[line.base_bytes, line.bytes_per_sample] for line in predict(config).lines]}
    except NotPredictable as error:
        return {"not_predictable": str(error)}
    except ValueError as error:
        return {"bad_input": str(error)}


def predict(config: TrialConfig) -> PeakMemory:
    """Return the peak of one rank's training as eager code, from before the model is built until a step's statistics
    are read.

    Raises ValueError for bad input, NotPredictable where fake tensors cannot follow.
    """
    config = with_settings(config)
    for name in ON_THE_HOST:
        if name in config.memory_knobs:
            raise NotPredictable(f"{name} keeps tensors on the host, and their bytes cannot be told from the device's")
    if config.parallel == "fsdp":
        raise NotPredictable("parallel: fsdp gathers and frees its shards as it goes, which one process cannot follow")
    train_set, _ = load_data(config.data)
    sample = fetch(train_set, longest(train_set, 1))
    try:
        timelines = {size: live_bytes(_as_traced(config, size), train_set, sample) for size in TRACED_SIZES}
    except ValueError:
        raise
    except Exception as error:
        said = next(iter(said_by(error).splitlines()), "")
        raise NotPredictable(f"fake tensors cannot follow it ({type(error).__name__}: {said})") from error
    return peak_of(timelines).scaled(PROCESS_BYTES, 1.0)


def _as_traced(config: TrialConfig, micro_batch_size: int) -> TrialConfig:
    mode = config.activation_checkpointing
    eager = {"compile": False, "activation_checkpointing": "none" if isinstance(mode, float) else mode}
    return config.model_copy(update={"micro_batch_size": micro_batch_size, **eager})


def live_bytes(config: TrialConfig, train_set: Any, sample: Any) -> list[float]:
    """Return the bytes of the tensors alive after each operation of a run's first two micro-batches."""
    head_name = head_if_wanted(config, train_set)
    with FakeTensorMode(allow_non_fake_inputs=True), warnings.catch_warnings(), _no_collection(), LiveBytes() as live:
        warnings.simplefilter("ignore")
        _two_micro_batches(config, train_set, sample, head_name)
    return live.timeline


def _two_micro_batches(config: TrialConfig, train_set: Any, sample: Any, head_name: str | None) -> None:
    """Allocate what `Run` allocates, from the same pieces.

    The first micro-batch makes the optimizer's state, and during the second all is alive that ever is. The run's loss
    scale and its counts are left out, as they are scalars.
    """
    module = build_model(config.model, train_set)
    loss = with_knobs(module, config, head_name)
    model = apply_to_blocks(module, config)
    parameters = [p for p in model.parameters() if p.requires_grad]
    optimizer = build_optimizer(model, config)
    half_life = config.ema_half_life_samples
    average = WeightAverage(parameters, half_life) if half_life else None
    norms = MicroGradientNorms(parameters) if config.statistics else None
    update = update_of(config, parameters, optimizer, torch.amp.GradScaler(enabled=False), nominal_targets=1)
    loss = update.watched(autocasting(loss, config, torch.device("cpu")))
    one = torch.ones(())
    for _ in range(2):
        if not _holds_its_gradient(config):
            optimizer.zero_grad(set_to_none=True)
        batches = [fake_batch(sample, config.micro_batch_size)]
        accumulate_gradient(model, loss, batches, num_micro_batches=1, scale=one, norms=norms)
        update.take(one)
        if average is not None:
            average.update(config.effective_batch_size)
    moved = parameters_moved(optimizer) if config.statistics else []
    if moved:  # none where each gradient was let go
        sums_of_step(optimizer, moved)


def _holds_its_gradient(config: TrialConfig) -> bool:
    """True if a gradient is alive beside the activations: from a step's second micro-batch on, and with DDP's buckets
    always."""
    return config.world_size > 1 or any(phase.gradient_accumulation_steps > 1 for phase in config.phases)


class LiveBytes(TorchDispatchMode):
    """Counts the bytes of the storages that are made within it, until they are freed."""

    def __init__(self) -> None:
        super().__init__()
        self.timeline: list[float] = []
        self._bytes_of: dict[int, int] = {}
        self._now = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        tree_map_only(torch.Tensor, self._see, result)
        self.timeline.append(self._now)
        return result

    def _see(self, tensor: torch.Tensor) -> None:
        storage = tensor.untyped_storage()
        if storage._cdata not in self._bytes_of:
            self._bytes_of[storage._cdata] = storage.nbytes()
            self._now += storage.nbytes()
            weakref.finalize(storage, self._forget, storage._cdata)

    def _forget(self, address: int) -> None:
        self._now -= self._bytes_of.pop(address)


@contextlib.contextmanager
def _no_collection() -> Iterator[None]:
    """Keep the garbage collector from freeing tensors at a moment that differs from time to time."""
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


if __name__ == "__main__":
    main()
