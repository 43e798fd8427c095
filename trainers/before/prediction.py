"""Peak memory of a training step without taking it: fake tensors on the CPU, and their bytes counted.

Several ranks are predicted as one of them. FSDP2 is torch's own, in a process group without peers: what it gathers,
prefetches, keeps whole between exchanges and frees is followed as it does it, and an exchange's buffers are counted
without those of the library that exchanges. DDP's buckets are followed in `batchscout.trainers.before.one_of_several`.

Eager code only: what is counted is what is dispatched, and a compiled graph plans its buffers by itself. The eager
prediction is the estimate of a compiled mode until that is measured. Only the compiler knows a memory budget's peak, which
lies between those of `full` and `none`: that of `none` is predicted. The kernels are a CPU's: what CUDA's allocator rounds up
and its libraries work in is for a measurement to add.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import asdict
from functools import partial
from typing import Any

import torch

from batchscout.trainers.before.live_bytes import LiveBytes, no_collection
from batchscout.trainers.before.one_of_several import followed, ranks_of
from batchscout.trainers.before.one_sequence import one_sequence_each
from batchscout.trainers.before.own_process import asked, own_process
from batchscout.trainers.before.peak_memory import Line, PeakMemory, peak_of
from batchscout.trainers.config import TrialConfig
from batchscout.trainers.data.batches import fetch
from batchscout.trainers.data.order import longest
from batchscout.trainers.data.samples import first_of, load_data
from batchscout.trainers.errors import NotFollowed, Obstacle
from batchscout.trainers.knobs import activation_offload, optimizer_offload, with_settings
from batchscout.trainers.model.contract import fake_batch
from batchscout.trainers.model.knobs import head_if_wanted
from batchscout.trainers.model.models import build_model
from batchscout.trainers.model.shapes import NumbersAre, shapes_alone, why_not_followed
from batchscout.trainers.noise.step_statistics import parameters_moved, sums_of_step
from batchscout.trainers.step.learner import Learner

ON_THE_HOST = (activation_offload.NAME, optimizer_offload.NAME)
"""The knobs that leave bytes in the memory of the host, where this prediction's tensors are, too."""
# Any two sizes say the same; 1 is left out, as torch takes a dimension of one element apart from all others.
TRACED_SIZES = (2, 8)
NEXT = "\x1e"
"""Stands before what is said of each configuration, so that nothing is taken for the last words of another."""

# What a warm CPU process takes beside its tensors: the ends of pages, small blocks of the heap. Measured minus traced
# peaks of a 2.2M-parameter GPT at 2 and 16 samples: 0.4 to 0.8 MiB in every mode, 1.6 at most in a process's first run.
# Libraries keep more, once for every larger or new shape, so it shows in the first run at it alone: MKL packing buffers
# of 1 to 2 MiB a thread (none with MKL_DISABLE_FAST_MM=1), oneDNN its kernels for low precision, 10 MiB (4 with
# ONEDNN_PRIMITIVE_CACHE_CAPACITY=0).
PROCESS_BYTES = 2.0**20


class NotPredictable(Exception):
    """Fake tensors cannot follow this configuration; the message says why, and so does `why`."""

    def __init__(self, why: NotFollowed) -> None:
        super().__init__(str(why))
        self.why = why


def predict_in_own_process(configs: Sequence[TrialConfig]) -> list[PeakMemory | NotPredictable | ValueError]:
    """Return `predict` of each, or what it raised.

    A process of its own does it, which imports what this one does: neither the models nor a crash reach this one.
    """
    if not configs:
        return []
    question = [config.model_dump(mode="json") for config in configs]
    with own_process("batchscout.trainers.before.prediction", question, CUDA_VISIBLE_DEVICES="") as process:
        answers = [_read(answer) for answer in process.answers()]
        if len(answers) == len(configs):
            return answers
        said = next(iter(process.last_words().rpartition(NEXT)[2].strip().splitlines()[-1:]), "nothing said")
        crashed = NotPredictable(NotFollowed(Obstacle.ENDED, f"exit code {process.exit_code()}: {said}"))
    return [*answers, crashed, *predict_in_own_process(configs[len(answers) + 1 :])]


def _read(answer: dict[str, Any]) -> PeakMemory | NotPredictable | ValueError:
    if "bad_input" in answer:
        return ValueError(answer["bad_input"])
    if "not_predictable" in answer:
        why = answer["not_predictable"]
        return NotPredictable(NotFollowed(Obstacle(why["obstacle"]), why["what"], why["where"]))
    return PeakMemory(tuple(Line(*line) for line in answer["lines"]))


def main() -> None:
    """Answer for each configuration as soon as its peak is known."""
    with asked() as (question, answer):
        for config in question:
            print(NEXT, end="", file=sys.stderr, flush=True)
            answer(_answer(TrialConfig.model_validate(config)))


def _answer(config: TrialConfig) -> dict[str, Any]:
    try:
        return {"lines": [[line.base_bytes, line.bytes_per_sample] for line in predict(config).lines]}
    except NotPredictable as error:
        return {"not_predictable": asdict(error.why)}
    except ValueError as error:
        return {"bad_input": str(error)}


def predict(config: TrialConfig) -> PeakMemory:
    """Return the peak of one rank's training as eager code, from before the model is built until a step's statistics
    are read.

    Raises ValueError for bad input, NotPredictable where fake tensors cannot follow.
    """
    config = with_settings(config)
    if on_host := [name for name in ON_THE_HOST if name in config.memory_knobs]:
        raise NotPredictable(NotFollowed(Obstacle.ON_THE_HOST, " and ".join(on_host)))
    train_set = first_of(load_data(config.data)[0], 1)
    sample = fetch(train_set, longest(train_set, 1, config.long_samples))
    try:
        timelines = {size: live_bytes(_as_traced(config, size), train_set, sample) for size in TRACED_SIZES}
    except ValueError:
        raise
    except Exception as error:
        raise NotPredictable(why_not_followed(error)) from error
    return peak_of(timelines).raised_by(PROCESS_BYTES)


def _as_traced(config: TrialConfig, micro_batch_size: int) -> TrialConfig:
    mode = config.activation_checkpointing
    eager = {"compile": False, "activation_checkpointing": "none" if isinstance(mode, float) else mode}
    return config.model_copy(update={"micro_batch_size": micro_batch_size, **eager})


def live_bytes(config: TrialConfig, train_set: Any, sample: Any) -> list[float]:
    """Return the bytes of the tensors alive on one rank after each operation of a run's first two steps.

    The first step, of one micro-batch, makes the optimizer's state; during the second, of two where the run accumulates, all
    is alive that ever is: a gradient beside the activations. The run's counts are left out, as they are scalars.
    """
    head_name = head_if_wanted(config, train_set)
    with ranks_of(config) as mesh, shapes_alone(), no_collection(), LiveBytes() as live:
        with NumbersAre(0):
            module = build_model(config.model, train_set).train()
        if config.model.target == config.data.target:  # it has made the samples, too, and these are not the device's
            live.only([*module.parameters(), *module.buffers()])
        device = torch.device("cpu")
        learner = Learner(config, module, device, head_name=head_name, distribute=partial(followed, mesh=mesh))
        learner.scaler = torch.amp.GradScaler(enabled=False)  # it reads what fake tensors do not have, and is a scalar
        for num_micro_batches in (1, min(2, max(config.accumulations))):
            batches = (fake_batch(sample, config.micro_batch_size) for _ in range(num_micro_batches))
            with one_sequence_each(sample):
                learner.accumulate(batches, num_micro_batches)
            with NumbersAre(1), torch.compiler.set_stance("force_eager"):
                learner.update(torch.ones(()), config.effective_batch_size)
        if config.statistics:
            sums_of_step(learner.optimizer, parameters_moved(learner.optimizer))
    return live.timeline


if __name__ == "__main__":
    main()
